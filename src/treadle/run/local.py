"""The local runtime: everything in one process, except for an engine that is a server."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.config import Config, recorded
from treadle.errors import FailedSamplesError
from treadle.metrics import Metric
from treadle.models.model_config import context_length
from treadle.models.trainable import FULL
from treadle.rollout.engines.base import Engine
from treadle.rollout.filters import load_filter
from treadle.rollout.manager import RolloutManager
from treadle.run import build
from treadle.run.compute import ComputeThread
from treadle.run.differences import check_supplies
from treadle.run.lease import Lease
from treadle.run.loop import Schedule, train_loop
from treadle.run.memory import PeakMemory
from treadle.run.parts import Parts
from treadle.run.rollouts import Generation, Rollouts
from treadle.run.servers import ServerPlace, is_server, open_local_servers
from treadle.run.session import Session, finish, is_finished, open_outputs, restore, schedule_of
from treadle.run.state import random_state, seed_everything
from treadle.run.stop import Stop, stops_on_signals
from treadle.training.checkpoint import save_checkpoint
from treadle.training.trainer import Trainer
from treadle.types import Group
from treadle.weights import SentWeights
from treadle.weights.in_process import publish_in_process

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Publish = Callable[[int], Awaitable[None]]
"""Brings the engine to the trainer's current weights, under this version."""


@dataclass(frozen=True, eq=False)
class LocalTrainer:
    """The trainer of this process, run by its one thread that computes. It saves the tokenizer beside the model."""

    config: Config
    trainer: Trainer
    save_codec: Callable[[Path], None]
    compute: ComputeThread

    async def train(self, rollout_id: int, groups: Sequence[Group]) -> Sequence[Metric]:
        return await self.compute.run(self.trainer.train, groups, rollout_id)

    async def save(self, folder: Path, done: int, state: Mapping[str, Any]) -> None:
        await self.compute.run(self._save, folder, done, state)

    def _save(self, folder: Path, done: int, state: Mapping[str, Any]) -> None:
        trainer = self.trainer

        def write_model(path: Path) -> None:
            trainer.write_model(path)
            self.save_codec(path)

        save_checkpoint(
            folder,
            done,
            write_model=write_model,
            write_rest=trainer.write_rest,
            optimizer=trainer.optimizer.state_tensors(),
            state={**trainer.state(), "random": random_state(), "dtype": self.config.model.dtype, **state},
            config=recorded(self.config),
            keep=self.config.checkpoint.keep_checkpoints,
        )


async def train_locally(session: Session, recipe_name: str, stop: Stop) -> dict[str, Any]:
    """Train in this process. Returns the summary."""
    began = time.perf_counter()
    config, progress = session.config, session.progress
    trains, generates = not config.debug.debug_rollout_only, not config.debug.debug_train_only
    build.check_one_process(config, progress.warn)
    progress.phase("loading the data")
    source = build.load_source(config, session.codec, session.max_prompt, progress.warn) if generates else None
    if trains:  # a mistake is reported before a model is loaded
        check_supplies(build.resolve_objective(config), session.checkpoint)
    teacher = build.find_teacher(config, session.codec, session.max_prompt)
    schedule = schedule_of(session, None if source is None else len(source))
    if is_finished(session, schedule):
        return {}
    seed_everything(config.train.seed)
    progress.phase("loading the model")
    async with AsyncExitStack() as stack:
        compute = _compute_thread(stack)
        model = await compute.run(build.load_policy, config, session.policy_path)
        trainer = None
        if trains:
            trainer = await compute.run(
                build.build_trainer, config, model, schedule.num_rollout, progress.warn, teacher
            )
            await compute.run(trainer.try_writing, session.codec.save)
        await compute.run(restore, session, trainer, source)
        scorer = await build.open_scorer(config, config.reward, stack) if generates else None
        outputs = open_outputs(session, stack)
        rollouts = publish = None
        lease = Lease()
        if source is not None and scorer is not None:
            manager, publish = await _open_engine(session, model, outputs.folder.path, compute, stack)
            sets = await build.open_eval_sets(config, session.codec, session.max_prompt, scorer, stack)
            await publish(schedule.start_rollout_id)
            keep = None if config.rollout.group_filter is None else load_filter(config.rollout.group_filter)
            rollouts = Rollouts(config, Generation(manager, source, scorer, sets, keep), progress.phase)
            lease = Lease(manager.engine)
        local = None if trainer is None else LocalTrainer(config, trainer, session.codec.save, compute)
        memory, device = PeakMemory(), "cpu" if trainer is None else trainer.device.type
        parts = Parts(config, schedule, outputs, rollouts, local, publish, lambda: memory.metrics(device))
        progress.start(schedule.num_rollout, schedule.start_rollout_id)
        finished_after = None
        try:
            with stops_on_signals(stop, progress.note):
                finished_after = await train_loop(parts, lease, schedule, stop)
        finally:
            summary = finish(outputs.folder, recipe_name, time.perf_counter() - began, finished_after)
    return summary


async def evaluate_locally(session: Session, recipe_name: str) -> None:
    """Evaluate in this process; raises `FailedSamplesError`, once all is written, if too many answers failed."""
    began = time.perf_counter()
    config, progress, done = session.config, session.progress, session.start_rollout_id
    progress.phase("loading the model")
    path = session.model_path if session.checkpoint is None else str(session.checkpoint.path / "model")
    async with AsyncExitStack() as stack:
        compute = _compute_thread(stack)
        model = await compute.run(build.load_policy, config, path, trainable=False)
        scorer = await build.open_scorer(config, config.reward, stack)
        sets = await build.open_eval_sets(config, session.codec, session.max_prompt, scorer, stack)
        outputs = open_outputs(session, stack)
        manager, publish = await _open_engine(session, model, outputs.folder.path, compute, stack)
        await publish(done)
        rollouts = Rollouts(config, Generation(manager, None, scorer, sets), progress.phase)
        parts = Parts(config, Schedule(done, done), outputs, rollouts, None, None, list)
        try:
            await parts.evaluate(done)
        finally:
            summary = finish(outputs.folder, recipe_name, time.perf_counter() - began)
    progress.show_summary(summary)
    if parts.written.eval_fault:
        raise FailedSamplesError(parts.written.eval_fault)


def _compute_thread(stack: AsyncExitStack) -> ComputeThread:
    """Open the thread of the run, which is closed with it."""
    compute = ComputeThread()
    stack.callback(compute.close)
    return compute


async def _open_engine(
    session: Session, model: PreTrainedModel, folder: Path, compute: ComputeThread, stack: AsyncExitStack
) -> tuple[RolloutManager, Publish]:
    """Open what generates with the weights of this model, and what brings it to them when they have changed."""
    config, codec, progress = session.config, session.codec, session.progress
    engine: Engine
    if is_server(config):
        progress.phase(f"starting {config.rollout.rollout_engine}")
        place = ServerPlace(session.model_path, codec, folder / "engines")
        engine, publisher = await open_local_servers(config, place, model, progress.warn, stack)
    else:
        engine = build.open_torch_engine(config, model, codec, compute)
        stack.push_async_callback(engine.close)
        publisher = publish_in_process(SentWeights(FULL.published(model)), engine.receive, progress.warn)
    manager = await build.open_manager(config, engine, codec, context_length(model.config), stack)
    return manager, publisher.publish
