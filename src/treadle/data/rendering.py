"""A row's prompt as the text and tokens the model sees, and a cheap bound on how many tokens that can be."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treadle.chat import Codec
from treadle.errors import ConfigError, DataError, ModelError
from treadle.types import Message

_MAX_FRAMES = 64
_PROBES = ("x", "x " * 20 + "x")


@dataclass(frozen=True, slots=True)
class PromptFormat:
    """How the columns of a row become a prompt; the fields are those of `DataSection`."""

    input_key: str = "input"
    label_key: str | None = None
    metadata_key: str | None = None
    apply_chat_template: bool = False
    system_prompt: str | None = None
    prompt_suffix: str = ""


@dataclass(frozen=True, slots=True)
class Rendered:
    """The text of a prompt, and the messages it was made of (None for plain text)."""

    text: str
    messages: tuple[Message, ...] | None


class Renderer:
    """Turns the value of the prompt column into text and token ids; its errors leave naming the row to the caller."""

    def __init__(self, codec: Codec, form: PromptFormat):
        self._codec = codec
        self._form = form
        self._frames: dict[tuple[str, ...], int | None] = {}
        self._added = len(codec.encode_text("")) + 8

    def render(self, value: Any) -> Rendered:
        """The prompt as text. Raises `DataError` for a value that is no prompt, or one the chat template refuses."""
        content = self._content(value)
        messages = None if isinstance(content, str) else tuple(content)
        text = content if isinstance(content, str) else self._template(content)
        if not text.isascii():
            _utf8(text)
        return Rendered(text, messages)

    def encode(self, rendered: Rendered) -> list[int]:
        if rendered.messages is None:
            return self._codec.encode_text(rendered.text)
        return self._codec.encode_rendered(rendered.text)

    def max_tokens(self, value: Any) -> int | None:
        """More tokens than this the prompt can't have; None where only tokenising it tells.

        Messages are bounded without running the template on each: the text around their contents is measured once
        for each sequence of roles. Raises as `render` does.
        """
        content = self._content(value)
        if isinstance(content, str):
            return _max_tokens(content) + self._added if content else None
        if any(len(message) != 2 for message in content):
            return None  # other keys than role and content: what the template makes of them is unknown
        roles = tuple(message["role"] for message in content)
        if roles not in self._frames:
            if len(self._frames) >= _MAX_FRAMES:
                return None
            self._frames[roles] = self._frame(roles)
        frame = self._frames[roles]
        if frame is None:
            return None
        return frame + sum(_max_tokens(message["content"]) for message in content) + self._added

    def _frame(self, roles: tuple[str, ...]) -> int | None:
        """Bound on the tokens the template puts around contents, None where it does more than put text around them."""
        short, long = (self._template([{"role": role, "content": probe} for role in roles]) for probe in _PROBES)
        grown = len(roles) * (len(_PROBES[1]) - len(_PROBES[0]))
        return _max_tokens(short) if len(long) - len(short) <= grown else None

    def _template(self, messages: Sequence[Message]) -> str:
        try:
            return self._codec.render_messages(messages)
        except ModelError as error:
            if not self._codec.has_chat_template:
                raise
            raise DataError(str(error)) from error

    def _content(self, value: Any) -> str | list[Message]:
        """The plain text, or the messages, with system prompt and suffix in place."""
        form = self._form
        if isinstance(value, str):
            if not form.apply_chat_template:
                if form.system_prompt is not None:
                    raise ConfigError(
                        f"system_prompt needs a chat template, and column {form.input_key!r} holds plain text; "
                        "add --apply-chat-template"
                    )
                return value + form.prompt_suffix
            messages: list[Message] = [{"role": "user", "content": value + form.prompt_suffix}]
        else:
            messages = _checked_messages(value, f"column {form.input_key!r}")
            if form.prompt_suffix:
                messages = _with_suffix(messages, form.prompt_suffix)
        if form.system_prompt is not None:
            if messages[0]["role"] == "system":
                raise DataError("the prompt has a system message of its own; leave out --system-prompt")
            messages.insert(0, {"role": "system", "content": form.system_prompt})
        return messages


def _max_tokens(text: str) -> int:
    """An upper bound on the tokens of a text, without those a tokenizer adds around it.

    A token covers at least one byte of what the tokenizer's normaliser makes of the text. In ASCII that is the text
    itself, with at most a space put before each word; elsewhere compatibility forms can grow twelvefold, so
    the normal form is measured too. Callers check the true length when they tokenise.
    """
    if text.isascii():
        return 2 * len(text)
    return 3 * max(len(_utf8(text)), len(unicodedata.normalize("NFKD", text).encode()))


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"the prompt holds half a character ({text[error.start]!r}, a lone surrogate); remove it"
        ) from error


def _checked_messages(value: Any, what: str) -> list[Message]:
    if value is None:
        raise DataError(f"{what} is null or missing; every row needs a prompt")
    if not isinstance(value, list | tuple):
        raise DataError(
            f"{what} is a {type(value).__name__}; a prompt is text, or a list of {{role, content}} messages"
        )
    if not value:
        raise DataError(f"{what} is an empty list; a prompt needs at least one message")
    messages: list[Message] = []
    for number, message in enumerate(value):
        if not isinstance(message, Mapping):
            raise DataError(f"{what}, message {number} is a {type(message).__name__}, not {{role, content}}")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                kind = type(message[key]).__name__ if key in message else "missing"
                raise DataError(f"{what}, message {number}: {key!r} must be text, not {kind}")
        # Arrow gives each message the keys of all others, as None; a template would take them for real.
        messages.append({key: item for key, item in message.items() if item is not None})
    return messages


def _with_suffix(messages: list[Message], suffix: str) -> list[Message]:
    for index in range(len(messages) - 1, -1, -1):
        if messages[index]["role"] == "user":
            changed = {**messages[index], "content": messages[index]["content"] + suffix}
            return [*messages[:index], changed, *messages[index + 1 :]]
    raise DataError("prompt_suffix goes on the last user message, and there is none; leave it out")
