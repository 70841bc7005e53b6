"""When a cluster publishes: after each training step, and again for an engine that restarted, unless the trainer moved on."""

from __future__ import annotations

import asyncio

from treadle.observe.progress import Progress
from treadle.run.ray.remote_rollouts import RemoteRollouts
from treadle.run.ray.rollout_worker import RolloutStatus
from treadle.run.ray.train_group import TrainGroup
from treadle.weights import Publisher


class ClusterPublisher:
    """Brings the engines to the trainer's weights; `trainer` is None in a run that never trains.

    A restarted engine that cannot read the weights of the last publish gets them by another publish. If the trainer has
    changed its weights by then, the engine waits for the next one.
    """

    def __init__(self, engines: RemoteRollouts, trainer: TrainGroup | None, progress: Progress):
        self._engines, self._trainer, self._progress = engines, trainer, progress
        self._publisher = (
            None if trainer is None else Publisher(trainer, engines.receive, progress.warn, engines.prepare)
        )
        self._again: asyncio.Task[None] | None = None
        engines.on_status = self._react

    async def publish(self, version: int) -> None:
        """Bring all engines to the trainer's current weights, under this version."""
        if self._trainer is None or self._publisher is None:
            await self._engines.set_version(version)
            return
        async with self._trainer.weights:
            await self._publisher.publish(version)
            self._trainer.is_ahead = False

    def _react(self, status: RolloutStatus) -> None:
        """Show what the engines do; publish again if one waits for weights, and raise the error of such a publish."""
        is_ahead = self._trainer is not None and self._trainer.is_ahead
        if status.phase is not None and not is_ahead:
            self._progress.phase(*status.phase)
        if self._again is not None and self._again.done():
            self._again.result()
            self._again = None
        if status.wants_weights and self._again is None and not is_ahead:
            self._again = asyncio.create_task(self._publish_again())

    async def _publish_again(self) -> None:
        if self._trainer is None or self._publisher is None:
            return
        async with self._trainer.weights:
            if not self._trainer.is_ahead:
                await self._trainer.wake()  # it stays awake until the next rollout
                await self._publisher.repeat(lambda: True)

    async def close(self) -> None:
        """Cancel a publish that still runs."""
        if self._again is not None:
            self._again.cancel()
            await asyncio.gather(self._again, return_exceptions=True)
