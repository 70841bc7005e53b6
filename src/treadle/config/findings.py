"""What a rule between config fields reports, and the list of all rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from treadle.config.conditions import Part

if TYPE_CHECKING:
    from treadle.config.sections import Config


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence about the configuration; a fatal one stops the run before it starts."""

    text: str
    fatal: bool


def fault(text: str) -> Finding:
    """Return a mistake, which stops the run before it starts."""
    return Finding(text, fatal=True)


def warning(text: str) -> Finding:
    """Return something that is probably not meant; the run goes on."""
    return Finding(text, fatal=False)


Rule = Callable[["Config"], Iterator[Finding]]
RULES: list[tuple[Part, Rule]] = []
"""Every rule with the part of a run that it is for, in the order in which they report."""


def rule(part: Part) -> Callable[[Rule], Rule]:
    """Return a decorator that adds a rule to `RULES`."""

    def add(function: Rule) -> Rule:
        RULES.append((part, function))
        return function

    return add
