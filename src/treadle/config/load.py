"""Build the configuration of a run: defaults, then the recipe, then flags; later wins, each value is checked once."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from treadle.config.fields import ConfigField, config_fields
from treadle.config.flags import parse_flags
from treadle.config.recipe import read_recipe
from treadle.config.secrets import REDACTED, names_secret, without_secrets
from treadle.config.sections import Config
from treadle.config.values import expand_paths, first_few, written
from treadle.errors import ConfigError


def load_config(recipe: Path | None, argv: Sequence[str] = (), *, prog: str = "treadle") -> Config:
    """Merge defaults, a recipe and flags (`["--rollout-batch-size", "16"]`) into one frozen `Config`.

    Later wins. Relative paths inside a recipe are left as they are: relative to the current folder. `--help` among
    the flags prints the help and raises `SystemExit`. Raises `ConfigError`, one line that names each faulty field.
    """
    from_recipe = read_recipe(recipe) if recipe is not None else {}
    from_flags = parse_flags(argv, from_recipe, prog)
    values: dict[str, dict[str, Any]] = {}
    faults: list[str] = []
    for name in {**from_recipe, **from_flags}:
        field = config_fields()[name]
        is_flag = name in from_flags
        raw = from_flags[name] if is_flag else from_recipe[name]
        try:
            value = _from_flag(field, raw) if is_flag else _from_toml(field, raw)
            value = expand_paths(value, named=name == "eval_prompt_data") if field.declared.path else value
            values.setdefault(field.section, {})[name] = value
        except ValidationError as error:
            faults += first_few(list(_faults(field, error, None if is_flag else recipe)))
        except ValueError as error:
            faults.append(f"{_named(field, raw, None if is_flag else recipe)}: {error}")
    if faults:
        raise ConfigError("; ".join(faults))
    return Config.model_validate(values)


def _from_toml(field: ConfigField, value: Any) -> Any:
    """Read a value of a recipe, strictly: `"16"` is no integer. JSON mode, so that a list may become a tuple."""
    try:
        text = json.dumps(value, default=str)
    except RecursionError:
        raise ValueError("is nested too deep") from None
    except ValueError:  # Python writes no integers of over 4300 digits
        raise ValueError("must fit in 64 bits") from None
    return field.adapter().validate_json(text, strict=True)


def _from_flag(field: ConfigField, value: Any) -> Any:
    """Read text of the command line; `None` unsets a field that may be unset."""
    if field.optional and value == "None":
        return None
    return field.adapter().validate_python(value)


def _faults(field: ConfigField, error: ValidationError, recipe: Path | None) -> Iterator[str]:
    for item in error.errors(include_url=False):
        inner = [str(part) for part in item["loc"] if not str(part).startswith(("function-", "tuple["))]
        yield f"{_named(field, item['input'], recipe, inner)}: {_remedy(field, item['msg'])}"


def _named(field: ConfigField, value: Any, recipe: Path | None, inner: Sequence[str] = ()) -> str:
    """Return a field and its value as given on the command line or in the recipe, without secrets."""
    try:
        value = REDACTED if any(names_secret(part, "text") for part in inner) else without_secrets(value)
    except RecursionError:
        value = "…"
    if recipe is None:
        return f"{field.flag} {' '.join(map(written, value)) if isinstance(value, tuple) else written(value)}"
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except (RecursionError, ValueError):
        text = "…"
    return f"{recipe}: {'.'.join([field.name, *inner])} = {written(text)} in [{field.section}]"


def _remedy(field: ConfigField, message: str) -> str:
    """Shorten pydantic's sentence: `must be greater than or equal to 1`."""
    text = (
        message.removeprefix("Value error, ")
        .removeprefix("Input ")
        .split(", unable to", 1)[0]
        .split(", got a number", 1)[0]
    )
    text = text.replace("a valid array", "a list").replace("an object", "a table")
    text = "must " + text.removeprefix("should ") if text.startswith("should ") else text
    if field.bounds and field.bounds.split()[-1] not in text:
        text += f" ({field.bounds})"
    return text
