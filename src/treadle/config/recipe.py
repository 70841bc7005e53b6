"""A recipe: the settings of a run as a TOML file, one table per section; read, check its keys, and write one."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from treadle.config.fields import config_fields, override_fields, section_models
from treadle.config.secrets import without_secrets
from treadle.config.sections import Config
from treadle.config.values import first_few, written
from treadle.errors import ConfigError
from treadle.printable_text import harmless_json
from treadle.registry import nearest, suggestion
from treadle.storage.regular_file import read_regular

Values = dict[str, Any]
"""Raw values by field name, which is unique across sections."""

_MAX_RECIPE_BYTES = 1 << 24
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def read_recipe(path: Path) -> Values:
    """Read a recipe's raw values by field name.

    Raises `ConfigError` if the file is missing or not TOML (with its line), and for keys that are unknown or in the
    wrong section.
    """
    table = _parse(path)
    faults = first_few(list(_key_faults(table)), most=10)
    if faults:
        raise ConfigError(f"{path}: {'; '.join(faults)}")
    return {key: value for values in table.values() for key, value in values.items()}


def _parse(path: Path) -> dict[str, Any]:
    try:
        text = read_regular(path, _MAX_RECIPE_BYTES).decode("utf-8-sig")  # Windows editors write a byte-order mark
    except FileNotFoundError:
        raise ConfigError(f"no recipe at {written(path)}{_siblings(path)}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a text file in UTF-8 (byte {error.start}); a recipe is TOML") from None
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"can't read the recipe {written(path)}: {reason}") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}{_place(str(error), text)}") from None
    except RecursionError:
        raise ConfigError(f"{path}: lists or tables are nested too deep; a recipe has sections with fields") from None
    except ValueError:  # Python reads no integers of over 4300 digits, nor the 31st of February
        raise ConfigError(f"{path}: a number or date in it is out of range; an integer fits in 64 bits") from None


def _siblings(path: Path) -> str:
    folder = path.parent
    if not os.path.isdir(folder):
        return f"; there is no folder {written(folder)} (paths are relative to {Path.cwd()})"
    return suggestion(str(path), [str(folder / item.name) for item in sorted(folder.glob("*.toml"))])


def _place(message: str, text: str) -> str:
    """Turn tomllib's `… (at line 3, column 5)` into `, line 3: …`."""
    found = re.fullmatch(r"(.*) \(at (?:line (\d+), column \d+|end of document)\)", message, flags=re.DOTALL)
    if found is None:
        return f" is not TOML: {message}"
    line = found[2] or str(len(text.splitlines()) or 1)
    return f", line {line}: {found[1][:1].lower()}{found[1][1:]}"


def _key_faults(table: Mapping[str, Any]) -> Iterator[str]:
    fields, sections = config_fields(), section_models()
    for name, values in table.items():
        if name in sections and isinstance(values, dict):
            yield from _section_faults(name, values)
        elif name in sections:
            yield f"{name} = {written(repr(values))} must be a table: [{name}]"
        elif name in fields:
            yield f"{name} belongs in [{fields[name].section}]"
        elif isinstance(values, dict):
            known = [f"[{item}]" for item in sections]
            yield f"no section [{written(name)}]{suggestion(f'[{name}]', known, most_listed=12)}"
        else:
            yield f"no field {written(name)}{_where(name)}"


def _section_faults(section: str, values: Mapping[str, Any]) -> Iterator[str]:
    fields = config_fields()
    for key in values:
        if key not in fields:
            yield f"no field {written(key)} in [{section}]{_where(key)}"
        elif fields[key].section != section:
            yield f"{key} belongs in [{fields[key].section}], not in [{section}]"
    tables = values.get("eval_overrides") if section == "eval" else None
    for name, override in tables.items() if isinstance(tables, dict) else ():
        for key in override if isinstance(override, dict) else ():
            if key not in override_fields():
                hint = suggestion(key, override_fields(), most_listed=99)
                yield f"no field {written(key)} in [eval.eval_overrides.{written(name)}]{hint}"


def _where(name: str) -> str:
    """Return the nearest field and its section, for the end of a message."""
    found = nearest(name.replace("-", "_"), config_fields())
    return f"; did you mean {found} in [{config_fields()[found].section}]?" if found else ""


def to_toml(config: Config) -> str:
    """Write the whole configuration as a recipe, which `load_config` reads back; secrets are left out.

    TOML has no `None`, so a field that is not set is written as a comment.
    """
    sections = without_secrets(config.model_dump())
    return "\n\n".join(block for name in section_models() for block in _tables(name, sections[name])) + "\n"


def _tables(path: str, values: Mapping[str, Any]) -> Iterator[str]:
    """Yield a table and those inside it, each as one text; an inner table without values of its own is left out."""
    lines, is_section = [f"[{path}]"], "." not in path
    for key, value in values.items():
        if value is None and is_section:
            lines.append(f"# {key} is not set")
        elif value is not None and not isinstance(value, dict):
            lines.append(f"{_key(key)} = {to_toml_value(value)}")
    if is_section or len(lines) > 1:
        yield "\n".join(lines)
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _tables(f"{path}.{_key(key)}", value)


def _key(name: str) -> str:
    return name if _BARE_KEY.fullmatch(name) else to_toml_value(name)


def to_toml_value(value: Any) -> str:
    """Return one value in TOML.

    >>> to_toml_value(("a", True, 1e-06))
    '["a", true, 1e-06]'
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return harmless_json(json.dumps(value, ensure_ascii=False))
    assert isinstance(value, list | tuple), f"no TOML form for {value!r}"
    return "[" + ", ".join(to_toml_value(item) for item in value) + "]"
