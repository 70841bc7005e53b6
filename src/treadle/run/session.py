"""What every command needs first, and how a run is restored, shown and summed up, whichever runtime trains it."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treadle.config import Config, recorded, run_length
from treadle.data import PromptSource
from treadle.errors import ConfigError
from treadle.models.load import compute_dtype, name_of
from treadle.observe.curve import draw_curve
from treadle.observe.metric_lines import read_metrics
from treadle.observe.progress import Progress
from treadle.observe.run_folder import RunFolder
from treadle.observe.samples import rollout_ids
from treadle.observe.sinks import open_sinks
from treadle.observe.summary import summarize
from treadle.run import build
from treadle.run.compute import in_short_lived_thread
from treadle.run.loop import Schedule
from treadle.run.model_files import ModelFiles, find_model_files, find_teacher, padding_note
from treadle.run.place import Place, is_same
from treadle.run.record import Outputs
from treadle.run.resume import changed_settings, check_critic_saved, set_random_state
from treadle.training.checkpoint import Checkpoint, go_on_from


@dataclass(frozen=True, eq=False)
class Session:
    """The configuration of a command, its folders, the checkpoint to start from, and its models' files."""

    config: Config
    progress: Progress
    place: Place
    checkpoint: Checkpoint | None
    files: ModelFiles

    @property
    def start_rollout_id(self) -> int:
        return self.checkpoint.rollout_id if self.checkpoint else self.config.train.start_rollout_id or 0

    @property
    def weights_path(self) -> str:
        """Folder of the weights that a command without a trainer generates with."""
        return self.files.path if self.checkpoint is None else str(self.checkpoint.path / "model")

    @property
    def policy_path(self) -> str:
        """Folder of the weights that a run starts with: a trainer loads those of the checkpoint over them."""
        return self.weights_path if self.config.debug.debug_rollout_only else self.files.path


def open_session(config: Config, progress: Progress, place: Place) -> Session:
    """Find the models, and load the tokenizer."""
    checkpoint = place.checkpoint
    config = _with_dtype(config, checkpoint)
    if checkpoint is not None and (changed := changed_settings(config, checkpoint)):
        progress.warn(changed)
    progress.phase("looking for the model")
    files = find_model_files(config)
    if note := padding_note(config, files):
        progress.note(note)
    return Session(config, progress, place, checkpoint, files)


def _with_dtype(config: Config, checkpoint: Checkpoint | None) -> Config:
    """Return the configuration with the dtype `auto` resolved: the checkpoint's, or else what is fast here.

    On another machine, or a busy one, the choice could differ, and a resumed run would not be the same run.
    """
    if config.model.dtype != "auto":
        return config
    saved = None if checkpoint is None else checkpoint.state.get("dtype")
    dtype = saved or name_of(in_short_lived_thread(compute_dtype, "auto", config.model.device))
    return config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})


def check_training(session: Session) -> str | None:
    """Check what the run trains with before a model is loaded; return the teacher's folder, or None if there is none."""
    if session.config.debug.debug_rollout_only:
        return None
    check_critic_saved(build.resolve_objective(session.config), session.checkpoint)
    return find_teacher(session.config, session.files)


def schedule_of(session: Session, num_prompts: int | None) -> Schedule:
    """Return which rollouts are to be done, of data with `num_prompts` (None if none is read).

    Raises `ConfigError` if a new run was to go on from a checkpoint of another run that leaves nothing to do.
    """
    config = session.config
    end = run_length(with_saved_length(config), num_prompts).num_rollout
    start, place, checkpoint = session.start_rollout_id, session.place, session.checkpoint
    is_own = place.held_run or (checkpoint is not None and is_same(checkpoint.path.parent, place.checkpoints))
    if checkpoint is not None and start >= end and not is_own:
        raise ConfigError(f"{checkpoint.path} has done {start} rollouts of {end}; raise --num-rollout to go on")
    interval = config.checkpoint.save_interval or (end if config.checkpoint.save is not None else None)
    return Schedule(
        start_rollout_id=start,
        num_rollout=end,
        eval_interval=config.eval.eval_interval if num_prompts is not None else None,
        save_interval=None if config.debug.debug_rollout_only else interval,
        max_lag=config.cluster.max_lag,
        can_save=not config.debug.debug_rollout_only,
        saves_apart=not place.saves_inside,
    )


