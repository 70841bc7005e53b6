"""Start a run: build what the configuration asks for, in the order that finds mistakes before work is done."""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.config import Config, check_config
from treadle.errors import ConfigError, FailedSamplesError
from treadle.models.context import context_length
from treadle.models.export import export_model
from treadle.models.load import is_model_folder
from treadle.observe.progress import Progress
from treadle.rollout.filters import load_filter
from treadle.rollout.manager import RolloutManager
from treadle.run import build
from treadle.run.compute import ComputeThread
from treadle.run.differences import check_supplies
from treadle.run.lease import FreeLease, Lease, SharedLease
from treadle.run.local import LocalParts, Push
from treadle.run.loop import Schedule, train_loop
from treadle.run.memory import check_samples_fit, machine_memory
from treadle.run.place import claim_folder, claim_place
from treadle.run.rollouts import Generation
from treadle.run.servers import LocalServers, ServerPlace, is_server
from treadle.run.session import Session, finish, is_finished, open_outputs, open_session, restore, schedule_of
from treadle.run.state import seed_everything
from treadle.run.stop import Stop, leave, stops_on_signals
from treadle.training.checkpoint import find_checkpoint
from treadle.weights import InprocTransport

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def train(config: Config, recipe_name: str) -> None:
    """Train as configured; a user's mistake raises a `TreadleError`, before any work where it can be known.

    A run that a signal stopped raises `KeyboardInterrupt` (Ctrl-C) or `SystemExit` with 143 (SIGTERM) once it is saved.
    """
    warnings = check_config(config)
    check_samples_fit(config, machine_memory("cpu"))
    with Progress(config.observe.progress, title=recipe_name) as progress, ExitStack() as stack:
        for warning in warnings:
            progress.warn(warning)
        place = claim_place(config, recipe_name, progress, stack)
        signum = asyncio.run(_run(open_session(config, progress, place), recipe_name))
    leave(signum)


def evaluate(config: Config, recipe_name: str) -> None:
    """Evaluate the model, or the checkpoint that `load` names, on the evaluation sets."""
    if not config.eval.eval_prompt_data:
        raise ConfigError("treadle eval needs evaluation sets; give --eval-prompt-data name=source")
    warnings = check_config(config, evaluation_only=True)
    check_samples_fit(config, machine_memory("cpu"), evaluation_only=True)
    with Progress(config.observe.progress, title=recipe_name) as progress, ExitStack() as stack:
        for warning in warnings:
            progress.warn(warning)
        place = claim_folder(config, f"{recipe_name}-eval", progress, stack)
        asyncio.run(_evaluate(open_session(config, progress, place), recipe_name))


def export(checkpoint: Path, out: Path, dtype: str, warn: Callable[[str], None] = warnings.warn) -> Path:
    """Write the model of a checkpoint as a Hugging Face folder; a run or save folder stands for its newest one.

    `warn` is called for each damaged checkpoint that is skipped.
    """
    if is_model_folder(checkpoint):
        return export_model(checkpoint, out, dtype)  # a model folder already: another dtype is asked for
    return export_model(find_checkpoint(checkpoint, warn).path / "model", out, dtype)


async def _run(session: Session, recipe_name: str) -> int | None:
    """Train in the configured runtime; the number of the signal that stopped it, or None."""
    stop = Stop()
    if session.config.cluster.runtime == "ray":
        from treadle.run.ray.runtime import train_on_cluster

        summary = await train_on_cluster(session, recipe_name, stop)
    else:
        summary = await _train(session, recipe_name, stop)
    if summary:
        session.progress.show_summary(summary)
    return stop.signum


