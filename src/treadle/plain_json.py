"""Reduce values to JSON types, and check how deep they are nested.

Values of JSON types are the same on both sides of a process boundary. Rows are copied, written and sent by recursive
code, so a row that is nested too deep would end the run when it is scored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_DEPTH = 100
TOO_DEEP = f"its values are nested more than {MAX_DEPTH} deep; flatten them"


def plain_json(value: Any) -> Any:
    """Return a copy of a value made of JSON types only; what JSON can't hold becomes its text.

    Raises:
        ValueError: if lists and mappings are nested deeper than 100, which recursive code can't walk safely.

    >>> plain_json({1: (2, None), "when": complex(0, 1)})
    {'1': [2, None], 'when': '1j'}
    """
    return _plain(value, 0)


def _plain(value: Any, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
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


def is_too_deep(value: Any) -> bool:
    """Return whether objects and lists are nested more than `MAX_DEPTH` deep.

    >>> is_too_deep({"messages": [{"role": "user"}]})
    False
    """
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [item for outer in level for item in _inside(outer)]
        if not level:
            return False
    return True


def _inside(value: Any) -> list[Any]:
    """Return the objects and lists that a value holds."""
    if isinstance(value, Mapping):
        items: Any = value.values()
    elif isinstance(value, list | tuple):
        items = value
    else:
        return []
    return [item for item in items if isinstance(item, Mapping | list | tuple)]
