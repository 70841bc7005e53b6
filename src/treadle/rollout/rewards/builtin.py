"""The rewards that come with Treadle, each a small function of one sample.

`BUILTIN_REWARDS` names them. A reward is made from its settings once, where it will run, so its libraries are
loaded before any sample's time counts.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from treadle.catalog import REWARDS
from treadle.rollout.rewards.answers import find_last_box, find_last_number, label_text, without_bold
from treadle.rollout.rewards.forms import RewardFault
from treadle.rollout.rewards.inputs import RewardInput

SampleReward = Callable[[RewardInput], float]


@dataclass(frozen=True, slots=True)
class RewardSettings:
    """What built-in rewards read of the `[reward]` section."""

    regex: str | None = None
    timeout_seconds: float = 30.0


@dataclass(frozen=True, slots=True)
class BuiltinReward:
    """How to make a built-in reward, and whether it is so quick and safe that it needs no worker process."""

    make: Callable[[RewardSettings], SampleReward]
    inline: bool = False


def last_number(sample: RewardInput) -> float:
    """Return 1 if the last number of the response equals the label's number, compared exactly.

    >>> last_number(RewardInput("2 boxes of 9 make 18.0 in all.", label="9*2 #### 18"))
    1.0
    """
    answer = label_text(sample.label)
    gold = find_last_number(answer)
    if gold is None:
        raise RewardFault(f"there is no number in the label {answer!r}")
    return float(find_last_number(sample.response) == gold)


def exact(sample: RewardInput) -> float:
    """Return 1 if the response is the label, spaces around both left out.

    >>> exact(RewardInput(" Paris\\n", label="Paris"))
    1.0
    """
    if sample.label is None:
        raise RewardFault("the sample has no label; name its column with --label-key")
    return float(sample.response.strip() == str(sample.label).strip())


def make_last_number(settings: RewardSettings) -> SampleReward:
    """Return `last_number`."""
    return last_number


def make_exact(settings: RewardSettings) -> SampleReward:
    """Return `exact`."""
    return exact


def make_regex(settings: RewardSettings) -> SampleReward:
    """Return 1 if the pattern `rm_regex` matches somewhere in the response; `.` matches line ends too with `(?s)`."""
    assert settings.regex is not None, "build_scorer checks rm_regex"
    pattern = re.compile(settings.regex)

    def regex(sample: RewardInput) -> float:
        return float(pattern.search(sample.response) is not None)

    return regex


def make_math(settings: RewardSettings) -> SampleReward:
    r"""Return 1 if the response's answer equals the label as mathematics, by the math-verify library.

    The answer is the last `\boxed{…}`; without one, what math-verify finds: a stated final answer, else the last
    formula or number. The label is LaTeX or plain text, and only the text after `####` counts if there is one.
    Parsing and comparing stop after an eighth of `rm_timeout_seconds` each (at least 1 s, at most 5): an answer
    that can't be checked in that time (`9^{9^{9}}`) is wrong. They rely on SIGALRM, so this reward needs a
    process's main thread, which is what a reward worker gives it.
    """
    import logging

    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns for each answer it gives up on
    seconds = min(5, max(1, int(settings.timeout_seconds / 8)))
    boxed = (LatexExtractionConfig(boxed_match_priority=0),)
    anywhere = (*boxed, ExprExtractionConfig())

    def parse_box(answer: str) -> list[Any]:
        return list(parse(f"\\boxed{{{answer}}}", boxed, extraction_mode="first_match", parsing_timeout=seconds))

    @functools.lru_cache(maxsize=1024)
    def parse_label(answer: str) -> tuple[Any, ...]:
        return tuple(parse_box(answer))

    def math(sample: RewardInput) -> float:
        answer = label_text(sample.label)
        box = find_last_box(answer)
        gold = list(parse_label(answer if box is None else box))
        if not gold:
            raise RewardFault(f"math-verify can't read the label {answer!r}")
        box = find_last_box(sample.response)
        if box is not None:
            found = parse_box(box)
        else:
            text = without_bold(sample.response)
            found = list(parse(text, anywhere, extraction_mode="first_match", parsing_timeout=seconds))
        return float(verify(gold, found, timeout_seconds=seconds)) if found else 0.0

    return math


_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_TUPLE_TASKS = ("arc_agi", "rearc")


def tagged_answer(response: str) -> str:
    """Return the content of the last `<answer>…</answer>`, or the whole response; stripped.

    >>> tagged_answer("I think <answer> 4 </answer>"), tagged_answer(" 4 ")
    ('4', '4')
    """
    found = _ANSWER_TAG.findall(response)
    return (found[-1] if found else response).strip()


def make_reasoning_gym(settings: RewardSettings) -> SampleReward:
    """Return the score of the task's own verifier of reasoning-gym, 0 to 1; many tasks give a little for a near miss.

    Reads the columns `task`, `task_args` and `entry`, which a source `reasoning_gym:task?…` fills.
    """
    import reasoning_gym as gym

    @functools.lru_cache(maxsize=64)
    def dataset(task: str, arguments: str) -> Any:
        return gym.create_dataset(task, **json.loads(arguments))

    def reasoning_gym(sample: RewardInput) -> float:
        lacking = [key for key in ("task", "task_args", "entry") if key not in sample.columns]
        if lacking:
            raise RewardFault(f"the data has no column {lacking[0]!r}; prompts must come from a reasoning_gym: source")
        task, entry = sample.columns["task"], dict(sample.columns["entry"])
        arguments = json.dumps(dict(sample.columns["task_args"]), sort_keys=True)
        if task in _TUPLE_TASKS:  # these verifiers compare with a tuple of tuples, which JSON has made lists
            output = tuple(tuple(row) for row in entry["metadata"]["output"])
            entry["metadata"] = {**entry["metadata"], "output": output}
        return float(dataset(task, arguments).score_answer(tagged_answer(sample.response), entry))

    return reasoning_gym


BUILTIN_REWARDS: Mapping[str, BuiltinReward] = {
    name: BuiltinReward(record.load(), record.inline) for name, record in REWARDS.items()
}
