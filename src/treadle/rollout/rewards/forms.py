"""The two forms a reward function can have, how each is called, and how its result is read.

- per sample: `(sample: RewardInput) -> float | dict[str, float] | RewardScore`
- per group, as in TRL: `(completions, **columns) -> list[float | None]`, called once when all samples of a group
  are there. Of `prompts`, `completions`, `completion_ids`, `label` and the data's columns it is given those that
  its signature names, or all if it takes `**columns`; each is a list with one entry per sample. Prompts and
  completions are lists of messages if the prompt was made from messages, else text.

Both may be `async def`. The form is read off the signature.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from treadle.errors import RewardError
from treadle.registry import describe_error, short_repr
from treadle.rollout.isolation.fault import CallFault
from treadle.rollout.rewards.inputs import RewardInput, RewardScore

Form = Literal["sample", "group"]
_GROUP_ARGUMENTS = ("prompts", "completions", "completion_ids")
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class RewardFault(CallFault):
    """A reward failed on one call; the text is the cause, ready for `Sample.failure`."""


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A function with its form found out."""

    name: str
    function: Callable[..., Any]
    form: Form
    is_async: bool


def inspect_function(name: str, function: Any) -> RewardFunction:
    """Find the form of a reward function; raises `RewardError` if it has neither."""
    if inspect.isclass(function):
        raise RewardError(f"reward {name!r} is a class; name a function, or an instance with __call__")
    if not callable(function):
        raise RewardError(f"reward {name!r} is of type {type(function).__name__}; it must be a function")
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise RewardError(f"reward {name!r} has no readable signature ({error}); wrap it in a def") from error
    parameters = list(signature.parameters.values())
    positional = [p for p in parameters if p.kind in _POSITIONAL]
    required = [p for p in parameters if p.default is p.empty and p.kind in (*_POSITIONAL, p.KEYWORD_ONLY)]
    takes_keywords = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if any(p.name in _GROUP_ARGUMENTS for p in parameters) or (takes_keywords and not positional):
        if any(p.kind is p.POSITIONAL_ONLY for p in required):
            raise RewardError(f"reward {name!r} has the signature {signature}; its arguments must be allowed by name")
        return RewardFunction(name, function, "group", is_async)
    if positional and len(required) <= 1 and all(p.kind in _POSITIONAL for p in required):
        return RewardFunction(name, function, "sample", is_async)
    raise RewardError(
        f"reward {name!r} has the signature {signature}; write (sample) -> float, or TRL's (completions, **columns) -> list of floats"
    )


def evaluate(reward: RewardFunction, inputs: Sequence[RewardInput]) -> list[RewardScore | None]:
    """Run a reward on one sample (form `sample`) or on a group; None means no reward for that sample.

    Whatever goes wrong becomes a `RewardFault`; only a hang or a crash of the process gets past.
    """
    try:
        result = _call(reward, inputs)
        if inspect.isawaitable(result):
            result = asyncio.run(_await(result))
    except RewardFault:
        raise
    except BaseException as error:  # SystemExit and such of a reward are its failure, not ours
        raise RewardFault(describe_error(error)) from error
    return _read(reward, result, len(inputs))


async def evaluate_async(reward: RewardFunction, inputs: Sequence[RewardInput]) -> list[RewardScore | None]:
    """Do what `evaluate` does for an `async def` reward, on the running event loop."""
    try:
        result = await _call(reward, inputs)
    except (RewardFault, asyncio.CancelledError):
        raise
    except BaseException as error:
        raise RewardFault(describe_error(error)) from error
    return _read(reward, result, len(inputs))


async def _await(result: Any) -> Any:
    return await result


def _call(reward: RewardFunction, inputs: Sequence[RewardInput]) -> Any | Coroutine[Any, Any, Any]:
    if reward.form == "sample":
        (item,) = inputs
        return reward.function(item)
    return reward.function(**group_arguments(reward.function, inputs))


