"""Waiting for remote workers: every wait has a deadline, names what it waits for, and says how a worker was lost."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from treadle.errors import DeadlineError, EngineError, EngineLostError, TreadleError, WorkerLostError

LOSS_SECONDS = 3.0
"""Once a worker has failed, how long the others may take to say so: the one that died is the cause."""


async def settle(ref: Any, what: str, timeout_seconds: float | None) -> Any:
    """The value of a remote call. Cancelling the wait cancels the call where its worker is async.

    Raises `WorkerLostError` where the worker died, `DeadlineError` where it takes too long, and the worker's own
    `TreadleError`; any other exception of a worker is a `TreadleError` with its last line.
    """
    import ray
    from ray.exceptions import RayActorError, RayError, RayTaskError

    future = asyncio.wrap_future(ref.future())
    try:
        done, _ = await asyncio.wait((future,), timeout=timeout_seconds)
    except asyncio.CancelledError:
        ray.cancel(ref)
        future.cancel()
        raise
    if not done:
        future.cancel()
        raise DeadlineError(f"waited {timeout_seconds:g} s for {what}")
    try:
        return future.result()
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, TreadleError):
            raise cause from None
        if isinstance(cause, asyncio.CancelledError):
            raise TreadleError(f"{what} was cancelled") from error
        raise TreadleError(f"{what} failed: {_last_line(error)}") from error
    except RayActorError as error:
        if "creation task" in str(error):  # it refused to start: to try again would end the same way
            raise TreadleError(f"{what}: its worker did not start: {_last_line(error)}") from error
        raise WorkerLostError(f"{what}: its worker died ({_how(error)})") from error
    except RayError as error:
        raise WorkerLostError(f"{what}: {_last_line(error)}") from error


async def ask_engine(ref: Any, name: str, what: str, timeout_seconds: float | None = None) -> Any:
    """The same for an engine's worker: what is lost or late is an `EngineLostError`, what it refuses an `EngineError`."""
    try:
        return await settle(ref, f"{name}: {what}", timeout_seconds)
    except (WorkerLostError, DeadlineError) as error:
        raise EngineLostError(str(error)) from error
    except EngineError:
        raise
    except TreadleError as error:
        raise EngineError(str(error)) from error


def _how(error: Exception) -> str:
    """What Ray knows of a worker's end, in one short line."""
    text = str(error)
    pid = re.search(r"pid: (\d+)", text)
    exit_detail = re.search(r"Worker exit detail: (.*?)(?:Some common causes|$)", text, re.DOTALL)
    said = " ".join((exit_detail[1] if exit_detail else text.splitlines()[0]).split())[:200]
    return f"pid {pid[1]}: {said}" if pid else said


def _last_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip()[:400] if lines else type(error).__name__
