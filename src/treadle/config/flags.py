"""Flags on the command line: the field names of all sections, flat; tyro lays them out and prints the help."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from treadle.config.fields import ConfigField, config_fields, nearest, section_models
from treadle.config.recipe import Values
from treadle.config.values import first_few, written
from treadle.errors import ConfigError

_NOT_GIVEN = "\0not given"


def parse_flags(argv: Sequence[str], recipe: Mapping[str, Any], prog: str) -> Values:
    """Raw values of the flags that were given, by field name: text, a tuple of text, or a bool for a switch.

    Values of the recipe are shown as defaults in the help; `--help` prints it and exits. Raises `ConfigError` for
    unknown flags (naming the nearest) and for a flag without its value.
    """
    argv, passed = take_engine_arguments(argv)
    merged = {name: {**recipe.get(name, {}), **values} for name, values in passed.items()}
    if not argv:
        return merged
    import tyro

    parsed: Any
    unknown: list[str]
    complaints = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaints):
            parsed, unknown = tyro.cli(
                _flags_type(recipe),
                args=list(argv),
                prog=prog,
                description="Settings by section. A flag wins over the recipe, the recipe over the default.",
                config=(tyro.conf.OmitArgPrefixes, tyro.conf.HelptextFromCommentsOff),
                return_unknown_args=True,
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise ConfigError(_first_paragraph(complaints.getvalue())) from None
    if unknown:
        raise ConfigError("; ".join(first_few(list(_unknown(unknown)), most=10)))
    return dict(_given(parsed, recipe)) | merged


def take_engine_arguments(argv: Sequence[str]) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """Part the words into Treadle's own and what `--vllm-NAME` and `--sglang-NAME` pass on, by the field that holds it.

    >>> take_engine_arguments(["--seed", "1", "--vllm-max-model-len", "512", "--vllm-no-enable-x"])
    (['--seed', '1'], {'vllm': {'max_model_len': '512', 'enable_x': False}})
    """
    own: list[str] = []
    passed: dict[str, dict[str, Any]] = {}
    at = 0
    while at < len(argv):
        found = re.fullmatch(r"--(vllm|sglang)-([\w.-]+)(?:=(.*))?", argv[at], flags=re.DOTALL)
        at += 1
        if found is None:
            own.append(argv[at - 1])
            continue
        values = [] if found[3] is None else [found[3]]
        while found[3] is None and at < len(argv) and not argv[at].startswith("--"):
            values.append(argv[at])
            at += 1
        name, value = found[2].replace("-", "_"), values[0] if len(values) == 1 else tuple(values)
        if not values:
            name, value = (name[3:], False) if name.startswith("no_") else (name, True)
        passed.setdefault(found[1], {})[name] = value
    return own, passed


def _flags_type(recipe: Mapping[str, Any]) -> type:
    """A dataclass of dataclasses, one per section, all of whose values are text: pydantic reads them later."""
    import tyro

    sections = []
    for section, model in section_models().items():
        members: list[tuple[str, Any, Any]] = []
        for field in (f for f in config_fields().values() if f.section == section and not f.recipe_only):
            value_type: Any = bool if field.is_switch else tuple[str, ...] if field.is_list else str
            note = tyro.conf.arg(
                help=" ".join([field.description, *([f"Allowed: {field.bounds}."] if field.bounds else [])]),
                metavar=None if field.is_switch else field.metavar,
                help_behavior_hint=_default_hint(field, recipe),
            )
            members.append((field.name, Annotated[value_type, note], _default(field, recipe)))
        made = dataclasses.make_dataclass(f"{section.capitalize()}Flags", members)
        made.__doc__ = model.__doc__
        made.__module__ = __name__  # where tyro looks for its source; the default is a far larger file
        sections.append((section, made, dataclasses.field(default_factory=made)))
    return dataclasses.make_dataclass("Flags", sections)


def _default(field: ConfigField, recipe: Mapping[str, Any]) -> Any:
    if field.is_switch:
        value = recipe.get(field.name, field.default)
        return value if isinstance(value, bool) else field.default
    return (_NOT_GIVEN,) if field.is_list else _NOT_GIVEN


def _default_hint(field: ConfigField, recipe: Mapping[str, Any]) -> str:
    if field.name in recipe:
        return f"(recipe: {shown(recipe[field.name])})"
    return f"(default: {shown(field.default)})"


def shown(value: Any) -> str:
    """A default as people read it: `on`, `none`, or the value itself."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list | tuple):
        return " ".join(map(str, value)) or "none"
    if isinstance(value, str) and not value.isprintable():
        return repr(value)
    return "none" if value in (None, "", {}) else str(value)


def _given(parsed: Any, recipe: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for section in section_models():
        for name, value in vars(vars(parsed)[section]).items():
            if value != _default(config_fields()[name], recipe):
                yield name, value


def _unknown(words: Sequence[str]) -> Iterator[str]:
    flags = [word for word in words if word.startswith("-")]
    for word in flags:
        name = word.lstrip("-").split("=", 1)[0].replace("-", "_")
        field = config_fields().get(name)
        if field is not None and field.recipe_only:
            table = f"[{field.section}.{name}.NAME]" if field.holds_tables else f"[{field.section}.{name}]"
            yield f"{field.flag} is no flag; set it in the recipe as {table}"
        else:
            yield f"unknown flag {written(word.split('=', 1)[0])}{_nearest_flag(name)}"
    if not flags:
        word = words[0]
        yield (
            f"unexpected {written(repr(word))}; the recipe is the first argument, before the flags"
            if word.endswith(".toml")
            else f"unexpected {written(repr(word))}; values follow their flag, and a switch takes none (--flag or --no-flag)"
        )


def _nearest_flag(name: str) -> str:
    fields = [field for field in config_fields().values() if not field.recipe_only]
    known = {field.name: field.flag for field in fields}
    known |= {f"no_{field.name}": f"--no-{field.flag[2:]}" for field in fields if field.is_switch}
    found = nearest(name, list(known))
    return f"; did you mean {known[found]}?" if found else "; --help lists them"


def _first_paragraph(box: str) -> str:
    """The message inside the box tyro draws, as one line."""
    lines = [line.strip("│╭╮╰╯ ") for line in box.splitlines()]
    inside = [line for line in lines if line]
    body: list[str] = []
    for line in inside[1:]:
        if set(line) <= {"─"}:
            break
        body.append(line)
    text = " ".join(body) or " ".join(inside)
    missing = re.search(r"Missing value for argument '([^']+)'", text)
    return f"{missing[1]} needs a value" if missing else text
