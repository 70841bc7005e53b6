"""What a call of a user's function raises when it failed."""

from __future__ import annotations

from typing import Any

from treadle import errors


class CallFault(Exception):
    """A call failed; the text is the cause, ready for `Sample.failure`."""


class StartFault(CallFault):
    """A worker could not import or make what it was to run; `error` is what says so to the user."""

    def __init__(self, reason: str, kind: str):
        super().__init__(f"its worker process could not be started: {reason}")
        known: Any = getattr(errors, kind, None)
        is_ours = isinstance(known, type) and issubclass(known, errors.TreadleError)
        self.error: errors.TreadleError | None = known(reason) if is_ours else None
