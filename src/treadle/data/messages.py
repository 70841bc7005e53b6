"""Check the messages and tools of a row, and bring them into one form for all kinds of files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from treadle.errors import DataError
from treadle.plain_json import TOO_DEEP, is_too_deep
from treadle.types import Message


def without_nulls(value: Any) -> Any:
    """Return a value without the keys that are None, at any depth; None in a list stays.

    Arrow gives each object the keys of all others in its column, and a chat template would render them.

    >>> without_nulls([{"city": "Oslo", "unit": None}, None])
    [{'city': 'Oslo'}, None]
    """
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [without_nulls(item) for item in value]
    return value


def messages_in(text: str) -> list[Any] | None:
    """Return the messages of a text that is a JSON list of objects with a role, or None for any other text."""
    if not text.lstrip().startswith("["):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, list) or not value or not all(isinstance(m, Mapping) and "role" in m for m in value):
        return None
    if is_too_deep(value):
        raise DataError(TOO_DEEP)
    return value


def checked_messages(value: Any, what: str) -> list[Message]:
    """Return a row's messages with roles and contents checked.

    A content is text, a list of text parts, or None beside `tool_calls`. Other keys that are None are left out.

    Raises:
        DataError: if the value is no list of messages; `what` names it.
    """
    if value is None:
        raise DataError(f"{what} is null or missing; every row needs a prompt")
    if not isinstance(value, list | tuple):
        raise DataError(
            f"{what} is a {type(value).__name__}; a prompt is text, or a list of {{role, content}} messages"
        )
    if not value:
        raise DataError(f"{what} is an empty list; a prompt needs at least one message")
    return [_checked_message(message, f"{what}, message {number}") for number, message in enumerate(value)]


def _checked_message(message: Any, what: str) -> Message:
    if not isinstance(message, Mapping):
        raise DataError(f"{what} is a {type(message).__name__}; a message is {{role, content}}")
    kept = {key: item for key, item in message.items() if item is not None}
    for key in ("role", "content"):
        if isinstance(kept.get(key), str):
            continue
        if key == "content" and isinstance(kept.get(key), list | tuple):
            kept[key] = [_checked_part(part, f"{what}: content") for part in kept[key]]
        elif key == "content" and key not in kept and kept.get("tool_calls"):
            kept[key] = None
        else:
            kind = type(message[key]).__name__ if key in message else "missing"
            raise DataError(f"{what}: {key!r} must be text, not {kind}; correct or remove the row")
    return kept


def _checked_part(part: Any, what: str) -> dict[str, str]:
    if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        kind = f"of type {part.get('type')!r}" if isinstance(part, Mapping) else f"a {type(part).__name__}"
        raise DataError(f"{what} holds a part that is {kind}; Treadle takes text, and parts {{type: text, text}}")
    return {"type": "text", "text": part["text"]}


def content_text(message: Message) -> str:
    """Return the content of a message as one text; parts are joined without a separator."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content or ())


def with_suffix(messages: list[Message], suffix: str) -> list[Message]:
    """Add a text to the end of the last user message; raises `DataError` if there is none."""
    for index in range(len(messages) - 1, -1, -1):
        if messages[index]["role"] == "user":
            content = messages[index]["content"]
            if isinstance(content, list) and content:
                longer: Any = [*content[:-1], {**content[-1], "text": content[-1]["text"] + suffix}]
            else:
                longer = content_text(messages[index]) + suffix
            return [*messages[:index], {**messages[index], "content": longer}, *messages[index + 1 :]]
    raise DataError("prompt_suffix goes on the last user message, and there is none; leave it out")


def checked_tools(value: Any, what: str) -> list[Mapping[str, Any]] | None:
    """Return a row's tools, None if it has none; text is read as JSON.

    Raises:
        DataError: if the value is no list of objects.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except (ValueError, RecursionError) as error:
            raise DataError(f"{what} is text that is no JSON ({error}); tools are a list of JSON schemas") from error
    if value is None or value == []:
        return None
    if not isinstance(value, list | tuple) or not all(isinstance(tool, Mapping) for tool in value):
        raise DataError(f"{what} is a {type(value).__name__}; tools are a list of JSON schemas, or its JSON text")
    if is_too_deep(value):
        raise DataError(f"{what}: {TOO_DEEP}")
    return list(value)
