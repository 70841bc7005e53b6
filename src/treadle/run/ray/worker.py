"""A worker process of a cluster: what every one does first, how its methods are called, and how its end is noticed.

A call that is in flight fails when its worker dies. It does not notice a worker that hangs until its own deadline, which
may be an hour, and a worker that no call waits for is not noticed at all. So every worker gets health checks all the time.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import torch

from treadle.config import Config
from treadle.errors import ConfigError, DeadlineError, RankError, TreadleError, WorkerLostError
from treadle.observe.progress import Progress
from treadle.run.resume import seed_everything

Given = ParamSpec("Given")
Result = TypeVar("Result")

HEALTH_CHECKS = {"health checks": 1}
"""The concurrency group of calls that don't wait for the call that a rank is busy with, and its size."""
_SLICE_SECONDS = 1.0


class Warnings:
    """Warnings of a worker, kept until the driver takes them."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def warn(self, text: str) -> None:
        self._texts.append(text)

    def take(self) -> list[str]:
        """Return the warnings since the last call."""
        texts, self._texts = self._texts, []
        return texts


def show_warnings(texts: Sequence[str], progress: Progress) -> None:
    """Show what workers warned of."""
    for text in texts:
        progress.warn(text)


@dataclass(frozen=True)
class WorkerSetup:
    """The run a worker belongs to. Paths are the same on every node: a shared disk, or the same files on each."""

    config: Config
    model_path: str
    max_prompt: int
    folder: Path = field(default_factory=Path.cwd)  # relative paths of the configuration are from here
    import_paths: tuple[str, ...] = field(default_factory=lambda: tuple(sys.path))


class WorkerActor:
    """What every worker process has in common; Ray calls the methods of its subclasses.

    It works in the run's folder, with the run's import paths and number of threads. Ctrl-C, and the end of the terminal,
    are the driver's to handle.
    """

    def __init__(self, setup: WorkerSetup):
        if not setup.folder.is_dir():
            raise ConfigError(
                f"the run's folder {setup.folder} is not on node {os.uname().nodename}; share it between nodes"
            )
        os.chdir(setup.folder)
        sys.path.extend(path for path in setup.import_paths if path not in sys.path)
        torch.set_num_threads(setup.config.cluster.num_cpus_per_worker)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._setup, self._config = setup, setup.config
        self._warnings = Warnings()
        seed_everything(setup.config.train.seed)

    def alive(self) -> None:
        """Answer a health check."""


# Calls


_LOSS_SECONDS = 3.0
"""Once a worker has failed, how long the others may take to fail too: the one that died is the cause."""


@dataclass(frozen=True, eq=False)
class Call(Generic[Result]):
    """A remote call in flight. `what` names it in messages; `ref` may be an argument of other calls."""

    what: str
    ref: Any

    async def value(self, timeout_seconds: float | None = None) -> Result:
        """Return the call's result. Cancelling the wait cancels the call if its worker is async.

        Raises:
            WorkerLostError: if the worker died.
            DeadlineError: if the call takes too long.
            TreadleError: the worker's own; any other exception of a worker becomes one with its last line.
        """
        import ray
        from ray.exceptions import RayActorError, RayError, RayTaskError

        future = asyncio.wrap_future(self.ref.future())
        try:
            done, _ = await asyncio.wait((future,), timeout=timeout_seconds)
        except asyncio.CancelledError:
            ray.cancel(self.ref)
            future.cancel()
            raise
        if not done:
            future.cancel()
            raise DeadlineError(f"waited {timeout_seconds:g} s for {self.what}")
        try:
            result: Result = future.result()
            return result
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, TreadleError):
                raise cause from None
            if isinstance(cause, asyncio.CancelledError):
                raise TreadleError(f"{self.what} was cancelled") from error
            raise TreadleError(f"{self.what} failed: {_last_line(error)}") from error
        except RayActorError as error:
            if "creation task" in str(error):  # it refused to start: a restart would end the same way
                raise TreadleError(f"{self.what}: its worker did not start: {_last_line(error)}") from error
            raise WorkerLostError(f"{self.what}: its worker died ({_cause_of_death(error)})") from error
        except RayError as error:
            raise WorkerLostError(f"{self.what}: {_last_line(error)}") from error

    async def in_time(self, seconds: float) -> Result:
        """Return the call's result; a worker that is late is lost too, and raises `WorkerLostError`."""
        return (await all_in_time([self], seconds))[0]


