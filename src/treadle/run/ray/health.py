"""Health checks: every worker is asked all the time, so that one that dies or hangs ends the calls that wait for it.

A call that is in flight knows of a worker's death by itself. What it does not know of is a worker that nobody has
asked for anything, and one that has stopped: a call waits for that until its own deadline, which may be an hour.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from treadle.errors import WorkerLostError
from treadle.run.ray.calls import LOSS_SECONDS, settle

Result = TypeVar("Result")

_SLICE_SECONDS = 1.0


@dataclass(frozen=True, eq=False)
class Watched:
    """A worker by name; `ask` sends a health check, which it answers while it works, and returns the reference."""

    name: str
    ask: Callable[[], Any]


async def while_alive(
    work: Coroutine[Any, Any, Result], workers: Sequence[Watched], interval_seconds: float, silence_seconds: float
) -> Result:
    """The result of `work`; it is cancelled with a `WorkerLostError` where a worker is lost meanwhile.

    Workers are asked every `interval_seconds`, and may take `silence_seconds` to answer.
    """
    own = asyncio.create_task(work)
    watches = [asyncio.create_task(_follow(worker, interval_seconds, silence_seconds)) for worker in workers]
    try:
        await asyncio.wait((own, *watches), return_when=asyncio.FIRST_COMPLETED)
        if not own.done():  # a call in flight says better what was lost
            await asyncio.wait((own,), timeout=LOSS_SECONDS)
        if own.done():
            return own.result()
        raise next(error for watch in watches if watch.done() and (error := watch.exception()) is not None)
    finally:
        for task in (own, *watches):
            task.cancel()
        await asyncio.gather(own, *watches, return_exceptions=True)


async def _follow(worker: Watched, interval_seconds: float, silence_seconds: float) -> None:
    """Send health checks until one is not answered.

    The time is counted in short waits: where this process was stopped with all others, only one of them is late.
    """
    while True:
        await asyncio.sleep(interval_seconds)
        answer = asyncio.create_task(settle(worker.ask(), f"{worker.name}: a health check", None))
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
