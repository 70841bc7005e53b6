"""What every command needs first: checkpoint, model files, tokenizer; and how a run is restored, shown and summed up."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treadle.chat import Codec, load_codec
from treadle.config import Config, num_rollout, recorded
from treadle.data import PromptSource
from treadle.errors import ConfigError
from treadle.models.bundled import resolve
from treadle.models.load import compute_dtype, name_of
from treadle.observe.curve import draw_curve
from treadle.observe.metric_lines import read_metrics
from treadle.observe.progress import Progress
from treadle.observe.run_folder import RunFolder
from treadle.observe.samples import rollout_ids
from treadle.observe.sinks import open_sinks
from treadle.observe.summary import summarize
from treadle.run import build
from treadle.run.loop import Schedule
from treadle.run.record import Outputs
from treadle.run.state import set_random_state
from treadle.training.checkpoint import Checkpoint, find_checkpoint


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


def open_session(config: Config, progress: Progress) -> Session:
    """Find the checkpoint and the model, and load the tokenizer."""
    load = config.checkpoint.load
    checkpoint = None if load is None else find_checkpoint(Path(load), progress.warn)
    config = _with_dtype(config, checkpoint)
    progress.phase("looking for the model")
    model_path = resolve(config.model.hf_checkpoint)
    codec = load_codec(model_path, config.data.template_kwargs)
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


def schedule_of(session: Session, num_prompts: int | None) -> Schedule:
    """Which rollouts are to be done, of data with `num_prompts` (None where none is read); raises `ConfigError` where the loaded run has none left."""
    config = session.config
    saved = config.debug.load_debug_rollout_data
    if num_prompts is None and config.train.num_rollout is None:
        assert saved is not None
        end = max(rollout_ids(Path(saved)), default=-1) + 1
    else:
        end = num_rollout(config, num_prompts)
    start = session.start_rollout_id
    if session.checkpoint is not None and start >= end:
        raise ConfigError(f"{session.checkpoint.path} has done {start} rollouts of {end}; raise --num-rollout to go on")
    interval = config.checkpoint.save_interval or (end if config.checkpoint.save is not None else None)
    return Schedule(
        start_rollout_id=start,
        num_rollout=end,
        eval_interval=config.eval.eval_interval if num_prompts is not None else None,
        save_interval=None if config.debug.debug_rollout_only else interval,
        max_lag=config.cluster.max_lag,
        can_save=not config.debug.debug_rollout_only,
    )


def restore(session: Session, trainer: Any, source: PromptSource | None) -> None:
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


def open_outputs(
    session: Session, name: str, stack: AsyncExitStack, *, continues: bool = False, again: Path | None = None
) -> Outputs:
    """The run folder and the sinks; `continues` goes on with a run folder that was given to load from.

    `again` is the folder of this very run, of which the rollouts from the session's start on are done anew.
    """
    config, progress = session.config, session.progress
    given = config.observe.run_dir
    resumed = session.start_rollout_id if continues and session.checkpoint is not None else None
    loaded = config.checkpoint.load
    if given is None and loaded is not None and RunFolder(Path(loaded)).holds_run and continues:
        given = loaded  # a run folder was given to go on with, not only its weights
    if again is not None:
        given, resumed = str(again), session.start_rollout_id
    folder = RunFolder.create(None if given is None else Path(given), name, resume_rollout_id=resumed)
    values = recorded(config)
    folder.write_config(values)
    sink = open_sinks(folder, config.observe, progress.warn, session.start_rollout_id, values)
    stack.callback(sink.close)
    return Outputs(folder, sink, progress, build.save_folder(config, folder.path), session.codec.save)


def finish(folder: RunFolder, title: str, seconds: float) -> dict[str, Any]:
    """Write summary.json and the curve from all that was measured, also when the run ended early."""
    summary = summarize(read_metrics(folder.metrics), seconds)
    folder.write_summary(summary)
    curve = draw_curve(folder.metrics, folder.curve, title)
    paths = {"run_folder": str(folder.path)} | ({} if curve is None else {"curve": str(curve)})
    return {**summary, **paths}
