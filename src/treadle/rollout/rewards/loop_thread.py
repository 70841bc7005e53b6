"""An event loop in a thread of its own for `async def` rewards: many run at once, each with its deadline.

A reward that waits too long is cancelled. One that blocks the loop can't be: its thread is left to itself, the next
call gets a new one, and only calls already on the blocked loop can suffer with it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

from treadle.rollout.rewards.forms import RewardFault, RewardFunction, evaluate_async
from treadle.rollout.rewards.inputs import RewardInput, RewardScore

_GRACE_SECONDS = 1.0
_END_SECONDS = 5.0

Scores = list[RewardScore | None]


class LoopThread:
    """Runs async rewards; nothing is started before the first call."""

    def __init__(self, timeout_seconds: float):
        self._timeout_seconds = timeout_seconds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._left: list[tuple[asyncio.AbstractEventLoop, threading.Thread]] = []
        self._closed = False

    async def call(self, reward: RewardFunction, inputs: Sequence[RewardInput]) -> Scores:
        """Run one call there and wait for it here; raises `RewardFault` at the deadline."""
        if self._closed:
            raise RewardFault("the scorer is closed")
        loop = self._running_loop()
        future = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._bounded(reward, inputs), loop))
        try:
            done, _ = await asyncio.wait({future}, timeout=self._timeout_seconds + _GRACE_SECONDS)
        except asyncio.CancelledError:
            future.cancel()
            raise
        if not done:
            future.cancel()
            if loop is self._loop:
                self._leave()
            raise RewardFault(f"timed out after {self._timeout_seconds:g} s (an async reward blocks the event loop)")
        if future.cancelled():
            raise RewardFault("was cancelled")
        return future.result()

    async def close(self) -> None:
        """Cancel what runs and stop the loop; waits at most 5 s."""
        self._closed = True
        current = self._thread
        self._leave()
        for loop, thread in self._left:
            loop.call_soon_threadsafe(loop.stop)
            if thread is current:  # the others may be blocked for ever; they end with the process
                await asyncio.to_thread(thread.join, _END_SECONDS)
        self._left.clear()

    def _leave(self) -> None:
        if self._loop is not None and self._thread is not None:
            self._left.append((self._loop, self._thread))
        self._loop, self._thread = None, None

    async def _bounded(self, reward: RewardFunction, inputs: Sequence[RewardInput]) -> Scores:
        task = asyncio.ensure_future(evaluate_async(reward, inputs))
        try:
            done, _ = await asyncio.wait({task}, timeout=self._timeout_seconds)
        finally:
            task.cancel()  # not waited for: a reward may refuse to be cancelled
        if not done:
            raise RewardFault(f"timed out after {self._timeout_seconds:g} s")
        if task.cancelled():
            raise RewardFault("cancelled itself")
        return task.result()

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=_serve, args=(self._loop,), name="async-rewards", daemon=True)
            self._thread.start()
        return self._loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Body of the thread: run until stopped, then cancel and drop what is left."""
    asyncio.set_event_loop(loop)
    loop.run_forever()
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks, timeout=_GRACE_SECONDS))
    loop.close()
