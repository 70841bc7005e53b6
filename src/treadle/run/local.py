"""The local runtime: everything in one process, except for an engine that is a server."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.data import PromptSource
from treadle.errors import FailedSamplesError
from treadle.metrics import Metric
from treadle.models.model_config import context_length
from treadle.models.trainable import FULL
from treadle.rollout.engines.base import Engine
from treadle.run import build
from treadle.run.compute import ComputeThread
from treadle.run.lease import Lease
from treadle.run.loop import Schedule, train_loop
from treadle.run.memory import PeakMemory
from treadle.run.parts import Parts
from treadle.run.resume import save_trainer, seed_everything
from treadle.run.rollouts import Rollouts
from treadle.run.servers import ServerPlace, is_server, open_local_servers
from treadle.run.session import Session, check_training, finish, is_finished, open_outputs, restore, schedule_of
from treadle.run.stop import Stop, stops_on_signals
from treadle.training.trainer import Trainer
from treadle.training.trainer_files import try_writing
from treadle.types import Group
from treadle.weights import SentWeights
from treadle.weights.in_process import publish_in_process

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Publish = Callable[[int], Awaitable[None]]
"""Brings the engine to the trainer's current weights, under this version."""


@dataclass(frozen=True, eq=False)
class LocalTrainer:
    """The trainer of this process, run by its one compute thread. It saves the tokenizer beside the model."""

    trainer: Trainer
    save_codec: Callable[[Path], None]
    compute: ComputeThread

    async def train(self, rollout_id: int, groups: Sequence[Group]) -> Sequence[Metric]:
        return await self.compute.run(self.trainer.train, groups, rollout_id)

    async def save(self, folder: Path, done: int, state: Mapping[str, Any]) -> None:
        await self.compute.run(save_trainer, self.trainer, self.save_codec, folder, done, state)


async def train_locally(session: Session, recipe_name: str, stop: Stop) -> dict[str, Any]:
    """Train in this process; return the summary."""
    began = time.perf_counter()
    config, progress, files = session.config, session.progress, session.files
    build.check_one_process(config, progress.warn)
    progress.phase("loading the data")
    source = None
    if not config.debug.debug_train_only:
        source = build.load_source(config, files.codec, files.max_prompt, progress.warn)
    teacher = check_training(session)
    schedule = schedule_of(session, None if source is None else len(source))
    if is_finished(session, schedule):
        return {}
    seed_everything(config.train.seed)
    progress.phase("loading the model")
    async with AsyncExitStack() as stack:
        compute = stack.enter_context(closing(ComputeThread()))
        model = await compute.run(build.load_policy, config, session.policy_path)
        trainer = await _load_trainer(session, model, schedule, teacher, compute)
        await compute.run(restore, session, trainer, source)
        scoring = None
        if source is not None:
            scoring = await build.open_scoring(config, files.codec, files.max_prompt, stack)
        outputs = open_outputs(session, stack)
        rollouts, publish, lease = None, None, Lease()
        if scoring is not None:
            rollouts, publish = await _open_rollouts(
                session, model, source, scoring, outputs.folder.path, compute, stack
            )
            await publish(schedule.start_rollout_id)
            lease = Lease(rollouts.generation.manager.engine)
        local = None if trainer is None else LocalTrainer(trainer, files.codec.save, compute)
        memory = PeakMemory("cpu" if trainer is None else trainer.device.type)
        parts = Parts(config, schedule, outputs, rollouts, local, publish, memory.metrics)
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
    config, progress, files, done = session.config, session.progress, session.files, session.start_rollout_id
    progress.phase("loading the model")
    async with AsyncExitStack() as stack:
        compute = stack.enter_context(closing(ComputeThread()))
        model = await compute.run(build.load_policy, config, session.weights_path, trainable=False)
        scoring = await build.open_scoring(config, files.codec, files.max_prompt, stack)
        outputs = open_outputs(session, stack)
        rollouts, publish = await _open_rollouts(session, model, None, scoring, outputs.folder.path, compute, stack)
        await publish(done)
        parts = Parts(config, Schedule(done, done), outputs, rollouts, None, None, list)
        try:
            await parts.evaluate(done)
        finally:
            summary = finish(outputs.folder, recipe_name, time.perf_counter() - began)
    progress.show_summary(summary)
    if parts.written.eval_fault:
        raise FailedSamplesError(parts.written.eval_fault)


async def _load_trainer(
    session: Session, model: PreTrainedModel, schedule: Schedule, teacher: str | None, compute: ComputeThread
) -> Trainer | None:
    """Build the trainer, and check that what it trains can be saved; None in a run that never trains."""
    config, warn = session.config, session.progress.warn
    if config.debug.debug_rollout_only:
        return None
    trainer = await compute.run(build.build_trainer, config, model, schedule.num_rollout, warn, teacher)
    await compute.run(try_writing, trainer, session.files.codec.save)
    return trainer


async def _open_rollouts(
    session: Session,
    model: PreTrainedModel,
    source: PromptSource | None,
    scoring: build.Scoring,
    folder: Path,
    compute: ComputeThread,
    stack: AsyncExitStack,
) -> tuple[Rollouts, Publish]:
    """Open what generates with the weights of this model, and what brings it to them when they have changed."""
    config, codec, progress = session.config, session.files.codec, session.progress
    engine: Engine
    if is_server(config):
        progress.phase(f"starting {config.rollout.rollout_engine}")
        place = ServerPlace(session.files.path, codec, folder / "engines")
        engine, publisher = await open_local_servers(config, place, model, progress.warn, stack)
    else:
        engine = build.open_torch_engine(config, model, codec, compute)
        stack.push_async_callback(engine.close)
        publisher = publish_in_process(SentWeights(FULL.published(model)), engine.receive, progress.warn)
    context = context_length(model.config)
    generation = await build.open_generation(config, engine, codec, context, source, scoring, stack)
    return Rollouts(config, generation, progress.phase), publisher.publish
