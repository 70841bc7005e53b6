"""New weights for the engines of a cluster: offered by the trainer, received by all engines, again if one died meanwhile."""

from __future__ import annotations

import asyncio
from functools import partial

from treadle.errors import EngineLostError, WorkerLostError
from treadle.observe.progress import Progress
from treadle.rollout.engines.pool import PUBLISH_TRIES
from treadle.run.exchange import exchange
from treadle.run.ray.remote_rollouts import RemoteRollouts
from treadle.run.ray.rollout_worker import RolloutStatus
from treadle.run.ray.train_workers import TrainGroup


class ClusterPublisher:
    """Brings the engines to the trainer's weights; `trainer` is None in a run that never trains.

    An engine that was restarted and can't read the weights of the last publish gets them by another one, unless the
    trainer has moved on: then it waits for the next.
    """

    def __init__(self, engines: RemoteRollouts, trainer: TrainGroup | None, version: int, progress: Progress):
        self._engines, self._trainer, self._version, self._progress = engines, trainer, version, progress
        self._again: asyncio.Task[None] | None = None
        engines.on_status = self._look

    async def publish(self, version: int) -> None:
        """Bring all engines to the trainer's current weights, under this version."""
        if self._trainer is None:
            await self._engines.set_version(version)
            return
        async with self._trainer.weights:
            await self._publish(self._trainer, version)
            self._version, self._trainer.is_ahead = version, False

    def _look(self, status: RolloutStatus) -> None:
        """Publish again if an engine waits for weights; raises what went wrong with that. Show what the engines do."""
        is_ahead = self._trainer is not None and self._trainer.is_ahead
        if status.phase is not None and not is_ahead:
            self._progress.phase(*status.phase)
        if self._again is not None and self._again.done():
            self._again.result()
            self._again = None
        if status.wants_weights and self._again is None and self._trainer is not None and not is_ahead:
            self._again = asyncio.create_task(self._publish_again(self._trainer))

    async def _publish_again(self, trainer: TrainGroup) -> None:
        async with trainer.weights:
            if not trainer.is_ahead:
                await trainer.wake()  # and awake it stays, until the next rollout
                await self._publish(trainer, self._version)

    async def _publish(self, trainer: TrainGroup, version: int) -> None:
        for tries_left in reversed(range(PUBLISH_TRIES)):
            await self._engines.prepare()
            offer = await trainer.offer(version)
            receiving = self._engines.receive(offer)
            errors = await exchange(offer["transport"], receiving, partial(trainer.deliver, version))
            if not errors:
                return
            lost = any(isinstance(error, EngineLostError) for error in errors)
            if not lost or not tries_left or any(isinstance(error, WorkerLostError) for error in errors):
                raise next((e for e in errors if isinstance(e, WorkerLostError)), errors[0])
            self._progress.warn(f"version {version} did not reach every engine ({errors[0]}); it is offered again")

    async def close(self) -> None:
        """End what still runs."""
        if self._again is not None:
            self._again.cancel()
            await asyncio.gather(self._again, return_exceptions=True)
