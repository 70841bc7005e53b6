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
from treadle.run.compute import in_short_lived_thread
from treadle.run.differences import differences
from treadle.run.loop import Schedule
from treadle.run.place import Place, is_same
from treadle.run.record import Outputs
from treadle.run.state import set_random_state
from treadle.run.vocabulary import check_vocabulary, padding_note
from treadle.training.checkpoint import Checkpoint, go_on_from


@dataclass(frozen=True, eq=False)
class Session:
    """What every command needs first: its folders, the checkpoint to start from, the model's files and its tokenizer."""

    config: Config
    progress: Progress
    place: Place
    checkpoint: Checkpoint | None
    model_path: str
    codec: Codec
    max_prompt: int

    @property
    def start_rollout_id(self) -> int:
        return self.checkpoint.rollout_id if self.checkpoint else self.config.train.start_rollout_id or 0

    @property
    def policy_path(self) -> str:
        """Folder of the weights that a training run starts with: a trainer loads those of the checkpoint over them."""
        if self.checkpoint is not None and self.config.debug.debug_rollout_only:  # there is no trainer
            return str(self.checkpoint.path / "model")
        return self.model_path


def open_session(config: Config, progress: Progress, place: Place) -> Session:
    """Find the model, and load the tokenizer."""
    checkpoint = place.checkpoint
    config = _with_dtype(config, checkpoint)
    if checkpoint is not None:
        for text in differences(config, checkpoint):
            progress.warn(text)
    progress.phase("looking for the model")
    model_path = resolve(config.model.hf_checkpoint)
    in_short_lived_thread(build.check_models, config, model_path)
    codec = load_codec(model_path, config.data.template_kwargs)
    check_vocabulary(config, codec, model_path)
    note = padding_note(config, codec, model_path)
    if note is not None:
        progress.note(note)
    return Session(config, progress, place, checkpoint, model_path, codec, build.longest_prompt(config, model_path))


def _with_dtype(config: Config, checkpoint: Checkpoint | None) -> Config:
    """The configuration with `auto` resolved: as the checkpoint was computed, else by what is fast here.

    On another machine, or a busy one, the choice could be another one, and a resumed run would not be the same run.
    """
    if config.model.dtype != "auto":
        return config
    saved = None if checkpoint is None else checkpoint.state.get("dtype")
    dtype = saved or name_of(in_short_lived_thread(compute_dtype, "auto", config.model.device))
    return config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})


def schedule_of(session: Session, num_prompts: int | None) -> Schedule:
    """Return which rollouts are to be done, of data with `num_prompts` (None if none is read).

    Raises `ConfigError` if a new run was to go on from a checkpoint of another run that leaves nothing to do.
    """
    config = session.config
    saved = config.debug.load_debug_rollout_data
    if num_prompts is None and config.train.num_rollout is None:
        assert saved is not None
        end = max(rollout_ids(Path(saved)), default=-1) + 1
    else:
        end = num_rollout(config, num_prompts)
    start = session.start_rollout_id
    place, checkpoint = session.place, session.checkpoint
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
        saves_apart=not session.place.saves_inside,
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
    set_random_state(checkpoint.entry("random", dict))
    session.progress.note(f"resuming at rollout {checkpoint.rollout_id} from {checkpoint.path}")


def is_finished(session: Session, schedule: Schedule) -> bool:
    """Return True, and say so, if all was done in the run folder already: rollouts, evaluation and summary."""
    place, done = session.place, session.place.folder.finished_after
    checkpoint = session.checkpoint
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

    Of a run that resumes, or is done `again` by this process, what was written from the session's first rollout on is
    removed.
    """
    config, progress, place = session.config, session.progress, session.place
    folder = place.folder
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
