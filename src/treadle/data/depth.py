"""How deep the values of a row may be nested.

Rows are copied, written and sent by recursive code; one that is nested too deep would end the run when it is scored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_DEPTH = 100
TOO_DEEP = f"its values are nested more than {MAX_DEPTH} deep; flatten them"


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
