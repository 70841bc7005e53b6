"""Start a run: build what the configuration asks for, in the order that finds mistakes before work is done."""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treadle.chat import Codec, load_codec
from treadle.config import Config, check_config, num_rollout
from treadle.data import PromptSource
from treadle.errors import ConfigError
from treadle.models.bundled import resolve
from treadle.models.export import export_model
from treadle.models.load import compute_dtype, is_model_folder, name_of
from treadle.observe.curve import draw_curve
from treadle.observe.metric_lines import read_metrics
from treadle.observe.progress import Progress
from treadle.observe.run_folder import RunFolder
from treadle.observe.samples import rollout_ids
from treadle.observe.sinks import open_sinks
from treadle.observe.summary import summarize
from treadle.rollout.filters import load_filter
from treadle.run import build
from treadle.run.lease import FreeLease, Lease, SharedLease
from treadle.run.local import Generation, LocalParts, Outputs
from treadle.run.loop import Schedule, train_loop
from treadle.run.state import seed_everything, set_random_state
from treadle.training.checkpoint import Checkpoint, find_checkpoint
from treadle.weights import InprocTransport


@dataclass(frozen=True, eq=False)
class Session:
    """What every command needs first: the checkpoint to start from, if any, the model's files and its tokenizer."""

    config: Config
    progress: Progress
    checkpoint: Checkpoint | None
    model_path: str
    codec: Codec
    max_prompt: int

    @property
    def start_rollout_id(self) -> int:
        return self.checkpoint.rollout_id if self.checkpoint else self.config.train.start_rollout_id or 0


def train(config: Config, recipe_name: str) -> None:
    """Train as configured; a user's mistake raises a `TreadleError`, before any work where it can be known."""
    warnings = check_config(config)
    with Progress(config.observe.progress, title=recipe_name) as progress:
        for warning in warnings:
            progress.warn(warning)
        asyncio.run(_train(_open_session(config, progress), recipe_name))


def evaluate(config: Config, recipe_name: str) -> None:
    """Evaluate the model, or the checkpoint that `load` names, on the evaluation sets."""
    if not config.eval.eval_prompt_data:
        raise ConfigError("treadle eval needs evaluation sets; give --eval-prompt-data name=source")
    warnings = check_config(config, evaluation_only=True)
    with Progress(config.observe.progress, title=recipe_name) as progress:
        for warning in warnings:
            progress.warn(warning)
        asyncio.run(_evaluate(_open_session(config, progress), recipe_name))


def export(checkpoint: Path, out: Path, dtype: str, warn: Callable[[str], None] = warnings.warn) -> Path:
    """Write the model of a checkpoint as a Hugging Face folder; a run or save folder stands for its newest one.

    `warn` hears of damaged checkpoints that are passed over.
    """
    if is_model_folder(checkpoint):
        return export_model(checkpoint, out, dtype)  # a model folder already: another dtype is asked for
    return export_model(find_checkpoint(checkpoint, warn).path / "model", out, dtype)


def _open_session(config: Config, progress: Progress) -> Session:
    load = config.checkpoint.load
    checkpoint = None if load is None else find_checkpoint(Path(load), progress.warn)
    config = _with_dtype(config, checkpoint)
    progress.phase("looking for the model")
    model_path = resolve(config.model.hf_checkpoint)
    codec = load_codec(model_path)
    return Session(config, progress, checkpoint, model_path, codec, build.longest_prompt(config, model_path))


def _with_dtype(config: Config, checkpoint: Checkpoint | None) -> Config:
    """The configuration with `auto` resolved: as the checkpoint was computed, else by what is fast here.

    On another machine, or a busy one, the choice could be another one, and a resumed run would not be the same run.
    """
    if config.model.dtype != "auto":
        return config
    saved = None if checkpoint is None else checkpoint.state.get("dtype")
    dtype = saved or name_of(compute_dtype("auto", config.model.device))
    return config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})


async def _train(session: Session, recipe_name: str) -> None:
    began = time.perf_counter()
    config, progress = session.config, session.progress
    build.check_one_process(config, progress.warn)
    progress.phase("loading the data")
    source = None
    if not config.debug.debug_train_only:
        source = build.load_source(config, session.codec, session.max_prompt, progress)
    if not config.debug.debug_rollout_only:
        build.resolve_objective(config)  # a mistake is told before a model is loaded
    teacher = build.find_teacher(config, session.codec, session.max_prompt)
    schedule = _schedule(session, source)
    seed_everything(config.train.seed)
    progress.phase("loading the model")
    path = session.model_path
    if config.debug.debug_rollout_only and session.checkpoint is not None:  # no trainer that would load it
        path = str(session.checkpoint.path / "model")
    model = build.load_policy(config, path)
    trainer = None
    if not config.debug.debug_rollout_only:
        trainer = build.build_trainer(config, model, schedule.num_rollout, progress, teacher)
    _restore(session, trainer, source)
    async with AsyncExitStack() as stack:
        scorer = await build.open_scorer(config, config.reward, stack) if source is not None else None
        outputs = _open_outputs(session, recipe_name, stack, continues=True)
        generation = None
        lease: Lease = FreeLease()
        if source is not None and scorer is not None:
            manager = await build.build_manager(config, model, session.codec, stack)
            sets = await build.open_eval_sets(config, session.codec, session.max_prompt, scorer, stack)
            transport = InprocTransport(model, model, manager.engine.set_version)
            transport.push(schedule.start_rollout_id)
            keep = None if config.rollout.group_filter is None else load_filter(config.rollout.group_filter)
            generation = Generation(manager, source, scorer, transport, sets, keep)
            lease = SharedLease(manager.engine)
        parts = LocalParts(config, schedule, outputs, generation, trainer)
        progress.start(schedule.num_rollout, schedule.start_rollout_id)
        try:
            await train_loop(parts, lease, schedule)
        finally:
            summary = _finish(outputs.folder, recipe_name, time.perf_counter() - began)
    progress.show_summary(summary)


