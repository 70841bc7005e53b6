"""What all sections of the configuration are."""

from pydantic import BaseModel, ConfigDict

MAX_SECONDS = 604_800.0
"""Upper bound of every deadline and interval: a week. Sockets and threads can't wait for much more than three."""


class Section(BaseModel):
    """Base of all sections: frozen, and unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)
