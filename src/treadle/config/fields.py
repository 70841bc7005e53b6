"""Every config field with what people need to know of it: flag, kind, bounds, default, meaning.

The flags, their help, the docs page and the error messages all read this one table, made from the sections.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import AfterValidator, BaseModel, ConfigDict, TypeAdapter
from pydantic.fields import FieldInfo

from treadle.catalog import Record
from treadle.config.conditions import Condition
from treadle.config.data_section import EvalOverride
from treadle.config.sections import Config, Section
from treadle.config.values import check_value
from treadle.registry import suggestion

_KINDS = {str: "text", int: "integer", float: "number", bool: "switch"}
_PLURALS = {str: "texts", int: "integers", float: "numbers"}
_METAVARS = {str: "TEXT", int: "INT", float: "FLOAT"}
_BOUNDS = {
    annotated_types.Ge: ("≥", "ge"),
    annotated_types.Gt: (">", "gt"),
    annotated_types.Le: ("≤", "le"),
    annotated_types.Lt: ("<", "lt"),
}


@dataclass(frozen=True, slots=True)
class ConfigField:
    """One field of one section.

    `value_type` is the type without `None`; `optional` says whether `None` is allowed too.
    """

    section: str
    name: str
    info: FieldInfo
    value_type: Any
    optional: bool

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def is_switch(self) -> bool:
        return self.value_type is bool

    @property
    def is_list(self) -> bool:
        return get_origin(self.value_type) is tuple

    @property
    def recipe_only(self) -> bool:
        """Tables have no flag."""
        return get_origin(self.value_type) is dict

    @property
    def holds_tables(self) -> bool:
        """True where the values of the table are tables themselves."""
        return self.recipe_only and isinstance(get_args(self.value_type)[1], type)

    @property
    def default(self) -> Any:
        return self.info.get_default(call_default_factory=True)

    @property
    def description(self) -> str:
        """What it does, from the text below the field, and the names it takes."""
        names = f"One of: {', '.join(self.names)}." if self.names else ""
        return " ".join(f"{self.info.description or ''} {names}".split())

    @property
    def names(self) -> Mapping[str, Record]:
        """The records of the names it takes; empty if it takes none."""
        return self._declared("names") or {}

    @property
    def is_path(self) -> bool:
        """True if its text is a path, or may be one."""
        return bool(self._declared("path"))

    @property
    def only_with(self) -> tuple[Condition, ...]:
        """The conditions under which it has an effect."""
        return self._declared("only_with") or ()

    def _declared(self, key: str) -> Any:
        extra = self.info.json_schema_extra
        return extra.get(key) if isinstance(extra, dict) else None

    @property
    def choices(self) -> tuple[str, ...]:
        return get_args(self.value_type) if get_origin(self.value_type) is Literal else ()

    @property
    def kind(self) -> str:
        """The kind of value in a word or two: `integer`, `list of texts`, `auto | cpu | cuda`."""
        if self.recipe_only:
            return "table"
        if self.is_list:
            return f"list of {_PLURALS[get_args(self.value_type)[0]]}"
        return " | ".join(self.choices) or _KINDS[self.value_type]

    @property
    def metavar(self) -> str:
        if self.is_list:
            return f"{_METAVARS[get_args(self.value_type)[0]]}…"
        return "{" + ",".join(self.choices) + "}" if self.choices else _METAVARS[self.value_type]

    @property
    def bounds(self) -> str:
        """The numbers allowed, as `> 0, ≤ 1`; empty where all are."""
        return ", ".join(f"{sign} {getattr(item, key)}" for item, sign, key in _bounds_of(self.info))

    def adapter(self) -> TypeAdapter[Any]:
        """A validator of this field's values; numbers must be finite and fit in 64 bits."""
        value_type: Any = Annotated[(self.info.annotation, *self.info.metadata, AfterValidator(check_value))]
        return TypeAdapter(value_type, config=ConfigDict(allow_inf_nan=False))


def _bounds_of(info: FieldInfo) -> Iterator[tuple[Any, str, str]]:
    for item in info.metadata:
        for kind, (sign, key) in _BOUNDS.items():
            if isinstance(item, kind):
                yield item, sign, key


def _without_none(annotation: Any) -> tuple[Any, bool]:
    if get_origin(annotation) in (Union, types.UnionType):
        (kept,) = [arg for arg in get_args(annotation) if arg is not type(None)]
        return kept, True
    return annotation, False


def _fields_of(section: str, model: type[BaseModel]) -> Iterator[ConfigField]:
    for name, info in model.model_fields.items():
        value_type, optional = _without_none(info.annotation)
        yield ConfigField(section, name, info, value_type, optional)


def section_models() -> dict[str, type[Section]]:
    """Section names and their models, in the order of `Config`."""
    models: dict[str, Any] = {name: info.annotation for name, info in Config.model_fields.items()}
    return models


@lru_cache(maxsize=1)
def config_fields() -> dict[str, ConfigField]:
    """All fields by name; names are unique across sections."""
    fields = [field for name, model in section_models().items() for field in _fields_of(name, model)]
    by_name = {field.name: field for field in fields}
    assert len(by_name) == len(fields), "a field name stands in two sections"
    return by_name


def override_fields() -> tuple[str, ...]:
    """The settings an `[eval.eval_overrides.NAME]` table may hold."""
    return tuple(EvalOverride.model_fields)


def nearest(name: str, known: Sequence[str]) -> str | None:
    """The known name most like this one, or None where none is close.

    >>> nearest("rollout_batch_sise", ["rollout_batch_size", "micro_batch_size"])
    'rollout_batch_size'
    """
    found = get_close_matches(name, known, n=1, cutoff=0.6)
    return found[0] if found else None


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """The end of an error message about an unknown name: the nearest one, or all of them if they are few."""
    names = f"; known are {', '.join(known)}" if 0 < len(known) <= 12 else ""
    return suggestion(name, known) or names
