import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.errors import RewardError
from treadle.plain_json import plain_json
from treadle.rollout.rewards.forms import (
    RewardFault,
    evaluate,
    group_arguments,
    inspect_function,
    read_group_scores,
    read_number,
    read_score,
)
from treadle.rollout.rewards.inputs import RewardInput, RewardScore, input_from_json, input_to_json


async def async_sample(sample): ...


class AsyncJudge:
    async def __call__(self, completions, **columns): ...


@pytest.mark.parametrize(
    ("function", "form", "is_async"),
    [
        (lambda sample: 0.0, "sample", False),
        (lambda anything, scale=2.0: 0.0, "sample", False),
        (lambda *args: 0.0, None, False),
        (lambda sample, **kwargs: 0.0, "sample", False),
        (lambda completions: [], "group", False),
        (lambda completions, answer, **kwargs: [], "group", False),
        (lambda prompts, completions: [], "group", False),
        (lambda completion_ids, **kwargs: [], "group", False),
        (lambda **kwargs: [], "group", False),
        (functools.partial(lambda scale, sample: 0.0, 2.0), "sample", False),
        (async_sample, "sample", True),
        (functools.partial(async_sample), "sample", True),
        (AsyncJudge(), "group", True),
        (lambda: 0.0, None, False),
        (lambda sample, other: 0.0, None, False),
        (lambda sample, *, scale: 0.0, None, False),
        (lambda completions, /: [], None, False),
        (AsyncJudge, None, False),
        (3, None, False),
    ],
)
def test_the_form_is_read_off_the_signature(function, form, is_async):
    if form is None:
        with pytest.raises(RewardError, match="reward 'f'"):
            inspect_function("f", function)
    else:
        found = inspect_function("f", function)
        assert (found.form, found.is_async) == (form, is_async)


@pytest.mark.parametrize("value", [1, True, 1.0, np.float32(1), np.int64(1), np.bool_(True), np.array(1.0)])
def test_numbers_of_many_kinds_are_read(value):
    number = read_number(value)
    assert number == 1.0
    assert type(number) is float


@pytest.mark.parametrize(
    "value", [None, "1", [1.0], np.array([1.0]), float("nan"), float("inf"), -float("inf"), 1j, 10**400, object()]
)
def test_nonsense_is_refused(value):
    with pytest.raises(RewardFault, match=r"returned .* a reward is a finite number"):
        read_number(value)


def test_a_dict_is_added_up_and_a_slash_in_a_name_becomes_a_dot():
    assert read_score({"a/b": 1, "c": 0.25}) == RewardScore(1.25, {"a.b": 1.0, "c": 0.25})
    assert read_score(RewardScore(1, {"d/e": 3})) == RewardScore(1.0, {"d.e": 3.0})
    with pytest.raises(RewardFault, match=r"two parts named 'a\.b'"):
        read_score({"a/b": 1, "a.b": 1})
    with pytest.raises(RewardFault, match="in part 'a' returned nan"):
        read_score({"a": float("nan")})
    with pytest.raises(RewardFault, match="empty dict"):
        read_score({})


def test_group_results():
    assert read_group_scores([1, None, 0.5], 3) == [RewardScore(1.0), None, RewardScore(0.5)]
    assert read_group_scores(np.array([1.0, 2.0]), 2) == [RewardScore(1.0), RewardScore(2.0)]
    with pytest.raises(RewardFault, match="returned 1 rewards for 2 samples"):
        read_group_scores([1.0], 2)
    with pytest.raises(RewardFault, match="must be a list of 2 numbers"):
        read_group_scores(1.0, 2)
    with pytest.raises(RewardFault, match="returned nan"):
        read_group_scores([1.0, float("nan")], 2)


def test_arguments_of_a_trl_style_reward():
    columns = {"answer": "4", "completions": "ours win", "not a name": 0}
    inputs = [RewardInput(r, prompt="p", label="L", columns=columns, token_ids=(7, 8)) for r in ("x", "y")]
    lists = {"answer": ["4", "4"], "label": ["L", "L"], "prompts": ["p", "p"], "completions": ["x", "y"]}
    lists["completion_ids"] = [[7, 8], [7, 8]]
    assert group_arguments(lambda **kwargs: [], inputs) == lists
    assert group_arguments(lambda completions, answer: [], inputs) == {"completions": ["x", "y"], "answer": ["4", "4"]}
    assert group_arguments(lambda completions, other=None: [], inputs) == {"completions": ["x", "y"]}
    with pytest.raises(RewardFault, match=r"asks for 'solution', which the data lacks; its columns are \['answer'"):
        group_arguments(lambda completions, solution, **kwargs: [], inputs)


def test_a_chat_prompt_gives_messages():
    chat = ({"role": "user", "content": "hi"},)
    given_ = group_arguments(lambda prompts, completions: [], [RewardInput("x", messages=chat)])
    assert given_ == {
        "prompts": [[{"role": "user", "content": "hi"}]],
        "completions": [[{"role": "assistant", "content": "x"}]],
    }


def test_the_cause_is_one_line_with_its_place():
    def fails(sample):
        raise ValueError("two\nlines")

    with pytest.raises(RewardFault, match=r"^raised ValueError: two lines \(test_forms\.py:\d+\)$"):
        evaluate(inspect_function("f", fails), [RewardInput("x")])


def test_a_plain_function_may_return_an_awaitable():
    async def later():
        return 3.0

    assert evaluate(inspect_function("f", lambda sample: later()), [RewardInput("x")]) == [RewardScore(3.0)]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(json_values)
def test_plain_json_leaves_json_values_alone(value):
    assert plain_json(value) == value


def test_plain_json_of_other_values():
    value = {1: (np.int64(2), np.array([1.5, 2.0])), "s": {"b", "a"}, "z": complex(0, 1), "n": np.float32(0.5)}
    assert plain_json(value) == {"1": [2, [1.5, 2.0]], "s": ["a", "b"], "z": "1j", "n": 0.5}


@given(st.text(), json_values)
def test_an_input_survives_json(text, label):
    item = RewardInput(text, "p", label, {"a": label}, ({"role": "user", "content": text},), (1, 2))
    assert input_from_json(input_to_json(item)) == item
