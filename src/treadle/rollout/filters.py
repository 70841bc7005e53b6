"""Which groups are worth training on.

A filter looks at a scored group and says why it is not, or None to keep it. What is dropped is counted by that reason
and replaced by new groups (DAPO's dynamic sampling: Yu et al. 2025, section 3.2, arXiv 2503.14476).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from treadle.errors import ConfigError
from treadle.registry import resolve
from treadle.types import Group, Status

GroupFilter = Callable[[Group], str | None]
"""The reason to drop a group, a short word for a metric's name, or None."""


def zero_signal(group: Group) -> str | None:
    """Drop a group whose scored samples all have the same reward: its advantages are zero."""
    rewards = {sample.reward for sample in group.samples if sample.reward is not None}
    return "zero_signal" if len(rewards) <= 1 else None


def any_failed(group: Group) -> str | None:
    """Drop a group in which a reward or environment failed."""
    return "failed_group" if any(sample.status is Status.FAILED for sample in group.samples) else None


GROUP_FILTERS: dict[str, GroupFilter] = {"zero_signal": zero_signal, "any_failed": any_failed}


def load_filter(name: str) -> GroupFilter:
    """The filter of this name or path; what yours returns is checked when it is used."""
    found: Any = resolve("group filter", name, GROUP_FILTERS)
    if not callable(found):
        raise ConfigError(f"group filter {name!r} is no function of a group")

    def checked(group: Group) -> str | None:
        reason = found(group)
        if reason is None or (isinstance(reason, str) and reason and "/" not in reason):
            return reason
        raise ConfigError(f"group filter {name!r} returned {reason!r}; return a short word without a slash, or None")

    return checked
