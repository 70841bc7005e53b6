"""What every reward must hold to, as a check that any reward can be run through, yours too.

    check_reward("rewards.py:my_reward", [RewardInput("it is 4", label="4"), RewardInput("no idea", label="4")])

It runs the reward in this process, on the main thread.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from treadle.plain_json import plain_json
from treadle.rollout.rewards.builtin import RewardSettings
from treadle.rollout.rewards.catalog import load_reward, make_specs
from treadle.rollout.rewards.forms import RewardFault, RewardFunction, evaluate, evaluate_async, inspect_function
from treadle.rollout.rewards.inputs import RewardInput, RewardScore, input_from_json, input_to_json

_ODD_RESPONSES = (
    "",
    " \n\t",
    "δ\N{MINUS SIGN}½ 四十二 \N{GRINNING FACE} \u202eabc",
    "\x00\ufffd",
    "9" * 5000,
    "word " * 5000,
)


def check_reward(
    reward: str | Callable[..., Any], examples: Sequence[RewardInput], settings: RewardSettings | None = None
) -> None:
    """Check a reward, by name, path or function, on examples and on odd responses to them.

    It must give a finite number (or None, in a TRL-style list) for every example and for empty, blank, very long
    and non-ASCII responses; the same number for the same input; and leave its input as it was. Examples of one
    call must be of one kind (all with messages, or none). Raises `AssertionError` that says what failed.
    """
    assert examples, "check_reward needs at least one example"
    function = _load(reward, settings or RewardSettings())
    plain = [input_from_json(plain_json(input_to_json(item))) for item in examples]
    for batch in _batches(function, plain):
        _check_batch(function, batch)
    for response in _ODD_RESPONSES:
        for batch in _batches(function, [replace(item, response=response) for item in plain]):
            _check_batch(function, batch)


def _load(reward: str | Callable[..., Any], settings: RewardSettings) -> RewardFunction:
    if isinstance(reward, str):
        return load_reward(make_specs((reward,), settings)[0])
    return inspect_function(getattr(reward, "__name__", type(reward).__name__), reward)


def _batches(function: RewardFunction, examples: Sequence[RewardInput]) -> list[list[RewardInput]]:
    return [[item] for item in examples] if function.form == "sample" else [list(examples), [examples[0]]]


def _check_batch(function: RewardFunction, batch: Sequence[RewardInput]) -> None:
    before = json.dumps([input_to_json(item) for item in batch])
    shown = repr(batch[0].response[:60])
    first = _scores(function, batch, shown)
    after = json.dumps([input_to_json(item) for item in batch])
    assert after == before, f"reward {function.name} changed its input (response {shown}); copy what you change"
    second = _scores(function, [input_from_json(row) for row in json.loads(before)], shown)
    assert first == second, f"reward {function.name} gave {first}, then {second}, for the same input (response {shown})"


def _scores(function: RewardFunction, batch: Sequence[RewardInput], shown: str) -> list[RewardScore | None]:
    try:
        return asyncio.run(evaluate_async(function, batch)) if function.is_async else evaluate(function, batch)
    except RewardFault as fault:
        raise AssertionError(f"reward {function.name}: {fault} (response {shown})") from fault
