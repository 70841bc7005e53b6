"""Evaluation sets: `name=source`, one after another."""

from __future__ import annotations

import re
from collections.abc import Sequence

from treadle.errors import ConfigError

_NAME = re.compile(r"[\w.-]+")


def parse_eval_sets(entries: Sequence[str]) -> dict[str, str]:
    """Sources by set name, in the order given; only the first `=` of an entry counts.

    Raises `ConfigError` for an entry without a name, a name twice, or one that could not be part of a metric name.

        >>> parse_eval_sets(["sums=reasoning_gym:chain_sum?size=64"])
        {'sums': 'reasoning_gym:chain_sum?size=64'}
    """
    faults, sets = _split(entries)
    if faults:
        raise ConfigError("; ".join(faults))
    return sets


def eval_set_faults(entries: Sequence[str]) -> list[str]:
    """What is wrong with the entries, one sentence each."""
    return _split(entries)[0]


def _split(entries: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    faults: list[str] = []
    sets: dict[str, str] = {}
    for entry in entries:
        name, equals, source = entry.partition("=")
        if not equals or not _NAME.fullmatch(name) or not source:
            faults.append(
                f"eval_prompt_data {entry!r} must be name=source, as heldout={entry}; a name has letters, digits, "
                "'_', '.' and '-'"
            )
        elif name in sets:
            faults.append(f"eval_prompt_data names the set {name!r} twice; give each set its own name")
        else:
            sets[name] = source
    return faults, sets