async def _train(session: Session, recipe_name: str, stop: Stop) -> dict[str, Any]:
    began = time.perf_counter()
    config, progress = session.config, session.progress
    build.check_one_process(config, progress.warn)
    progress.phase("loading the data")
    source = None
    if not config.debug.debug_train_only:
        source = build.load_source(config, session.codec, session.max_prompt, progress.warn)
    if not config.debug.debug_rollout_only:  # a mistake is told before a model is loaded
        check_supplies(build.resolve_objective(config), session.checkpoint)
    teacher = build.find_teacher(config, session.codec, session.max_prompt)
    schedule = schedule_of(session, None if source is None else len(source))
    if is_finished(session, schedule):
        return {}
    seed_everything(config.train.seed)
    progress.phase("loading the model")
    path = session.model_path
    if config.debug.debug_rollout_only and session.checkpoint is not None:  # no trainer that would load it
        path = str(session.checkpoint.path / "model")
    async with AsyncExitStack() as stack:
        compute = _compute_thread(stack)
        model = await compute.run(build.load_policy, config, path)
        trainer = None
        if not config.debug.debug_rollout_only:
            trainer = await compute.run(
                build.build_trainer, config, model, schedule.num_rollout, progress.warn, teacher
            )
            await compute.run(trainer.try_writing, session.codec.save)
        await compute.run(restore, session, trainer, source)
        scorer = await build.open_scorer(config, config.reward, stack) if source is not None else None
        outputs = open_outputs(session, stack)
        generation = push = None
        lease: Lease = FreeLease()
        if source is not None and scorer is not None:
            manager, push = await _open_engine(session, model, outputs.folder.path, compute, stack)
            sets = await build.open_eval_sets(config, session.codec, session.max_prompt, scorer, stack)
            await push(schedule.start_rollout_id)
            keep = None if config.rollout.group_filter is None else load_filter(config.rollout.group_filter)
            generation = Generation(manager, source, scorer, sets, keep)
            lease = SharedLease(manager.engine)
        parts = LocalParts(config, schedule, outputs, generation, trainer, push, compute)
        progress.start(schedule.num_rollout, schedule.start_rollout_id)
        finished_after = None
        try:
            with stops_on_signals(stop, progress.note):
                finished_after = await train_loop(parts, lease, schedule, stop)
        finally:
            summary = finish(outputs.folder, recipe_name, time.perf_counter() - began, finished_after)
    return summary


def _compute_thread(stack: AsyncExitStack) -> ComputeThread:
    """The thread of the run, closed with it."""
    compute = ComputeThread()
    stack.callback(compute.close)
    return compute


async def _open_engine(
    session: Session, model: PreTrainedModel, folder: Path, compute: ComputeThread, stack: AsyncExitStack
) -> tuple[RolloutManager, Push]:
    """What generates with the weights of this model, and how it gets them when they have changed."""
    config, codec, progress = session.config, session.codec, session.progress
    if is_server(config):
        progress.phase(f"starting {config.rollout.rollout_engine}")
        place = ServerPlace(session.model_path, codec, folder / "engines")
        servers = await LocalServers.open(config, place, model, progress.warn, stack)
        context = context_length(model.config)
        return await build.open_manager(config, servers.pool, codec, context, stack), servers.publish
    engine = build.open_torch_engine(config, model, codec, compute)
    stack.push_async_callback(engine.close)
    transport = InprocTransport(model, model, engine.set_version)

    async def push(version: int) -> None:
        transport.push(version)

    return await build.open_manager(config, engine, codec, context_length(model.config), stack), push


async def _evaluate(session: Session, recipe_name: str) -> None:
    began = time.perf_counter()
    config, progress = session.config, session.progress
    progress.phase("loading the model")
    path = session.model_path if session.checkpoint is None else str(session.checkpoint.path / "model")
    async with AsyncExitStack() as stack:
        compute = _compute_thread(stack)
        model = await compute.run(build.load_policy, config, path, trainable=False)
        scorer = await build.open_scorer(config, config.reward, stack)
        sets = await build.open_eval_sets(config, session.codec, session.max_prompt, scorer, stack)
        outputs = open_outputs(session, stack)
        manager, push = await _open_engine(session, model, outputs.folder.path, compute, stack)
        await push(session.start_rollout_id)
        generation = Generation(manager, None, scorer, sets)
        schedule = Schedule(session.start_rollout_id, session.start_rollout_id)
        parts = LocalParts(config, schedule, outputs, generation, None, None, compute)
        try:
            await parts.evaluate(schedule.start_rollout_id)
        finally:
            summary = finish(outputs.folder, recipe_name, time.perf_counter() - began)
    progress.show_summary(summary)
    if parts.written.eval_fault:
        raise FailedSamplesError(parts.written.eval_fault)
