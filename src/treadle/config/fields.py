"""Every config field with its flag, kind, bounds, default and meaning.

The flags, their help, the docs page, the checks and the error messages all read this one table, made from the sections.
"""

from __future__ import annotations

import types
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AfterValidator, ConfigDict, TypeAdapter
from pydantic.fields import FieldInfo

from treadle.config.data_section import EvalOverride
from treadle.config.section import Declared, Section
from treadle.config.sections import Config
from treadle.config.values import check_value

_KINDS = {str: ("text", "TEXT"), int: ("integer", "INT"), float: ("number", "FLOAT"), bool: ("switch", "")}
_SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


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
    declared: Declared

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
        """True for a table, which has no flag."""
        return get_origin(self.value_type) is dict

    @property
    def holds_tables(self) -> bool:
        """True if the values of the table are tables themselves."""
        return self.recipe_only and isinstance(get_args(self.value_type)[1], type)

    @property
    def default(self) -> Any:
        return self.info.get_default(call_default_factory=True)

    @property
    def description(self) -> str:
        """The field's help, and the names that it accepts."""
        names = f"One of: {', '.join(self.declared.names)}." if self.declared.names else ""
        return " ".join(f"{self.info.description or ''} {names}".split())

    @property
    def choices(self) -> tuple[str, ...]:
        return get_args(self.value_type) if get_origin(self.value_type) is Literal else ()

    @property
    def kind(self) -> str:
        """The kind of value in a word or two: `integer`, `list of texts`, `auto | cpu | cuda`."""
        if self.recipe_only:
            return "table"
        if self.is_list:
            return f"list of {_KINDS[get_args(self.value_type)[0]][0]}s"
        return " | ".join(self.choices) or _KINDS[self.value_type][0]

    @property
    def metavar(self) -> str:
        if self.is_list:
            return f"{_KINDS[get_args(self.value_type)[0]][1]}…"
        return "{" + ",".join(self.choices) + "}" if self.choices else _KINDS[self.value_type][1]

    @property
    def bounds(self) -> str:
        """The numbers allowed, as `> 0, ≤ 1`; empty if all are."""
        return ", ".join(f"{_SIGNS[key]} {value}" for key, value in self.declared.bounds.items())

    def adapter(self) -> TypeAdapter[Any]:
        """Return a validator of this field's values; numbers must be finite and fit in 64 bits."""
        value_type: Any = Annotated[(self.info.annotation, *self.info.metadata, AfterValidator(check_value))]
        return TypeAdapter(value_type, config=ConfigDict(allow_inf_nan=False))


def section_models() -> dict[str, type[Section]]:
    """Return the sections' models by name, in the order of `Config`."""
    models: dict[str, Any] = {name: info.annotation for name, info in Config.model_fields.items()}
    return models


@lru_cache(maxsize=1)
def config_fields() -> dict[str, ConfigField]:
    """Return all fields by name; names are unique across sections."""
    fields: dict[str, ConfigField] = {}
    for section, model in section_models().items():
        for name, info in model.model_fields.items():
            assert name not in fields, f"the field {name} stands in two sections"
            value_type, optional = info.annotation, False
            if get_origin(value_type) in (Union, types.UnionType):
                (value_type,), optional = [arg for arg in get_args(value_type) if arg is not type(None)], True
            extra: Any = info.json_schema_extra or {"declared": Declared()}
            fields[name] = ConfigField(section, name, info, value_type, optional, extra["declared"])
    return fields


def override_fields() -> tuple[str, ...]:
    """Return the settings that an `[eval.eval_overrides.NAME]` table may hold."""
    return tuple(EvalOverride.model_fields)
