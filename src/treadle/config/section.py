"""What all sections of the configuration are."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator

from treadle.config.values import check_value

MAX_SECONDS = 604_800.0
"""Upper bound of every deadline and interval: a week. Sockets and threads can't wait for much more than three."""


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys are refused, and numbers are finite and fit in 64 bits."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _check(cls, value: Any) -> Any:
        return check_value(value)
