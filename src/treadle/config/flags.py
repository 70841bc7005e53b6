"""Flags on the command line: the field names of all sections, flat, and the arguments that are passed on to engines."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from typing import Any

from treadle.catalog import SERVERS
from treadle.config.conditions import shown
from treadle.config.fields import ConfigField, config_fields, section_models
from treadle.config.recipe import Values
from treadle.config.values import first_few, written
from treadle.errors import ConfigError
from treadle.registry import nearest

_ENGINE_ARGUMENT = re.compile(rf"--({'|'.join(SERVERS)})-([\w.-]+)")
_NEGATIVE_NUMBER = re.compile(r"-(\.?\d|inf|nan)", re.IGNORECASE)


def parse_flags(argv: Sequence[str], recipe: Mapping[str, Any], prog: str) -> Values:
    """Return the raw values of the given flags by field name: text, a tuple of text, or a bool for a switch.

    `--help` prints the help, in which values of the recipe are the defaults, and raises `SystemExit`. Raises `ConfigError`
    for unknown flags (naming the nearest) and for a flag without its value.

    >>> parse_flags(["--seed", "1", "--vllm-max-model-len", "512", "--vllm-no-enable-x"], {}, "treadle")
    {'seed': '1', 'vllm': {'max_model_len': '512', 'enable_x': False}}
    """
    if {"-h", "--help"} & set(argv):
        _print_help(recipe, prog)
        raise SystemExit(0)
    values: Values = {}
    unknown: list[str] = []
    stray: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        name, equals, text = word.partition("=")
        engine, field = _ENGINE_ARGUMENT.fullmatch(name), _field_of(name)
        given = [text] if equals else []
        while words and not (equals and engine) and not _is_flag(words[0], after_engine=engine is not None):
            given.append(words.pop(0))
        if engine is not None:
            kind, argument = engine[1], engine[2].replace("-", "_")
            passed = values.setdefault(kind, dict(recipe.get(kind, {})))
            if given:
                passed[argument] = given[0] if len(given) == 1 else tuple(given)
            else:
                passed[argument.removeprefix("no_")] = not argument.startswith("no_")
        elif field is None:
            (unknown if word.startswith("-") else stray).append(word)
        elif field.is_list:
            values[field.name] = tuple(given)
        elif field.is_switch:
            values[field.name] = not name.startswith(("--no-", "--no_"))
            stray += given
        elif not given:
            raise ConfigError(f"{field.flag} needs a value; write {field.flag} {field.metavar}")
        else:
            values[field.name] = given[0]
            stray += given[1:]
    if unknown or stray:
        raise ConfigError("; ".join(first_few([_unknown(flag) for flag in unknown] or [_stray(stray[0])], most=10)))
    return values


def _is_flag(word: str, after_engine: bool) -> bool:
    """Return whether a word is a flag and no value; values of an engine's arguments may begin with one dash."""
    return word.startswith("--") if after_engine else word.startswith("-") and not _NEGATIVE_NUMBER.match(word)


def _field_of(flag: str) -> ConfigField | None:
    """Return the field of `--name`, or of `--no-name` if it is a switch."""
    name = flag[2:].replace("-", "_") if flag.startswith("--") else ""
    field, switch = config_fields().get(name), config_fields().get(name.removeprefix("no_"))
    if field is None and switch is not None and switch.is_switch:
        return switch
    return None if field is None or field.recipe_only else field


def _unknown(flag: str) -> str:
    name = flag.lstrip("-").split("=", 1)[0].replace("-", "_")
    field = config_fields().get(name)
    if field is not None and field.recipe_only:
        table = f"[{field.section}.{name}.NAME]" if field.holds_tables else f"[{field.section}.{name}]"
        return f"{field.flag} is no flag; set it in the recipe as {table}"
    fields = [field for field in config_fields().values() if not field.recipe_only]
    known = {field.name: field.flag for field in fields}
    known |= {f"no_{field.name}": f"--no-{field.flag[2:]}" for field in fields if field.is_switch}
    found = nearest(name, list(known))
    hint = f"; did you mean {known[found]}?" if found else "; --help lists them"
    return f"unknown flag {written(flag.split('=', 1)[0])}{hint}"


def _stray(word: str) -> str:
    why = "values follow their flag, and a switch takes none (--flag or --no-flag)"
    if word.endswith(".toml"):
        why = "the recipe is the first argument, before the flags"
    return f"unexpected {written(repr(word))}; {why}"


def _print_help(recipe: Mapping[str, Any], prog: str) -> None:
    parser = argparse.ArgumentParser(
        usage=f"{prog} [-h] [OPTIONS]",
        description="Settings by section. A flag wins over the recipe, the recipe over the default.",
    )
    for section, model in section_models().items():
        group = parser.add_argument_group(f"{section} options", model.__doc__)
        for field in (f for f in config_fields().values() if f.section == section and not f.recipe_only):
            bounds = f" Allowed: {field.bounds}." if field.bounds else ""
            source, value = ("recipe", recipe[field.name]) if field.name in recipe else ("default", field.default)
            text = f"{field.description}{bounds} ({source}: {written(shown(value))})".replace("%", "%%")
            if field.is_switch:
                group.add_argument(field.flag, f"--no-{field.flag[2:]}", help=text, action="store_true")
            else:
                group.add_argument(field.flag, help=text, metavar=field.metavar)
    parser.print_help()
