"""Which settings are secrets, and the configuration without them: secrets come from the environment and are never written."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
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

    A number or a switch is none, unless its name says password or secret.
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
    """Return a value with every secret in it replaced: by its name in a table or in JSON text, or as the user of a URL."""
    if isinstance(value, Mapping):
        return {key: REDACTED if names_secret(str(key), item) else without_secrets(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(without_secrets(item) for item in value)
    if not isinstance(value, str):
        return value
    table = _json_table(value)
    if table is not None and any(secret_names(table)):
        return json.dumps(without_secrets(table))
    return _USER_IN_URL.sub(rf"\1{REDACTED}@", value)


def secret_names(value: Any, name: str = "") -> Iterator[str]:
    """Yield the dotted names of the secrets in a table, also in JSON text inside it, and those of URLs with a user."""
    if name and names_secret(name.rsplit(".", 1)[-1], value):
        yield name
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from secret_names(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from secret_names(item, name)
    elif isinstance(value, str):
        table = _json_table(value)
        if table is not None:
            yield from secret_names(table, name)
        elif _USER_IN_URL.search(value):
            yield name


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
