"""The local runtime: everything in one process, but for an engine that is a server."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from treadle.config import Config, recorded
from treadle.metrics import Metric, metric
from treadle.run.compute import ComputeThread
from treadle.run.loop import Collection, Schedule
from treadle.run.memory import PeakMemory
from treadle.run.record import Outputs, Record
from treadle.run.rollouts import Generation, Rollouts, saved_rollout
from treadle.run.state import random_state
from treadle.training.checkpoint import save_checkpoint
from treadle.training.trainer import Trainer
from treadle.types import Group

Push = Callable[[int], Awaitable[None]]
"""Brings the engine to the trainer's weights of now, under this version."""


class LocalParts:
    """What `train_loop` drives, for one process. `generation` is None in a run that only trains from saved rollouts."""

    def __init__(
        self,
        config: Config,
        schedule: Schedule,
        outputs: Outputs,
        generation: Generation | None,
        trainer: Trainer | None,
        push: Push | None,
        compute: ComputeThread,
    ):
        self.config, self.schedule, self.out = config, schedule, outputs
        self.trainer, self.push = trainer, push
        self.rollouts = None if generation is None else Rollouts(config, generation, outputs.progress.phase)
        self.written = Record(config, schedule, outputs)
        self._compute = compute
        self._memory = PeakMemory()

    async def collect(self, rollout_id: int) -> Collection:
        if self.config.debug.debug_train_only:
            return saved_rollout(self.config, rollout_id)
        assert self.rollouts is not None
        collection = await self.rollouts.collect(rollout_id)
        self.written.rollout(rollout_id, collection.groups)
        return collection

    async def train(self, rollout_id: int, groups: Sequence[Group]) -> Sequence[Metric]:
        if self.trainer is None:
            return []
        self.out.progress.phase("training")
        return await self._compute.run(self.trainer.train, groups, rollout_id)

    async def publish(self, version: int) -> Sequence[Metric]:
        if self.push is None:
            return []
        began = time.perf_counter()
        await self.push(version)
        return [metric("perf/publish_seconds", time.perf_counter() - began)]

    async def evaluate(self, done: int) -> None:
        assert self.rollouts is not None
        began = time.perf_counter()
        found = await self.rollouts.evaluate()
        self.written.evaluation(done, found, time.perf_counter() - began)

    async def save(self, done: int, *, last: bool = False) -> Sequence[Metric] | None:
        return await self.written.save(done, lambda: self._compute.run(self._save_now, done), last=last)

    def record(self, rollout_id: int, metrics: Sequence[Metric]) -> None:
        device = "cpu" if self.trainer is None else self.trainer.device.type
        self.written.step(rollout_id, [*metrics, *self._memory.metrics(device)])

    # Their insides

    def _save_now(self, done: int) -> None:
        assert self.trainer is not None
        trainer = self.trainer

        def write_model(folder: Path) -> None:
            trainer.write_model(folder)
            self.out.save_codec(folder)

        state: dict[str, Any] = {
            **trainer.state(),
            "random": random_state(),
            "dtype": self.config.model.dtype,
        }
        if self.rollouts is not None:
            state["source"] = self.rollouts.state(done)
        save_checkpoint(
            self.out.checkpoints,
            done,
            write_model=write_model,
            write_rest=trainer.write_rest,
            optimizer=trainer.optimizer.state_tensors(),
            state=state,
            config=recorded(self.config),
            keep=self.config.checkpoint.keep_checkpoints,
        )
