"""The one loop: roll out, train, publish the weights, repeat.

Every schedule is this loop with other numbers. `max_lag` is the number of steps that generation may run ahead of the
weights: 0 is on-policy, 1 one step off, more is bounded staleness.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from treadle.errors import CheckpointError, ConfigError, FailedSamplesError, RunFolderLostError, TreadleError
from treadle.metrics import Metric, metric
from treadle.run.lease import Lease
from treadle.run.stop import Stop
from treadle.types import Group

if TYPE_CHECKING:
    from treadle.run.parts import Parts


@dataclass(frozen=True, eq=False)
class Collection:
    """The groups of one rollout and what was measured while they were made."""

    groups: Sequence[Group]
    metrics: Sequence[Metric]


@dataclass(frozen=True)
class Schedule:
    """Which rollouts run, and what is done between them; an interval of None means never.

    An evaluation or a save with id `i` stands for the weights after i rollouts. `can_save` is False if there is no
    trainer, `saves_apart` is True if checkpoints do not go into the run folder.
    """

    start_rollout_id: int
    num_rollout: int
    eval_interval: int | None = None
    save_interval: int | None = None
    max_lag: int = 0
    can_save: bool = True
    saves_apart: bool = False

    def is_eval_due(self, done: int) -> bool:
        return self._is_due(self.eval_interval, done)

    def is_save_due(self, done: int) -> bool:
        return self._is_due(self.save_interval, done)

    def _is_due(self, interval: int | None, done: int) -> bool:
        return interval is not None and (done % interval == 0 or done >= self.num_rollout)

    def saves_when(self, stop: Stop) -> bool:
        """Return True if a run that is stopped writes a checkpoint."""
        return self.can_save and stop.requested and (self.save_interval is not None or stop.always_saves)


async def train_loop(parts: Parts, lease: Lease, schedule: Schedule, stop: Stop | None = None) -> int | None:
    """Run rollouts `start_rollout_id` to `num_rollout` - 1; an exception of a part ends the loop.

    A stop cancels requests in flight, finishes the current training step, saves, and ends the loop. If the user's own code
    fails a rollout, what was trained so far is saved before the error is raised. The same holds if the run folder was
    removed, unless checkpoints go there.

    Returns:
        The number of rollouts that were done, or None if the loop was stopped before all was done.
    """
    stop = stop or Stop()
    loop = _Loop(parts, lease, schedule, stop)
    try:
        await loop.run()
    except RunFolderLostError as error:
        if schedule.can_save and schedule.saves_apart:
            await loop.save_last(error)
        raise
    if schedule.saves_when(stop) or (loop.fault is not None and schedule.can_save):
        await loop.save_last(loop.fault)
    if loop.fault is not None:
        raise loop.fault
    return None if stop.requested else loop.done


class _Loop:
    """The loop and how far it is: rollouts done, rollouts saved, and what ended it early."""

    def __init__(self, parts: Parts, lease: Lease, schedule: Schedule, stop: Stop):
        self.parts, self.lease, self.schedule, self.stop = parts, lease, schedule, stop
        self.done = self.saved = schedule.start_rollout_id
        self.fault: TreadleError | None = None  # of the user's own code

    async def run(self) -> None:
        """Do the rollouts; what is still being collected at the end is cancelled."""
        in_flight: deque[asyncio.Task[Collection]] = deque()
        try:
            await self._run(in_flight)
        finally:
            for task in in_flight:
                task.cancel()
            await asyncio.gather(*in_flight, return_exceptions=True)

    async def save_last(self, cause: TreadleError | None) -> None:
        """Save what was trained since the last save, before the run ends early; `cause` is the error that ends it.

        Raises `CheckpointError` if that fails: a run that was stopped must not look as if it were saved.
        """
        if self.saved >= self.done:
            return
        try:
            await self.parts.save(self.done, last=True)
        except CheckpointError as error:
            if cause is None:
                raise
            raise CheckpointError(f"{cause}; and then {error}") from cause

    async def _run(self, in_flight: deque[asyncio.Task[Collection]]) -> None:
        parts, schedule, stop = self.parts, self.schedule, self.stop
        start, end = schedule.start_rollout_id, schedule.num_rollout
        next_id = start
        carried: list[Metric] = []  # of a save: the line of its own rollout is written before it
        if schedule.is_eval_due(start):
            await _evaluate(parts, self.lease, start, stop)
        for rollout_id in range(start, end):
            if stop.requested:
                break
            began = time.perf_counter()
            async with self.lease.hold("rollout"):
                # Admission: which rollouts may start is decided here and nowhere else.
                while next_id < end and next_id <= rollout_id + schedule.max_lag:
                    in_flight.append(asyncio.create_task(parts.collect(next_id)))
                    next_id += 1
                try:
                    collection = await stop.unless(in_flight.popleft())
                except (FailedSamplesError, ConfigError) as error:
                    self.fault = error
                    break
            if collection is None:
                break
            async with self.lease.hold("training"):
                metrics = [*collection.metrics, *await parts.train(rollout_id, collection.groups)]
            metrics += await parts.publish(rollout_id + 1)
            metrics += [metric("perf/step_seconds", time.perf_counter() - began), *carried]
            self.done, carried = rollout_id + 1, []
            parts.record(rollout_id, metrics)
            if schedule.is_save_due(self.done):
                saved = await parts.save(self.done)
                if saved is not None:
                    carried, self.saved = list(saved), self.done
            if schedule.is_eval_due(self.done):
                await _evaluate(parts, self.lease, self.done, stop)


async def _evaluate(parts: Parts, lease: Lease, done: int, stop: Stop) -> None:
    async with lease.hold("rollout"):
        await stop.unless(asyncio.create_task(parts.evaluate(done)))
