"""Check the shapes and dtypes that annotations promise, at every call of a function in the tests.

`jaxtyping.install_import_hook([...], "tests.shape_checks.check_tensors")` decorates every function of a package.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from beartype import beartype

OF_TENSORS = re.compile(r"\b(Bool|Float|Int|Num|Shaped)\[")


def check_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check those annotations that name shapes: others may be protocols or forward references, which mypy checks."""
    hints = {name: hint for name, hint in function.__annotations__.items() if OF_TENSORS.search(str(hint))}
    if not hints:
        return function
    function.__annotations__ = hints
    return beartype(function)
