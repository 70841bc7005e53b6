"""Render a row's prompt as the text and tokens that the model reads, and bound its number of tokens cheaply."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from treadle.chat import Codec
from treadle.data.messages import checked_messages, checked_tools, content_text, messages_in, with_suffix, without_nulls
from treadle.errors import ConfigError, DataError, ModelError
from treadle.types import Message

_MAX_FRAMES = 64
_PROBES = ("x", "x " * 20 + "x")

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class PromptFormat:
    """How the columns of a row become a prompt; the fields are those of `DataSection`."""

    input_key: str = "input"
    label_key: str | None = None
    metadata_key: str | None = None
    tools_key: str | None = None
    apply_chat_template: bool = False
    continue_final_message: bool = False
    system_prompt: str | None = None
    prompt_suffix: str = ""


@dataclass(frozen=True, slots=True)
class Rendered:
    """The text of a prompt, and the messages it was made of (None for plain text)."""

    text: str
    messages: tuple[Message, ...] | None


class Renderer:
    """Turns the values of a row into text and token ids; callers add the row's location to its errors.

    `adds_nulls` says that the rows come from Arrow, which gives each object the keys of all others as None.
    """

    def __init__(self, codec: Codec, form: PromptFormat, adds_nulls: bool = False):
        self._codec = codec
        self._form = form
        self._adds_nulls = adds_nulls
        self._frames: dict[tuple[str, ...], int | None] = {}
        self._added = len(codec.encode_text("")) + 8

    def render(self, value: Any, tools: Any = None) -> Rendered:
        """Return the prompt as text.

        Args:
            value: the prompt: text or messages.
            tools: the value of the tools' column.
        Raises:
            DataError: if the value is no prompt, or the chat template refuses it.
        """
        content, schemas = self._content(value, tools)
        messages = None if isinstance(content, str) else tuple(content)
        text = content if isinstance(content, str) else self._template(content, schemas)
        if not text.isascii():
            _utf8(text)
        return Rendered(text, messages)

    def encode(self, rendered: Rendered) -> list[int]:
        """Return the token ids; raises `DataError` if the tokenizer has none for the text."""
        try:
            if rendered.messages is None:
                return self._codec.encode_text(rendered.text)
            return self._codec.encode_rendered(rendered.text)
        except ModelError as error:
            raise DataError(str(error)) from error

    def max_tokens(self, value: Any, tools: Any = None) -> int | None:
        """Return an upper bound on the prompt's tokens, or None if only tokenising the prompt can tell.

        Messages are bounded without running the template on each: the text around their contents is measured once
        for each sequence of roles. Raises as `render` does.
        """
        content, schemas = self._content(value, tools)
        if isinstance(content, str):
            return _max_tokens(content) + self._added if content else None
        if schemas is not None or any(len(m) != 2 or not isinstance(m["content"], str) for m in content):
            return None  # more than texts with their roles: what the template makes of it is unknown
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
        """Return a bound on the tokens that the template puts around contents, or None if it changes contents."""
        short, long = (self._template([{"role": role, "content": probe} for role in roles]) for probe in _PROBES)
        grown = len(roles) * (len(_PROBES[1]) - len(_PROBES[0]))
        return _max_tokens(short) if len(long) - len(short) <= grown else None

    def _template(self, messages: Sequence[Message], tools: Tools | None = None) -> str:
        continued = messages[-1]["role"] == "assistant"  # with the flag only: others were refused
        try:
            return self._codec.render_messages(messages, tools, continue_final=continued)
        except ModelError as error:
            if not self._codec.has_chat_template:
                raise
            raise DataError(str(error)) from error

    @cached_property
    def _takes_parts(self) -> bool:
        """True if the chat template renders a content in parts like its text; most templates support text only."""
        contents = "x", [{"type": "text", "text": "x"}]
        try:
            texts = {self._codec.render_messages([{"role": "user", "content": content}]) for content in contents}
        except ModelError:
            return False
        return len(texts) == 1

    def _content(self, value: Any, tools: Any) -> tuple[str | list[Message], Tools | None]:
        """Return the plain text, or the messages with system prompt and suffix; and the tools."""
        form = self._form
        what = f"column {form.input_key!r}"
        if self._adds_nulls:
            value, tools = without_nulls(value), without_nulls(tools)
        schemas = checked_tools(tools, f"column {form.tools_key!r}")
        if isinstance(value, str) and not form.apply_chat_template:
            for name, given in (("system_prompt", form.system_prompt is not None), ("tools_key", schemas is not None)):
                if given:
                    raise ConfigError(
                        f"{name} needs a chat template, and {what} holds plain text; add --apply-chat-template"
                    )
            return value + form.prompt_suffix, None
        if isinstance(value, str):
            value = messages_in(value) or [{"role": "user", "content": value}]
        messages = checked_messages(value, what)
        if messages[-1]["role"] == "assistant":
            messages[-1] = self._continued(messages[-1])
        if form.prompt_suffix:
            messages = with_suffix(messages, form.prompt_suffix)
        if form.system_prompt is not None:
            if messages[0]["role"] == "system":
                raise DataError("the prompt has a system message of its own; leave out --system-prompt")
            messages.insert(0, {"role": "system", "content": form.system_prompt})
        if any(isinstance(message["content"], list) for message in messages) and not self._takes_parts:
            messages = [{**m, "content": content_text(m)} if isinstance(m["content"], list) else m for m in messages]
        return messages, schemas

    def _continued(self, message: Message) -> Message:
        if not self._form.continue_final_message:
            raise DataError(
                "the prompt ends with an assistant message, and the model would begin another one after it; take it "
                "out, or have the model continue it with --continue-final-message"
            )
        text = content_text(message)
        if not text or message.get("tool_calls"):
            raise DataError("the last message has no text that could be continued; take it out")
        return {**message, "content": text}


def _max_tokens(text: str) -> int:
    """Return an upper bound on the tokens of a text, without those that a tokenizer adds around it.

    A token covers at least one byte of what the tokenizer's normaliser makes of the text. In ASCII that is the text
    itself, with at most a space put before each word. Other text can grow twelvefold in its compatibility form, so the
    normal form is measured too. Callers check the true length when they tokenise.
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
