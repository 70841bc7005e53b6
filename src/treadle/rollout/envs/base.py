"""The environment seam: what answers the model between its turns, such as a tool, a game or a simulated user.

Every sample is an *episode*: `open`, then `step` after each turn of the model, then `close`. State lives on the episode.
An episode reads text and returns text or chat messages. Tokens are the rollout's business: what the model sampled is
never tokenised again; what the environment says is tokenised once and masked out of training.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from treadle.errors import ConfigError
from treadle.registry import resolve, short_repr, user_code
from treadle.rollout.isolation.fault import CallFault
from treadle.rollout.rewards.forms import read_score
from treadle.rollout.rewards.inputs import RewardScore
from treadle.types import Message, Prompt

Reply = str | Sequence[Message] | None
"""Raw text to append, messages to render with the chat template, or None: the episode is over."""

_REPLIES = 'return text, a list of messages such as [{"role": "user", "content": "…"}], or None to end the sample'


@dataclass(frozen=True)
class Opening:
    """How an episode begins.

    Attributes:
        messages: the model's first prompt; None keeps the prompt of the data.
        tools: JSON schemas of the functions that the model may call, which the chat template describes to it. They need
            messages, the episode's or the prompt's.
    """

    messages: Sequence[Message] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None


@dataclass(frozen=True)
class Step:
    """What an episode answers to a turn of the model.

    Attributes:
        reply: what the model reads next; None ends the episode.
        reward: with the end, a number or named parts that are summed. It is added to the rewards of the run.
        fresh: True if `reply`, a list of messages, is a whole new context. The sample so far ends, and the next turn begins
            another sample of the same trajectory, as after a compaction of the context. The trajectory has one reward and
            counts once in the loss, however many samples it has.
    """

    reply: Reply = None
    reward: float | Mapping[str, float] | RewardScore | None = None
    fresh: bool = False


class Episode(Protocol):
    """One sample's environment. Whatever a method raises, or an answer later than the deadline, fails that sample only."""

    async def open(self, prompt: Prompt) -> Opening:
        """Begin with a prompt of the data."""
        ...

    async def step(self, turn: str) -> Step:
        """Answer a turn of the model, its text without the end-of-sequence token."""
        ...

    async def close(self) -> None:
        """Free what the episode holds."""
        ...


class Environment(Protocol):
    """Makes the episodes of a run."""

    opens: bool
    """True if its episodes have an `open` to call."""

    keeps_state: bool
    """True if an episode remembers its turns, and so must be closed."""

    def episode(self) -> Episode:
        """Make an episode."""
        ...

    async def resumed(self, prompt: Prompt, turns: Sequence[str]) -> Episode:
        """Make an episode that has had these turns; needed if the process of the first one died."""
        ...


class UserEpisode:
    """An object of the user's class, with what it lacks: a class needs `step` only."""

    def __init__(self, own: Any):
        self._own = own

    async def open(self, prompt: Prompt) -> Opening:
        return read_opening(await self._own.open(prompt) if hasattr(self._own, "open") else None)

    async def step(self, turn: str) -> Step:
        return read_step(await self._own.step(turn))

    async def close(self) -> None:
        if hasattr(self._own, "close"):
            await self._own.close()


class EpisodeClass:
    """An environment given as a class, of which every sample gets an object."""

    keeps_state = True

    def __init__(self, kind: Callable[[], Any]):
        self._kind, self.opens = kind, hasattr(kind, "open")

    def episode(self) -> Episode:
        return UserEpisode(self._kind())

    async def resumed(self, prompt: Prompt, turns: Sequence[str]) -> Episode:
        episode = self.episode()
        await episode.open(prompt)
        for turn in turns:
            await episode.step(turn)
        return episode


