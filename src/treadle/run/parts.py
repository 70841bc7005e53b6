"""What the loop drives: the side that generates, the side that trains, and the record of both."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from treadle.config import Config
from treadle.errors import CheckpointError
from treadle.metrics import Metric, metric
from treadle.run.loop import Collection, Schedule
from treadle.run.record import Outputs, Record
from treadle.run.rollouts import saved_rollout
from treadle.types import Group


class RolloutSide(Protocol):
    """What generates and scores, in this process or in others."""

    async def collect(self, rollout_id: int) -> Collection:
        """Draw, generate, score and filter the groups of one rollout."""
        ...

    async def evaluate(self) -> list[tuple[str, list[Group]]]:
        """Return the answered and scored prompts of every evaluation set, by its name."""
        ...

    async def state(self, done: int) -> dict[str, Any]:
        """Return what a run needs of this side to resume at rollout `done`, in JSON values."""
        ...


class TrainerSide(Protocol):
    """What trains, in this process or in others."""

    async def train(self, rollout_id: int, groups: Sequence[Group]) -> Sequence[Metric]:
        """Take the optimizer steps of one rollout."""
        ...

    async def save(self, folder: Path, done: int, state: Mapping[str, Any]) -> None:
        """Write a checkpoint that resumes at rollout `done`; `state` is that of the side that generates."""
        ...


class Parts:
    """The two sides of a run; a side that does not run is None.

    `publish` brings the engines to the trainer's current weights, under the version it is given. `measure` returns what
    was measured beside the sides' own metrics since the last rollout.
    """

    def __init__(
        self,
        config: Config,
        schedule: Schedule,
        outputs: Outputs,
        rollouts: RolloutSide | None,
        trainer: TrainerSide | None,
        publish: Callable[[int], Awaitable[None]] | None,
        measure: Callable[[], Sequence[Metric]],
    ):
        self.config, self.schedule, self.out = config, schedule, outputs
        self.rollouts, self.trainer = rollouts, trainer
        self.written = Record(config, schedule, outputs)
        self.saved: int | None = None  # the newest checkpoint of these parts
        self._publish, self._measure = publish, measure

    async def collect(self, rollout_id: int) -> Collection:
        """Collect a rollout and write it; raises `FailedSamplesError` if too many of its samples failed."""
        if self.config.debug.debug_train_only:
            return saved_rollout(self.config, rollout_id)
        assert self.rollouts is not None
        collection = await self.rollouts.collect(rollout_id)
        self.written.rollout(rollout_id, collection.groups)
        return collection

    async def train(self, rollout_id: int, groups: Sequence[Group]) -> Sequence[Metric]:
        """Take the optimizer steps of one rollout."""
        if self.trainer is None:
            return []
        self.out.progress.phase("training")
        return await self.trainer.train(rollout_id, groups)

    async def publish(self, version: int) -> Sequence[Metric]:
        """Bring the engines to the trainer's weights."""
        if self._publish is None:
            return []
        began = time.perf_counter()
        await self._publish(version)
        return [metric("perf/publish_seconds", time.perf_counter() - began)]

    async def evaluate(self, done: int) -> None:
        """Evaluate the weights after `done` rollouts, and write the results."""
        assert self.rollouts is not None
        began = time.perf_counter()
        found = await self.rollouts.evaluate()
        self.written.evaluation(done, found, time.perf_counter() - began)

    async def save(self, done: int, *, last: bool = False) -> Sequence[Metric] | None:
        """Write a checkpoint that resumes at rollout `done`.

        Returns None after a warning if that failed and a later save will try again. Raises `CheckpointError` if it failed
        and no later save follows: it is the `last`, or all rollouts are done.
        """
        assert self.trainer is not None
        self.out.progress.phase("saving")
        began = time.perf_counter()
        try:
            state = {} if self.rollouts is None else await self.rollouts.state(done)
            await self.trainer.save(self.out.checkpoints, done, state)
        except CheckpointError as error:
            if last or done >= self.schedule.num_rollout:
                raise
            self.out.progress.warn(f"{error}; training goes on, the next save tries again")
            return None
        self.saved = done
        return [metric("perf/save_seconds", time.perf_counter() - began)]

    def record(self, rollout_id: int, metrics: Sequence[Metric]) -> None:
        """Write and show the metrics of a finished rollout."""
        self.written.step(rollout_id, [*metrics, *self._measure()])
