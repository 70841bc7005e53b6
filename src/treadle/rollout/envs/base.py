"""The seam for environments: what answers the model between its turns, such as a tool or a simulated user.

An environment sees text and gives text (or chat messages); tokens are the rollout's business: what the model
sampled is never tokenised again, what the environment said is tokenised once and masked out of training.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

from treadle.errors import ConfigError
from treadle.registry import resolve, user_code
from treadle.rollout.isolation.fault import CallFault
from treadle.types import Message, Prompt

Reply = str | Sequence[Message] | None
"""Raw text to append, messages to render with the chat template, or None: the conversation is over."""


_REPLIES = 'return text, a list of messages such as [{"role": "user", "content": "…"}], or None to end the sample'


class Environment(Protocol):
    """Answers the model after each of its turns."""

    async def reply(self, prompt: Prompt, turns: Sequence[str]) -> Reply:
        """Return the answer to the last of the model's turns; `turns` are their texts in order.

        Whatever it raises, or a reply later than the deadline, marks that sample failed. One environment serves all
        samples at once, in a process of its own. What it remembers it keeps by prompt and turns, and it must be able to
        answer the same turns again: a reply is asked for once more, in a new process, if another call ended the process
        or kept the event loop.
        """
        ...


def read_reply(value: Any) -> Reply:
    """Return what an environment answered, checked; contents in text parts are joined.

    Raises:
        CallFault: if it is neither text, nor a list of messages, nor None.
    """
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list | tuple) or not value:
        text = repr(value)
        text = text if len(text) <= 60 else text[:60] + "…"
        raise CallFault(f"returned {text} of type {type(value).__name__}; {_REPLIES}")
    for number, message in enumerate(value):
        if not isinstance(message, Mapping):
            raise CallFault(f"returned a list whose item {number} is of type {type(message).__name__}; {_REPLIES}")
        if not isinstance(message.get("role"), str) or "content" not in message:
            raise CallFault(f"returned a message with the keys {sorted(map(str, message))}; {_REPLIES}")
    return [{**message, "content": _content(message)} for message in value]


def _content(message: Mapping[str, Any]) -> str | None:
    """Return a content as text: templates make of another value an empty text, or its `repr`."""
    content = message["content"]
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return content
    parts = content if isinstance(content, list | tuple) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in parts]
    if all(isinstance(text, str) for text in texts):
        return "".join(map(str, texts))
    shown = f"holds a part that is no text: {parts!r}" if parts is content else f"is of type {type(content).__name__}"
    raise CallFault(f"returned a message whose content {shown[:100]}; {_REPLIES}")


class _FunctionEnvironment:
    """An `async def reply(prompt, turns)` given as a plain function."""

    def __init__(self, function: Any):
        self._function = function

    async def reply(self, prompt: Prompt, turns: Sequence[str]) -> Reply:
        return await self._function(prompt, turns)


def load_environment(path: str) -> Environment:
    """Import the environment at a path, an object with `reply`, a class of such or a function, and make it.

    Raises:
        ConfigError: if it is none of these, `reply` is not `async`, or it can't be made.
    """
    found: Any = resolve("environment", path, {})
    if inspect.iscoroutinefunction(found):
        return _FunctionEnvironment(found)
    if not inspect.iscoroutinefunction(getattr(found, "reply", None)):
        raise ConfigError(f"environment {path!r} has no `async def reply(prompt, turns)`")
    if not inspect.isclass(found):
        return cast(Environment, found)
    with user_code(lambda what: ConfigError(f"environment {path!r} can't be made: it {what}")):
        return cast(Environment, found())
