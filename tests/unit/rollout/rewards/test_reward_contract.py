import itertools

import pytest

from treadle.rollout.rewards import RewardInput
from treadle.rollout.rewards.reward_contract import check_reward

EXAMPLES = [
    RewardInput("4", label="4", columns={"topics": ["a"]}),
    RewardInput("five", label="5", columns={"topics": []}),
]


def test_a_good_reward_passes():
    check_reward(lambda sample: float(sample.response == sample.label), EXAMPLES)
    check_reward(lambda completions, label: [None for _ in completions], EXAMPLES)


def test_one_that_fails_on_an_empty_response_is_found():
    with pytest.raises(AssertionError, match=r"raised IndexError: .* \(response ''\)"):
        check_reward(lambda sample: float(sample.response[0] == "4"), EXAMPLES)


def test_one_that_fails_on_a_huge_number_is_found():
    with pytest.raises(AssertionError, match="Exceeds the limit"):
        check_reward(lambda sample: int(sample.response) % 2 if sample.response.isdecimal() else 0.0, EXAMPLES)


def test_one_that_changes_its_mind_is_found():
    numbers = itertools.count()
    with pytest.raises(AssertionError, match="for the same input"):
        check_reward(lambda sample: next(numbers), EXAMPLES)


def test_one_that_changes_its_input_is_found():
    def adds_a_topic(sample):
        sample.columns["topics"].append("b")
        return 0.0

    with pytest.raises(AssertionError, match="changed its input"):
        check_reward(adds_a_topic, EXAMPLES)
    assert EXAMPLES[0].columns == {"topics": ["a"]}


def test_one_that_gives_nan_is_found():
    with pytest.raises(AssertionError, match="returned nan"):
        check_reward(lambda sample: float("nan"), EXAMPLES)