def group_arguments(function: Callable[..., Any], inputs: Sequence[RewardInput]) -> dict[str, list[Any]]:
    """Return the keyword arguments of a per-group reward: one list per name, one entry per sample.

    Raises `RewardFault` if the signature asks for a column the data does not have.
    """
    first = inputs[0]
    if first.messages is None:
        prompts: list[Any] = [item.prompt for item in inputs]
        completions: list[Any] = [item.response for item in inputs]
    else:
        prompts = [[dict(m) for m in item.messages or ()] for item in inputs]
        completions = [[{"role": "assistant", "content": item.response}] for item in inputs]
    offered: dict[str, list[Any]] = {"label": [item.label for item in inputs]}
    offered |= {key: [item.columns[key] for item in inputs] for key in first.columns if key.isidentifier()}
    ids = [list(item.token_ids) for item in inputs]
    offered |= {"prompts": prompts, "completions": completions, "completion_ids": ids}
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        accepted = offered
    else:
        accepted = {p.name: offered[p.name] for p in parameters if p.name in offered}
    named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    lacking = [p.name for p in named if p.default is p.empty and p.name not in offered]
    if lacking:
        raise RewardFault(f"asks for {lacking[0]!r}, which the data lacks; its columns are {sorted(first.columns)}")
    return accepted


def _read(reward: RewardFunction, result: Any, count: int) -> list[RewardScore | None]:
    try:
        return [read_score(result)] if reward.form == "sample" else read_group_scores(result, count)
    except RewardFault:
        raise
    except BaseException as error:  # a result's own methods may raise
        raise RewardFault(f"returned something unreadable: {describe_error(error)}") from error


def read_number(value: Any) -> float:
    """Return the finite float that a reward returned as a number, a bool, or a 0-d array or tensor.

    >>> read_number(True)
    1.0
    """
    if not isinstance(value, numbers.Real) and hasattr(value, "item") and getattr(value, "shape", None) == ():
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise RewardFault(f"returned {short_repr(value)} of type {type(value).__name__}; a reward is a finite number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RewardFault(f"returned {number}; a reward is a finite number")
    return number


def read_score(result: Any) -> RewardScore:
    """Return the result of a per-sample reward as a `RewardScore`; the entries of a dict are summed.

    >>> read_score({"right": 1, "short": 0.5})
    RewardScore(value=1.5, parts={'right': 1.0, 'short': 0.5})
    """
    if isinstance(result, RewardScore):
        return RewardScore(read_number(result.value), _read_parts(result.parts))
    if isinstance(result, Mapping):
        if not result:
            raise RewardFault("returned an empty dict; a reward is a finite number, or a dict of them")
        parts = _read_parts(result)
        return RewardScore(read_number(math.fsum(parts.values())), parts)
    return RewardScore(read_number(result))


def _read_parts(parts: Mapping[Any, Any]) -> dict[str, float]:
    """Return the parts with names that fit a metric: text without a slash."""
    out: dict[str, float] = {}
    for key, value in parts.items():
        name = str(key).replace("/", ".")
        if not name or name in out:
            raise RewardFault(f"returned two parts named {name!r}" if name else "returned a part without a name")
        try:
            out[name] = read_number(value)
        except RewardFault as fault:
            raise RewardFault(f"in part {name!r} {fault}") from None
    return out


def read_group_scores(result: Any, count: int) -> list[RewardScore | None]:
    """Return the result of a per-group reward: one number, or None, for each sample in its order."""
    if hasattr(result, "tolist"):
        result = result.tolist()
    if not isinstance(result, list | tuple):
        raise RewardFault(
            f"returned {short_repr(result)} of type {type(result).__name__}; it must be a list of {count} numbers"
        )
    if len(result) != count:
        raise RewardFault(f"returned {len(result)} rewards for {count} samples")
    return [None if value is None else RewardScore(read_number(value)) for value in result]
