"""From a reward's name in the config to a function, in the parent and again in each worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from treadle.catalog import reward_names
from treadle.errors import RewardError
from treadle.registry import resolve
from treadle.rollout.rewards.builtin import BUILTIN_REWARDS, BuiltinReward, RewardSettings
from treadle.rollout.rewards.forms import RewardFunction, inspect_function


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """All a worker needs to make a reward: its part name, what to resolve, and the settings; JSON values only."""

    name: str
    target: str
    settings: RewardSettings

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> RewardSpec:
        """Inverse of `to_json`."""
        return cls(row["name"], row["target"], RewardSettings(**row["settings"]))

    @property
    def builtin(self) -> BuiltinReward | None:
        return BUILTIN_REWARDS.get(self.target)


def make_specs(targets: tuple[str, ...], settings: RewardSettings) -> list[RewardSpec]:
    """Give each reward its part name (`reward_names`).

    A file is made absolute, so that workers find it from any folder. Raises `RewardError` for a repeated reward.
    """
    specs: list[RewardSpec] = []
    for name, target in zip(reward_names(targets), targets, strict=True):
        location, _, path = target.rpartition(":")
        if location.endswith(".py") and (file := Path(location).expanduser()).is_file():
            target = f"{file.resolve()}:{path}"
        if any(spec.target == target for spec in specs):
            raise RewardError(f"reward {target!r} is given twice; give it once, with its weight in --rm-weights")
        specs.append(RewardSpec(name, target, settings))
    return specs


def load_reward(spec: RewardSpec) -> RewardFunction:
    """Import and make a reward here; raises `ConfigError` or `RewardError` if it can't be."""
    if spec.builtin is not None:
        return RewardFunction(spec.name, spec.builtin.make(spec.settings), "sample", is_async=False)
    return inspect_function(spec.name, resolve("reward", spec.target, BUILTIN_REWARDS))
