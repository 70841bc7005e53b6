"""What a trainer writes into a checkpoint beside its state: the model as a Hugging Face folder, and the rest."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from treadle.errors import ModelError, first_line
from treadle.models.saving import save_model, write_model_config
from treadle.training.critic import FOLDER as CRITIC_FOLDER
from treadle.training.sharded_state import write_model_folder, write_parts

if TYPE_CHECKING:
    from treadle.training.trainer import Trainer


def try_writing(trainer: Trainer, save_codec: Callable[[Path], None]) -> None:
    """Write what a checkpoint has beside tensors to a folder that is removed; one rank calls this.

    What can't be saved is then known before training. Raises `ModelError` if the model's files can't be written.
    """
    with tempfile.TemporaryDirectory(prefix="treadle-trial-") as folder:
        try:
            for model in (trainer.model, *([] if trainer.critic is None else [trainer.critic.model.model])):
                write_model_config(model, Path(folder))
            save_codec(Path(folder))
        except Exception as error:  # the writers raise many kinds for the same cause
            name = trainer.config.model.hf_checkpoint
            raise ModelError(f"the model {name!r} could not be saved after training: {first_line(error)}") from error


def write_model(trainer: Trainer, folder: Path) -> None:
    """Write the master weights as a Hugging Face folder; all ranks call this."""
    if trainer.policy.is_sharded:
        with trainer.named("writing the model"):
            write_model_folder(trainer.policy, trainer.model, "", folder)
        return
    save_model(trainer.model, {name: p.detach() for name, p in trainer.optimizer.masters.items()}, folder)


def write_rest(trainer: Trainer, folder: Path) -> None:
    """Write into a checkpoint folder what is not the policy: the critic, a reference that moves.

    Of many ranks, which all call this, also the optimizer's state.
    """
    with trainer.named("writing a checkpoint"):
        if trainer.policy.is_sharded:
            parts, like = trainer.optimizer.state_tensors(), trainer.optimizer.parameter_of
            write_parts(folder, "optimizer", parts, like, trainer.policy)
        if trainer.critic is not None:
            trainer.critic.write(folder / CRITIC_FOLDER)
        if trainer.reference is not None:
            trainer.reference.write(folder)