def with_saved_length(config: Config) -> Config:
    """Return the configuration with the number of saved rollouts to train on: all of them unless it is set."""
    saved = config.debug.load_debug_rollout_data
    if saved is None or config.train.num_rollout is not None:
        return config
    count = max(rollout_ids(Path(saved)), default=-1) + 1
    return config.model_copy(update={"train": config.train.model_copy(update={"num_rollout": count})})


def restore(session: Session, trainer: Any, source: PromptSource | None) -> None:
    """Restore trainer, cursor and random generators from the checkpoint, or skip the prompts of earlier rollouts."""
    checkpoint = session.checkpoint
    if checkpoint is None:
        if source is not None:  # of earlier rollouts, if the run starts in the middle
            source.next_prompts(session.start_rollout_id * session.config.rollout.rollout_batch_size)
        return
    if trainer is not None:
        trainer.load(checkpoint)
    if source is not None and "source" in checkpoint.state:
        source.load_state(checkpoint.state["source"])
    set_random_state(checkpoint.entry("random", dict))
    note_resumed(session)


def note_resumed(session: Session) -> None:
    """Show which checkpoint the run goes on from, if it does."""
    if session.checkpoint is not None:
        session.progress.note(f"resuming at rollout {session.checkpoint.rollout_id} from {session.checkpoint.path}")


def is_finished(session: Session, schedule: Schedule) -> bool:
    """Return True and note it if the run in the folder is complete: rollouts, evaluation and summary."""
    place, checkpoint, done = session.place, session.checkpoint, session.place.folder.finished_after
    goes_back = (
        checkpoint is not None
        and checkpoint.rollout_id < schedule.num_rollout
        and is_same(checkpoint.path.parent, place.checkpoints)
    )
    if not place.resumes or goes_back or done is None or done < schedule.num_rollout:
        return False
    session.progress.note(
        f"{place.folder.path} is finished: {done} of {schedule.num_rollout} rollouts are done; raise --num-rollout to go on"
    )
    return True


def open_outputs(session: Session, stack: AsyncExitStack, *, again: bool = False) -> Outputs:
    """Open the run folder and the sinks.

    If a run resumes, or this process starts it `again`, what was written from the session's first rollout on is removed.
    """
    config, progress, place, folder = session.config, session.progress, session.place, session.place.folder
    if place.resumes or again:
        if session.checkpoint is not None:
            go_on_from(session.checkpoint, place.checkpoints)
        folder = folder.take_back(session.start_rollout_id)
    values = recorded(config)
    folder.write_config(values)
    sink = open_sinks(folder, config.observe, progress.warn, session.start_rollout_id, values)
    stack.callback(sink.close)
    return Outputs(folder, sink, progress, place.checkpoints)


def finish(folder: RunFolder, title: str, seconds: float, finished_after: int | None = None) -> dict[str, Any]:
    """Write the curve and summary.json from all that was measured, also if the run ended early; return the summary.

    `finished_after` is the number of rollouts after which the run ended by itself. Nothing is written to a folder that
    was removed meanwhile.
    """
    if not folder.is_run:
        return {}
    summary = {**summarize(read_metrics(folder.metrics), seconds), "finished_after": finished_after}
    curve = draw_curve(folder.metrics, folder.curve, title)
    folder.write_summary(summary)  # last: it says that nothing is left to do
    paths = {"run_folder": str(folder.path)} | ({} if curve is None else {"curve": str(curve)})
    return {**summary, **paths}
