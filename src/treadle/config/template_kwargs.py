"""Variables for a model's chat template, given as words `name=value`, as JSON, or as a table of a recipe."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

_OWN = ("messages", "conversation", "tools", "documents", "chat_template", "tokenize", "return_dict")
_FLAGS = {"add_generation_prompt": None, "continue_final_message": "--continue-final-message"}


def as_words(value: Any) -> Any:
    """Turn an object, its JSON or TOML text, or words into words `name=JSON`; other types are left to the field.

    >>> as_words({"enable_thinking": False}), as_words(["effort=low"])
    (('enable_thinking=false',), ('effort="low"',))
    """
    if isinstance(value, str):
        value = (value,)
    if isinstance(value, Mapping):
        return tuple(f"{_checked_name(name)}={json.dumps(item, ensure_ascii=False)}" for name, item in value.items())
    if not isinstance(value, Sequence) or not all(isinstance(word, str) for word in value):
        return value
    return tuple(word for item in value for word in as_words(_values(item)))


def template_kwargs(words: Sequence[str]) -> dict[str, Any]:
    """Return the variables that words `name=JSON` set.

    >>> template_kwargs(("enable_thinking=false",))
    {'enable_thinking': False}
    """
    return {name: value for word in words for name, value in _values(word).items()}


def _values(word: str) -> dict[str, Any]:
    if word.lstrip().startswith("{"):
        return _table(word)
    name, equals, text = word.partition("=")
    if not equals or not name.strip():
        raise ValueError('must be name=value, as enable_thinking=false, or {"name": value}')
    try:
        return {name.strip(): json.loads(text)}
    except (ValueError, RecursionError):
        return {name.strip(): text}


def _table(text: str) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except (ValueError, RecursionError):
        pass
    try:
        return dict(tomllib.loads(f"x = {text}")["x"])
    except (ValueError, RecursionError, TypeError, KeyError):
        raise ValueError('is no JSON object and no TOML table; write {"name": value} or name=value') from None


def _checked_name(name: Any) -> str:
    if name in _OWN or name in _FLAGS:
        remedy = f"; use {_FLAGS[name]}" if _FLAGS.get(name) else ""
        raise ValueError(f"{name} is set by Treadle itself{remedy}")
    if not str(name).isidentifier():
        raise ValueError(f"{name!r} is no name of a variable; use letters, digits and _")
    return str(name)