class ReplyEpisode:
    """An episode of a function that is given the prompt and all turns so far."""

    def __init__(self, reply: Callable[[Prompt, Sequence[str]], Awaitable[Any]]):
        self._reply, self._prompt, self._turns = reply, Prompt(0, (), ""), list[str]()

    async def open(self, prompt: Prompt) -> Opening:
        self._prompt = prompt
        return Opening()

    async def step(self, turn: str) -> Step:
        self._turns.append(turn)
        return read_step(await self._reply(self._prompt, tuple(self._turns)))

    async def close(self) -> None:
        """Do nothing: the function keeps what it remembers by prompt and turns."""


class ReplyFunction:
    """An environment given as `async def reply(prompt, turns)`. It must be able to answer the same turns again."""

    opens = keeps_state = False

    def __init__(self, reply: Callable[[Prompt, Sequence[str]], Awaitable[Any]]):
        self._reply = reply

    def episode(self) -> ReplyEpisode:
        return ReplyEpisode(self._reply)

    async def resumed(self, prompt: Prompt, turns: Sequence[str]) -> Episode:
        episode = self.episode()
        await episode.open(prompt)
        episode._turns.extend(turns)
        return episode


def load_environment(path: str) -> Environment:
    """Import the environment at a path.

    It is a class with `async def step(self, turn)`, an `async def reply(prompt, turns)`, or an object with such a `reply`,
    or its class.

    Raises:
        ConfigError: if it is none of these, a method is not `async`, or it can't be made.
    """
    found: Any = resolve("environment", path, {})
    if inspect.iscoroutinefunction(found):
        return ReplyFunction(found)
    if not any(hasattr(found, name) for name in ("step", "reply")):
        raise ConfigError(
            f"environment {path!r} has no `async def reply(prompt, turns)` and no `async def step(self, turn)`"
        )
    for name in ("open", "step", "close", "reply"):
        if hasattr(found, name) and not inspect.iscoroutinefunction(getattr(found, name)):
            raise ConfigError(f"environment {path!r} has a method `{name}` that is not `async def`")
    if not inspect.isclass(found):
        if hasattr(found, "step"):
            raise ConfigError(f"environment {path!r} is an object; give its class, because every sample needs its own")
        return ReplyFunction(found.reply)
    with user_code(lambda what: ConfigError(f"environment {path!r} can't be made: it {what}")):
        one: Any = found()
    return EpisodeClass(found) if hasattr(found, "step") else ReplyFunction(one.reply)


def read_opening(value: Any) -> Opening:
    """Return what `open` returned, checked: an `Opening`, messages, or None.

    Raises:
        CallFault: if it is none of these.
    """
    opening = value if isinstance(value, Opening) else Opening(value)
    tools = opening.tools
    if tools is not None and not (isinstance(tools, list | tuple) and all(isinstance(tool, Mapping) for tool in tools)):
        raise CallFault(f"opened with tools that are no list of JSON schemas: {short_repr(tools)}")
    if opening.messages is None:
        return opening
    if isinstance(opening.messages, str):
        raise CallFault(
            f"opened with text: {short_repr(opening.messages)}; give an Opening, a list of messages, or None"
        )
    return Opening(_messages(opening.messages), tools)


def read_step(value: Any) -> Step:
    """Return what an environment answered to a turn, checked: a `Step`, or its reply alone.

    Raises:
        CallFault: if it is neither.
    """
    step = value if isinstance(value, Step) else Step(value)
    reply = step.reply if step.reply is None or isinstance(step.reply, str) else _messages(step.reply)
    if step.fresh and (reply is None or isinstance(reply, str)):
        raise CallFault(f"returned a fresh context that is no list of messages: {short_repr(step.reply)}")
    if step.reward is None:
        return Step(reply, None, bool(step.fresh))
    if reply is not None:
        raise CallFault("returned a reward with a reply; give the reward with the step that ends the episode")
    return Step(None, read_score(step.reward))


def _messages(value: Any) -> list[Message]:
    """Return messages with contents as text; contents in text parts are joined."""
    if not isinstance(value, list | tuple) or not value:
        raise CallFault(f"returned {short_repr(value)} of type {type(value).__name__}; {_REPLIES}")
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