async def _evaluate(session: Session, recipe_name: str) -> None:
    began = time.perf_counter()
    config, progress = session.config, session.progress
    progress.phase("loading the model")
    path = session.model_path if session.checkpoint is None else str(session.checkpoint.path / "model")
    model = build.load_policy(config, path, trainable=False)
    async with AsyncExitStack() as stack:
        scorer = await build.open_scorer(config, config.reward, stack)
        sets = await build.open_eval_sets(config, session.codec, session.max_prompt, scorer, stack)
        outputs = _open_outputs(session, f"{recipe_name}-eval", stack)
        manager = await build.build_manager(config, model, session.codec, stack)
        manager.engine.set_version(session.start_rollout_id)
        transport = InprocTransport(model, model, manager.engine.set_version)
        generation = Generation(manager, None, scorer, transport, sets)
        schedule = Schedule(session.start_rollout_id, session.start_rollout_id)
        parts = LocalParts(config, schedule, outputs, generation, None)
        try:
            await parts.evaluate(schedule.start_rollout_id)
        finally:
            summary = _finish(outputs.folder, recipe_name, time.perf_counter() - began)
    progress.show_summary(summary)


def _schedule(session: Session, source: PromptSource | None) -> Schedule:
    """Which rollouts are to be done; raises `ConfigError` where the loaded run has none left."""
    config = session.config
    saved = config.debug.load_debug_rollout_data
    if source is None and config.train.num_rollout is None:
        assert saved is not None
        end = max(rollout_ids(Path(saved)), default=-1) + 1
    else:
        end = num_rollout(config, None if source is None else len(source))
    start = session.start_rollout_id
    if session.checkpoint is not None and start >= end:
        raise ConfigError(f"{session.checkpoint.path} has done {start} rollouts of {end}; raise --num-rollout to go on")
    interval = config.checkpoint.save_interval or (end if config.checkpoint.save is not None else None)
    return Schedule(
        start_rollout_id=start,
        num_rollout=end,
        eval_interval=config.eval.eval_interval if source is not None else None,
        save_interval=None if config.debug.debug_rollout_only else interval,
    )


def _restore(session: Session, trainer: Any, source: PromptSource | None) -> None:
    """Bring trainer, cursor and random generators to where the checkpoint was taken."""
    checkpoint = session.checkpoint
    if checkpoint is None:
        if source is not None:  # a start in the middle passes over the prompts of the rollouts before it
            source.next_prompts(session.start_rollout_id * session.config.rollout.rollout_batch_size)
        return
    if trainer is not None:
        trainer.load(checkpoint)
    if source is not None and "source" in checkpoint.state:
        source.load_state(checkpoint.state["source"])
    set_random_state(checkpoint.state["random"])
    session.progress.note(f"resuming at rollout {checkpoint.rollout_id} from {checkpoint.path}")


def _open_outputs(session: Session, name: str, stack: AsyncExitStack, *, continues: bool = False) -> Outputs:
    config, progress = session.config, session.progress
    given = config.observe.run_dir
    resumed = session.start_rollout_id if continues and session.checkpoint is not None else None
    loaded = config.checkpoint.load
    if given is None and loaded is not None and RunFolder(Path(loaded)).holds_run and continues:
        given = loaded  # a run folder was given to go on with, not only its weights
    folder = RunFolder.create(None if given is None else Path(given), name, resume_rollout_id=resumed)
    values = config.model_dump(mode="json")
    folder.write_config(values)
    sink = open_sinks(folder, config.observe, progress.warn, session.start_rollout_id, values)
    stack.callback(sink.close)
    return Outputs(folder, sink, progress, build.save_folder(config, folder.path), session.codec.save)


def _finish(folder: RunFolder, title: str, seconds: float) -> dict[str, Any]:
    """Write summary.json and the curve from all that was measured, also when the run ended early."""
    summary = summarize(read_metrics(folder.metrics), seconds)
    folder.write_summary(summary)
    curve = draw_curve(folder.metrics, folder.curve, title)
    paths = {"run_folder": str(folder.path)} | ({} if curve is None else {"curve": str(curve)})
    return {**summary, **paths}
