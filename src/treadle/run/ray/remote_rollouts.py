"""The rollout worker as the driver sees it: the side of the loop that generates, and engines that sleep."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from treadle.config import Config
from treadle.metrics import Metric
from treadle.observe.progress import Progress
from treadle.rollout.engines.base import EnginePart
from treadle.rollout.engines.pool import EnginePool
from treadle.run.loop import Collection
from treadle.run.ray.rollout_worker import RolloutActor, RolloutStatus
from treadle.run.ray.worker import Call, Worker, all_in_time, show_warnings
from treadle.training.checkpoint import Checkpoint
from treadle.types import Group
from treadle.weights import Offer

Result = TypeVar("Result")

STATUS_SECONDS = 0.3


class RemoteRollouts:
    """Rollouts that are collected by a `RolloutActor`.

    While it works its warnings are shown, and `on_status` is called with its status; an exception that it raises ends the call.
    The peak memory of the engines goes to `turns` when they fall asleep or wake.
    """

    def __init__(self, config: Config, worker: Worker[RolloutActor], progress: Progress, turns: list[Metric]):
        self.worker = worker
        self.on_status: Callable[[RolloutStatus], None] = lambda status: None
        self._config, self._progress, self._turns = config, progress, turns
        self._asleep: set[EnginePart] = set()
        # Of a call that may have to wait for requests in flight.
        self._seconds = config.rollout.rollout_timeout_seconds + config.cluster.worker_start_timeout_seconds

    async def collect(self, rollout_id: int) -> Collection:
        call = self.worker.call(f"rollout {rollout_id}", RolloutActor.collect, rollout_id)
        return await self._watched(call)

    async def evaluate(self) -> list[tuple[str, list[Group]]]:
        return await self._watched(self.worker.call("an evaluation", RolloutActor.evaluate))

    async def state(self, done: int) -> dict[str, Any]:
        return await self.worker.call("its part of a save", RolloutActor.state, done).in_time(self._seconds)

    async def sleep(self) -> None:
        """Free the engines' memory; do nothing if they sleep."""
        if not self._asleep:
            self._turns += await self.worker.call("sleep", RolloutActor.sleep).in_time(self._seconds)
            self._asleep = {"weights", "kv"}

    async def wake(self, part: EnginePart) -> None:
        """Restore this part of what `sleep` freed; do nothing if it is there."""
        if part in self._asleep:
            self._turns += await self.worker.call(f"wake {part}", RolloutActor.wake, part).in_time(self._seconds)
            self._asleep.remove(part)

    # Start and end

    async def load(self) -> int:
        """Have the worker read the prompts; return how many there are."""
        seconds = self._config.cluster.worker_start_timeout_seconds
        return await self.worker.call("loading the data", RolloutActor.load).in_time(seconds)

    async def open(self, checkpoint: Checkpoint | None, start_rollout_id: int) -> None:
        """Have the worker start the engines, and go to where the checkpoint was taken or this rollout begins."""
        seconds = self._config.cluster.worker_start_timeout_seconds
        what = "finding its place in the data"
        if checkpoint is not None:
            call = self.worker.call(what, RolloutActor.load_state, dict(checkpoint.state))
        else:
            call = self.worker.call(what, RolloutActor.skip, start_rollout_id)
        await all_in_time([self.worker.call("starting the engines", RolloutActor.open), call], seconds)

    # Weights

    async def num_receivers(self) -> int:
        """Return the number of processes that receive weights."""
        return await self._ask_engines("counting the engines", EnginePool.num_receivers)

    async def prepare(self) -> None:
        """Make all engines ready for new weights, which come next."""
        await self.wake("weights")
        await self._ask_engines("getting ready for new weights", EnginePool.prepare, self._config.cluster.on_publish)

    async def receive(self, offer: Offer) -> None:
        """Bring all engines to the offered weights."""
        await self._ask_engines("new weights", EnginePool.receive, offer)

    async def set_version(self, version: int) -> None:
        """Name the weights that the engines were loaded with, in a run that never trains."""
        await self._ask_engines("the version", EnginePool.set_version, version)

    async def _ask_engines(self, what: str, method: Callable[..., Coroutine[Any, Any, Result]], *args: Any) -> Result:
        call: Call[Result] = self.worker.call(what, RolloutActor.ask_engines, method, *args)
        return await call.in_time(self._seconds)

    # Status

    async def _watched(self, call: Call[Result]) -> Result:
        """Return the result of a long call, whose deadline the worker keeps; show meanwhile what it does."""
        waiting = asyncio.create_task(call.value())
        try:
            while not waiting.done():
                await asyncio.wait((waiting,), timeout=STATUS_SECONDS)
                await self._show_status()
            return waiting.result()
        finally:
            if not waiting.done():
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)

    async def _show_status(self) -> None:
        seconds = self._config.cluster.worker_silence_seconds
        status = await self.worker.call("its status", RolloutActor.status).in_time(seconds)
        show_warnings(status.warnings, self._progress)
        self.on_status(status)
