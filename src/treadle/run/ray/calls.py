"""Calls of remote workers: every wait has a deadline, names what it waits for, and says how a worker died."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from treadle.errors import DeadlineError, RankError, TreadleError, WorkerLostError

Result = TypeVar("Result")

LOSS_SECONDS = 3.0
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
            await asyncio.wait(waiting, timeout=LOSS_SECONDS)
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
