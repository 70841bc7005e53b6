"""What all sections of the configuration are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, create_model, field_validator

from treadle.catalog import Record
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


S = TypeVar("S", bound=type[Section])


def with_parameters(*tables: Mapping[str, Record]) -> Callable[[S], S]:
    """Return a decorator that gives a section one more field for each parameter of these algorithms."""
    parameters = [p for table in tables for record in table.values() for p in record.parameters]
    fields: Any = {
        p.name: (float, Field(p.default, description=p.help, **dict[str, Any](p.bounds))) for p in parameters
    }

    def extend(model: S) -> S:
        extended: Any = create_model(
            model.__name__, __base__=model, __module__=model.__module__, __doc__=model.__doc__, **fields
        )
        return cast(S, extended)

    return extend
