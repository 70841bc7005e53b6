"""The base class of all sections of the configuration, and the functions that declare their fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, create_model, field_validator

from treadle.catalog import Record
from treadle.config.conditions import Condition, read_by
from treadle.config.values import check_value

MAX_SECONDS = 604_800.0
"""Upper bound of every deadline and interval: a week. Sockets and threads can't wait for much more than three."""


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys are refused, and numbers are finite and fit in 64 bits.

    The text below a field is its help.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @field_validator("*")
    @classmethod
    def _check(cls, value: Any) -> Any:
        return check_value(value)


@dataclass(frozen=True)
class Declared:
    """What a field declares beside its type, its default and its help; see `setting`."""

    only_with: tuple[Condition, ...] = ()
    path: bool = False
    names: Mapping[str, Record] = field(default_factory=dict)
    bounds: Mapping[str, float] = field(default_factory=dict)


def setting(
    default: Any,
    *only_with: Condition,
    path: bool = False,
    names: Mapping[str, Record] | None = None,
    help: str | None = None,
    **bounds: float,
) -> Any:
    """Declare a field of a section.

    Args:
        default: the default value, or `dict` for an empty table.
        only_with: conditions under which the field has an effect; the first that does not hold is reported.
        path: the text is or may be a path, in which a leading `~` is the home folder.
        names: records of the names that the field accepts.
        help: the help, unless it is the text below the field.
        bounds: `gt`, `ge`, `lt`, `le` of a number.
    """
    extra: dict[str, Any] = {"declared": Declared(only_with, path, names or {}, bounds)}
    value: dict[str, Any] = {"default_factory": default} if default is dict else {"default": default}
    return Field(**value, **dict[str, Any](bounds), description=help, json_schema_extra=extra)


def seconds(default: float, *only_with: Condition) -> Any:
    """Declare a deadline or an interval in seconds."""
    return setting(default, *only_with, gt=0, le=MAX_SECONDS)


S = TypeVar("S", bound=type[Section])


def with_parameters(*tables: Mapping[str, Record]) -> Callable[[S], S]:
    """Return a decorator that gives a section one more field for each parameter of these algorithms."""
    fields: dict[str, Any] = {}
    for table in tables:
        for parameter in (p for record in table.values() for p in record.parameters):
            bounds: dict[str, Any] = dict(parameter.bounds)
            declared = setting(parameter.default, read_by(table, parameter.name), help=parameter.help, **bounds)
            fields[parameter.name] = (float, declared)

    return with_fields(fields)


def with_fields(fields: Mapping[str, Any]) -> Callable[[S], S]:
    """Return a decorator that gives a section these fields, each a type and what `setting` returned."""

    def extend(model: S) -> S:
        extended: Any = create_model(
            model.__name__, __base__=model, __module__=model.__module__, __doc__=model.__doc__, **fields
        )
        return cast(S, extended)

    return extend