async def all_in_time(calls: Sequence[Call[Result]], seconds: float) -> list[Result]:
    """Return the results of calls that run side by side.

    A worker that dies or is late raises `WorkerLostError`: the run can be resumed. Of several errors the first one that
    names a dead worker is raised, or else the first.
    """
    tasks = [asyncio.create_task(call.value(seconds)) for call in calls]
    try:
        _, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if waiting:
            await asyncio.wait(waiting, timeout=_LOSS_SECONDS)
        errors = [e for task in tasks if task.done() and (e := task.exception()) is not None]
        if not errors:
            return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    error = next((e for e in errors if isinstance(e, WorkerLostError)), errors[0])
    if isinstance(error, RankError | DeadlineError):
        raise WorkerLostError(str(error)) from error
    raise error


def _cause_of_death(error: Exception) -> str:
    """Return what Ray knows of a worker's end, in one short line."""
    text = str(error)
    pid = re.search(r"pid: (\d+)", text)
    exit_detail = re.search(r"Worker exit detail: (.*?)(?:Some common causes|$)", text, re.DOTALL)
    said = " ".join((exit_detail[1] if exit_detail else text.splitlines()[0]).split())[:200]
    return f"pid {pid[1]}: {said}" if pid else said


def _last_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip()[:400] if lines else type(error).__name__


Actor = TypeVar("Actor", bound=WorkerActor)


class Worker(Generic[Actor]):
    """A worker process as its callers see it. `name` is what messages call it."""

    def __init__(self, name: str, handle: Any):
        self.name, self.handle = name, handle

    @overload
    def call(
        self,
        what: str,
        method: Callable[Concatenate[Actor, Given], Coroutine[Any, Any, Result]],
        *args: Given.args,
        **kwargs: Given.kwargs,
    ) -> Call[Result]: ...
    @overload
    def call(
        self, what: str, method: Callable[Concatenate[Actor, Given], Result], *args: Given.args, **kwargs: Given.kwargs
    ) -> Call[Result]: ...
    def call(self, what: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Call[Any]:
        """Start a call of this method of the worker's class; `what` says in messages what was asked for."""
        return Call(f"{self.name}: {what}", getattr(self.handle, method.__name__).remote(*args, **kwargs))

    def check_health(self) -> Call[None]:
        """Send a health check."""
        return self.call("a health check", WorkerActor.alive)

    def kill(self) -> None:
        """End the process at once."""
        import ray

        ray.kill(self.handle)


class BusyWorker(Worker[Actor]):
    """A worker whose calls run one after the other, except health checks."""

    def check_health(self) -> Call[None]:
        (group,) = HEALTH_CHECKS
        return Call(f"{self.name}: a health check", self.handle.alive.options(concurrency_group=group).remote())


async def while_alive(
    work: Coroutine[Any, Any, Result],
    workers: Sequence[Worker[Any]],
    interval_seconds: float,
    silence_seconds: float,
) -> Result:
    """Return the result of `work`; cancel it and raise `WorkerLostError` if a worker dies meanwhile.

    Workers get a health check every `interval_seconds`, and may take `silence_seconds` to answer.
    """
    own = asyncio.create_task(work)
    checks = [asyncio.create_task(_check_health(worker, interval_seconds, silence_seconds)) for worker in workers]
    try:
        await asyncio.wait((own, *checks), return_when=asyncio.FIRST_COMPLETED)
        if not own.done():  # a call in flight says better what failed
            await asyncio.wait((own,), timeout=_LOSS_SECONDS)
        if own.done():
            return own.result()
        raise next(error for check in checks if check.done() and (error := check.exception()) is not None)
    finally:
        for task in (own, *checks):
            task.cancel()
        await asyncio.gather(own, *checks, return_exceptions=True)


async def _check_health(worker: Worker[Any], interval_seconds: float, silence_seconds: float) -> None:
    """Send health checks until one is not answered.

    The time is counted in short waits: if this process was stopped with all others, only one of them is late.
    """
    while True:
        await asyncio.sleep(interval_seconds)
        answer = asyncio.create_task(worker.check_health().value())
        try:
            left = silence_seconds
            while not answer.done() and left > 0:
                await asyncio.wait((answer,), timeout=min(_SLICE_SECONDS, left))
                left -= _SLICE_SECONDS
            if not answer.done():
                raise WorkerLostError(
                    f"{worker.name} has not answered a health check for {silence_seconds:g} s: it hangs, or its machine is gone "
                    "(--worker-silence-seconds)"
                )
            answer.result()
        finally:
            answer.cancel()
            await asyncio.gather(answer, return_exceptions=True)
