"""Which groups are worth training on.

A filter looks at a scored group and says why it is not, or None to keep it. What is dropped is counted by that reason
and replaced by new groups (DAPO's dynamic sampling: Yu et al. 2025, section 3.2, arXiv 2503.14476).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from treadle.errors import ConfigError
from treadle.registry import resolve, short_repr, user_code
from treadle.types import Group, Status

GroupFilter = Callable[[Group], str | None]
"""The reason to drop a group, a short word for a metric's name, or None."""

_WORD = re.compile(r"[^/\x00-\x1f\x7f]{1,64}")


def zero_signal(group: Group) -> str | None:
    """Drop a group whose scored samples all have the same reward: its advantages are zero."""
    rewards = {sample.reward for sample in group.samples if sample.reward is not None}
    return "zero_signal" if len(rewards) <= 1 else None


def any_failed(group: Group) -> str | None:
    """Drop a group in which a reward or environment failed."""
    return "failed_group" if any(sample.status is Status.FAILED for sample in group.samples) else None


GROUP_FILTERS: dict[str, GroupFilter] = {"zero_signal": zero_signal, "any_failed": any_failed}


def load_filter(name: str) -> GroupFilter:
    """Return the filter of this name or path; what yours raises or returns is checked at each call.

    Raises `ConfigError` if there is none. A filter of yours that raises, or that returns neither None nor a short word,
    raises `ConfigError` that names it: a filter decides what is trained, so a broken one ends the run.
    """
    found: Any = resolve("group filter", name, GROUP_FILTERS)
    if not callable(found):
        raise ConfigError(f"group filter {name!r} is no function of a group")
    if name in GROUP_FILTERS:
        return GROUP_FILTERS[name]

    def fault(what: str) -> ConfigError:
        return ConfigError(
            f"group filter {name!r} {what}; return a short word without a slash, or None to keep the group"
        )

    def checked(group: Group) -> str | None:
        with user_code(fault):
            reason = found(group)
        if reason is None or (isinstance(reason, str) and _WORD.fullmatch(reason)):
            return reason
        with user_code(fault):
            text = short_repr(reason)
        raise fault(f"returned {text}")

    return checked
