"""What a rule between config fields reports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from treadle.config.sections import Config


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence about the configuration; a fatal one stops the run before it starts."""

    text: str
    fatal: bool


Rule = Callable[[Config], Iterator[Finding]]


def fault(text: str) -> Finding:
    """A mistake that stops the run before it starts."""
    return Finding(text, fatal=True)


def warning(text: str) -> Finding:
    """Something that is probably not meant; the run goes on."""
    return Finding(text, fatal=False)
