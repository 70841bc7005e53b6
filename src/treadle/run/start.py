"""The commands that start a run: check the configuration, find what the run needs, and hand it to its runtime."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from treadle.config import Config, check_config
from treadle.errors import ConfigError
from treadle.models.model_config import is_model_folder
from treadle.models.saving import export_model
from treadle.observe.progress import Progress
from treadle.run.local import evaluate_locally, train_locally
from treadle.run.memory import check_samples_fit, machine_memory
from treadle.run.place import claim_folder, claim_place
from treadle.run.session import Session, open_session
from treadle.run.stop import Stop, leave
from treadle.training.checkpoint import find_checkpoint


def train(config: Config, recipe_name: str) -> None:
    """Train as configured; a user's mistake raises a `TreadleError`, before any work if possible.

    A run that a signal stopped raises `KeyboardInterrupt` (Ctrl-C) or `SystemExit` with 143 (SIGTERM) once it is saved.
    """
    run = train_locally
    if config.cluster.runtime == "ray":
        from treadle.run.ray.runtime import train_on_cluster as run
    stop = Stop()
    with _opened(config, recipe_name, evaluation_only=False) as session:
        summary = asyncio.run(run(session, recipe_name, stop))
        if summary:
            session.progress.show_summary(summary)
    leave(stop.signum)


def evaluate(config: Config, recipe_name: str) -> None:
    """Evaluate the model, or the checkpoint that `load` names, on the evaluation sets."""
    if not config.eval.eval_prompt_data:
        raise ConfigError("treadle eval needs evaluation sets; give --eval-prompt-data name=source")
    with _opened(config, recipe_name, evaluation_only=True) as session:
        asyncio.run(evaluate_locally(session, recipe_name))


def export(checkpoint: Path, out: Path, dtype: str, warn: Callable[[str], None] = warnings.warn) -> Path:
    """Write the model of a checkpoint as a Hugging Face folder; of a run or save folder, that of the newest checkpoint.

    `warn` is called for each damaged checkpoint that is skipped.
    """
    if is_model_folder(checkpoint):
        return export_model(checkpoint, out, dtype)  # a model folder already: another dtype is asked for
    return export_model(find_checkpoint(checkpoint, warn).path / "model", out, dtype)


@contextmanager
def _opened(config: Config, recipe_name: str, *, evaluation_only: bool) -> Iterator[Session]:
    """Check the configuration, claim the run's folders and find its model; the display and the locks end with it."""
    found = check_config(config, evaluation_only=evaluation_only)
    check_samples_fit(config, machine_memory("cpu"), evaluation_only=evaluation_only)
    with Progress(config.observe.progress, title=recipe_name) as progress, ExitStack() as stack:
        for warning in found:
            progress.warn(warning)
        if evaluation_only:
            place = claim_folder(config, f"{recipe_name}-eval", progress, stack)
        else:
            place = claim_place(config, recipe_name, progress, stack)
        yield open_session(config, progress, place)
