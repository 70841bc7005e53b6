"""Every registered advantage estimator passes the checks, and a broken one does not."""

from dataclasses import replace

import pytest

from treadle.algorithms import ESTIMATORS
from treadle.algorithms.advantages import broadcast
from treadle.algorithms.contract import check_advantage


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimator(name):
    assert ESTIMATORS[name].name == name
    check_advantage(ESTIMATORS[name])


def shape_by_batch_mean(inputs, settings):
    return inputs.rewards - inputs.rewards.mean()


def shape_by_position(inputs, settings):
    shaped = inputs.rewards.clone()
    shaped[::2] = 0
    return shaped


def shape_in_place(inputs, settings):
    return inputs.rewards.sub_(1.0)


def shape_without_epsilon(inputs, settings):
    return (inputs.rewards - inputs.rewards.mean()) / inputs.rewards.std()


@pytest.mark.parametrize(
    ("shape", "complaint"),
    [
        (shape_by_batch_mean, "depend on other groups"),
        (shape_by_position, "order of the samples"),
        (shape_in_place, "'rewards' was changed"),
        (shape_without_epsilon, "depend on other groups|not finite"),
    ],
)
def test_a_broken_estimator_is_caught(shape, complaint):
    with pytest.raises(AssertionError, match=complaint):
        check_advantage(replace(ESTIMATORS["grpo"], name="broken", shape=shape, spread=broadcast))
