"""How a run that resumes differs from the one that saved: what can't be resumed, and what is only not the same run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from treadle.config import Config
from treadle.config.secrets import recorded
from treadle.errors import CheckpointError
from treadle.training.checkpoint import Checkpoint
from treadle.training.critic import FOLDER as CRITIC_FOLDER
from treadle.training.objective import Objective

SECTIONS = ("model", "data", "rollout", "reward", "algorithm", "critic", "optim", "train", "parallel")
"""What decides which weights a run ends with; the other sections are about where it runs, and what it writes and shows."""

HARMLESS = {
    "model": {"device", "gradient_checkpointing"},
    "rollout": {"max_running_requests", "kv_cache_gib", "max_concurrent_prompts", "rollout_timeout_seconds"},
    "reward": {"rm_timeout_seconds", "rm_num_workers"},
    "train": {"num_rollout", "num_epoch", "start_rollout_id"},
    "parallel": {"distributed_timeout_seconds"},
}
"""Settings of these sections that a run may change at any time."""
MOST_NAMED = 6


def check_supplies(objective: Objective, checkpoint: Checkpoint | None) -> None:
    """Raise `CheckpointError` if the objective trains with something that the checkpoint does not hold."""
    if checkpoint is None or not objective.needs.values or (checkpoint.path / CRITIC_FOLDER).is_dir():
        return
    saved = checkpoint.config.get("algorithm")
    name = saved.get("advantage_estimator") if isinstance(saved, dict) else None
    told = f" (advantage_estimator = {name})" if isinstance(name, str) else ""
    raise CheckpointError(
        f"checkpoint {str(checkpoint.path)!r} is of a run without a critic{told}, and this run trains one; resume with the "
        "same algorithm, or start a new run from its weights: treadle model export, then --hf-checkpoint"
    )


def differences(config: Config, checkpoint: Checkpoint) -> list[str]:
    """Return a warning that names the settings with which a resumed run does not end as the saved one would have."""
    found = list(_changed(checkpoint.config, recorded(config)))
    if not found:
        return []
    more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return [f"this run is not the one that was saved, it has other settings: {', '.join(found[:MOST_NAMED])}{more}"]


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
