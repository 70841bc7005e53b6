"""Recognise settings that are secrets and leave them out: secrets come from the environment and are never written."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from treadle.config.sections import Config

REDACTED = "***"

_ALWAYS = frozenset(
    "secret secrets password passwords passwd passphrase credential credentials apikey authorization".split()
)
_KEYS_OF_DATA = frozenset(
    "input label tool tools metadata column sort primary group cache reward prompt query data".split()
)
_TOKENS_OF_TEXT = frozenset(
    """eos bos pad unk sep cls mask image video audio stop special start begin end next first last each per by no max min num
    think thinking reasoning tool chat draft prompt""".split()
)
_NUMBER = re.compile(r"[-+]?[\d.]+(e[-+]?\d+)?|true|false|none|null", flags=re.IGNORECASE)
_USER_IN_URL = re.compile(r"([a-z][\w+.-]*://)[^/\s@]+@", flags=re.IGNORECASE)


def names_secret(name: str, value: Any) -> bool:
    """Return whether a setting of this name holds a secret: `hf_token`, `apiKey`, but not `max_tokens` or `label_key`.

    A number or a switch is no secret, unless its name says password or secret.
    """
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]
    if _ALWAYS & set(words):
        return isinstance(value, str | list | tuple) and bool(value)
    if isinstance(value, list | tuple):
        return any(names_secret(name, item) for item in value)
    if not isinstance(value, str) or not value or _NUMBER.fullmatch(value):
        return False
    before = words[-2] if len(words) > 1 else ""
    return (words[-1:] == ["key"] and before not in _KEYS_OF_DATA) or (
        words[-1:] == ["token"] and before not in _TOKENS_OF_TEXT
    )


def without_secrets(value: Any) -> Any:
    """Return a value with every secret replaced: settings in tables and JSON text by name, and the user in a URL."""
    return _redacted(value, "")[0]


def secret_names(value: Any) -> list[str]:
    """Return the dotted names of the secrets in a table, also in JSON text inside it, and those of URLs with a user."""
    return _redacted(value, "")[1]


def _redacted(value: Any, name: str) -> tuple[Any, list[str]]:
    """Return the value of this dotted name without secrets, and their dotted names."""
    if name and names_secret(name.rsplit(".", 1)[-1], value):
        return REDACTED, [name]
    if isinstance(value, Mapping):
        items = {key: _redacted(item, f"{name}.{key}" if name else str(key)) for key, item in value.items()}
        return {key: item for key, (item, _) in items.items()}, [
            found for _, names in items.values() for found in names
        ]
    if isinstance(value, list | tuple):
        parts = [_redacted(item, name) for item in value]
        return type(value)(part for part, _ in parts), [found for _, names in parts for found in names]
    if not isinstance(value, str):
        return value, []
    table = _json_table(value)
    if table is None:
        return _USER_IN_URL.sub(rf"\1{REDACTED}@", value), [name] if _USER_IN_URL.search(value) else []
    clean, names = _redacted(table, name)
    return json.dumps(clean) if names else value, names


def recorded(config: Config) -> dict[str, Any]:
    """Return the configuration as it is written anywhere: JSON values, without secrets."""
    found: dict[str, Any] = without_secrets(config.model_dump(mode="json"))
    return found


def _json_table(text: str) -> Any:
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict | list) else None
