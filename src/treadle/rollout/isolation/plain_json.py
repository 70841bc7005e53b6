"""Values as JSON types only, so that they are the same on both sides of a process boundary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MAX_DEPTH = 100


def plain_json(value: Any) -> Any:
    """Return a copy of a value made of JSON types only; what JSON can't hold becomes its text.

    Raises:
        ValueError: if lists and mappings are nested deeper than 100, which recursive code can't walk safely.

    >>> plain_json({1: (2, None), "when": complex(0, 1)})
    {'1': [2, None], 'when': '1j'}
    """
    return _plain(value, 0)


def _plain(value: Any, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise ValueError(f"it is nested more than {_MAX_DEPTH} deep")
    if value is None or isinstance(value, bool | str):
        return value if type(value) in (str, bool, type(None)) else str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value]
    if isinstance(value, set | frozenset):  # its order differs between processes
        return sorted((_plain(item, depth + 1) for item in value), key=repr)
    if hasattr(value, "tolist"):  # a numpy array or scalar
        return _plain(value.tolist(), depth + 1)
    return str(value)
