"""What a checkpoint holds of a run beside its model, and what a run that resumes may change."""

from __future__ import annotations

import base64
import os
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from treadle.config import Config, recorded
from treadle.errors import CheckpointError, first_line
from treadle.training import trainer_files
from treadle.training.checkpoint import Checkpoint, save_checkpoint
from treadle.training.critic import FOLDER as CRITIC_FOLDER
from treadle.training.objective import Objective
from treadle.training.trainer import Trainer

SECTIONS = ("model", "data", "rollout", "reward", "algorithm", "critic", "optim", "train", "parallel")
"""Sections that decide which weights a run ends with; the others are about where it runs, and what it writes and shows."""

HARMLESS = {
    "model": {"device", "gradient_checkpointing"},
    "rollout": {"max_running_requests", "kv_cache_gib", "max_concurrent_prompts", "rollout_timeout_seconds"},
    "reward": {"rm_timeout_seconds", "rm_num_workers"},
    "train": {"num_rollout", "num_epoch", "start_rollout_id"},
    "parallel": {"distributed_timeout_seconds"},
}
"""Settings of these sections that a run may change at any time."""
MOST_NAMED = 6


def save_trainer(
    trainer: Trainer,
    save_codec: Callable[[Path], None],
    folder: Path,
    done: int,
    state: Mapping[str, Any],
    *,
    announce: Callable[[str, Path], None] = lambda part, path: None,
    critic: Path | None = None,
) -> None:
    """Write a checkpoint that resumes at rollout `done`.

    Args:
        trainer: the trainer of this process; of many ranks, that of the first.
        save_codec: writes the tokenizer into the model's folder.
        folder: the save folder.
        done: number of rollouts that were trained.
        state: what the other parts of the run need to resume, in JSON values.
        announce: called with `model` or `rest` and its folder before that part is written.
        critic: where a critic of its own was written, which is moved into the checkpoint.
    """

    def write_model(path: Path) -> None:
        announce("model", path)
        trainer_files.write_model(trainer, path)
        save_codec(path)

    def write_rest(path: Path) -> None:
        announce("rest", path)
        trainer_files.write_rest(trainer, path)
        if critic is not None:
            os.replace(critic, path / CRITIC_FOLDER)

    save_checkpoint(
        folder,
        done,
        write_model=write_model,
        write_rest=write_rest,
        optimizer=None if trainer.policy.is_sharded else trainer.optimizer.state_tensors(),
        state={**trainer.state(), "random": random_state(), "dtype": trainer.config.model.dtype, **state},
        config=recorded(trainer.config),
        keep=trainer.config.checkpoint.keep_checkpoints,
    )


def check_critic_saved(objective: Objective, checkpoint: Checkpoint | None) -> None:
    """Raise `CheckpointError` if the objective needs a critic and the checkpoint holds none."""
    if checkpoint is None or not objective.needs.values or (checkpoint.path / CRITIC_FOLDER).is_dir():
        return
    saved = checkpoint.config.get("algorithm")
    name = saved.get("advantage_estimator") if isinstance(saved, dict) else None
    estimator = f" (advantage_estimator = {name})" if isinstance(name, str) else ""
    raise CheckpointError(
        f"checkpoint {str(checkpoint.path)!r} is of a run without a critic{estimator}, and this run trains one; resume "
        "with the same algorithm, or start a new run from its weights: treadle model export, then --hf-checkpoint"
    )


def changed_settings(config: Config, checkpoint: Checkpoint) -> str | None:
    """Return a warning that names the settings with which a resumed run does not end as the saved one would have."""
    found = list(_changed(checkpoint.config, recorded(config)))
    if not found:
        return None
    more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return f"this run is not the one that was saved, it has other settings: {', '.join(found[:MOST_NAMED])}{more}"


def _changed(saved: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    for section in SECTIONS:
        before, after = saved.get(section), now[section]
        if not isinstance(before, dict):
            continue
        free = HARMLESS.get(section, set())
        if section == "train" and now["optim"]["lr_decay_style"] != "constant" and not now["optim"]["lr_decay_steps"]:
            free = free - {"num_rollout", "num_epoch"}  # the learning rate decays over the whole run
        for name, value in after.items():
            if name in before and before[name] != value and name not in free:
                yield f"{name} {_shown(before[name])} → {_shown(value)}"


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "…"


# Random generators


def random_state() -> dict[str, Any]:
    """Return the state of the global random generators of torch, numpy and Python, as JSON values."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(),
        "numpy": [str(kind), np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "python": [version, list(words), gauss],
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Set the generators to what `random_state` returned; raises `CheckpointError` for anything else."""
    try:
        torch.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(state["torch"])), dtype=torch.uint8))
        kind, keys, position, has_gauss, cached = state["numpy"]
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
    except (LookupError, ArithmeticError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"the saved state of the random generators is damaged ({first_line(error)}); load another checkpoint"
        ) from error


def seed_everything(seed: int) -> None:
    """Seed the global generators for users' code (a custom reward, say); Treadle itself does not use them."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
