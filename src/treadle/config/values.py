"""What holds for every value of the configuration: numbers fit in 64 bits, text is text, paths can be paths."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MIN_INTEGER, MAX_INTEGER = -(2**63), 2**63 - 1
MAX_FLOAT = 3.4028234663852886e38

_MAX_NAME_BYTES, _MAX_PATH_BYTES = 255, 4095
_MAX_SHOWN = 80


def check_value(value: Any) -> Any:
    """Return the value. Raises `ValueError` if a number in it fits in no tensor, or a text in it is not UTF-8."""
    if isinstance(value, int) and not MIN_INTEGER <= value <= MAX_INTEGER:
        raise ValueError(f"must fit in 64 bits ({MIN_INTEGER} to {MAX_INTEGER})")
    if isinstance(value, float) and abs(value) > MAX_FLOAT:
        raise ValueError(f"must fit in a float32 (at most {MAX_FLOAT:g})")
    if isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError("must be text in UTF-8")
    if isinstance(value, dict):
        for key, inner in value.items():
            check_value(key)
            check_value(inner)
    elif isinstance(value, tuple | list):
        for inner in value:
            check_value(inner)
    return value


def expand_paths(value: Any, *, named: bool = False) -> Any:
    """Return a path, or each of a tuple of paths, with `~` expanded; `named` is for `name=path`.

    Raises `ValueError` if a text can't be a path.
    """
    if isinstance(value, tuple):
        return tuple(_expand(text, named) for text in value)
    return _expand(value, named) if isinstance(value, str) else value


def _expand(text: str, named: bool) -> str:
    before, equals, path = text.partition("=") if named else ("", "", text)
    if path.startswith("~"):
        home, slash, rest = path.partition("/")
        try:
            path = str(Path(home).expanduser()) + slash + rest
        except RuntimeError:
            raise ValueError(
                f"names the home folder of {home[1:]!r}, which does not exist; write the path out"
            ) from None
    if "\0" in path:
        raise ValueError("must be a path, without a zero byte")
    names = [len(os.fsencode(part)) for part in path.split("?", 1)[0].split("/")]
    if max(names) > _MAX_NAME_BYTES or sum(names) + len(names) > _MAX_PATH_BYTES:
        raise ValueError(f"must be a path: at most {_MAX_NAME_BYTES} bytes for a name, {_MAX_PATH_BYTES} in all")
    return before + equals + path


def first_few(faults: Sequence[str], most: int = 3) -> list[str]:
    """Return the first faults and how many more there are, so that a long list of them stays readable."""
    rest = len(faults) - most
    return [*faults[:most], *([f"and {rest} more like it"] if rest > 0 else [])]


def written(value: Any) -> str:
    r"""Return a value for a message: on one line, with control characters escaped, and cut after 80 characters.

    >>> written("a\nb"), written("x" * 200)[-21:], written(3)
    ("'a\\nb'", 'xxx… (200 characters)', '3')
    """
    text = value if isinstance(value, str) else str(value)
    size = len(text)
    shown = text[:_MAX_SHOWN]
    shown = shown if shown and shown.isprintable() and shown.strip() == shown else repr(shown)
    return shown if size <= _MAX_SHOWN else f"{shown}… ({size} characters)"
