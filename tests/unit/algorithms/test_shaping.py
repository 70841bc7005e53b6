import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from treadle.algorithms import shaping
from treadle.algorithms.shaping import RunningMoments
from treadle.errors import ConfigError

# Group 7 has rewards 1, 0, 0.5 (mean 0.5, std sqrt((0.25 + 0.25 + 0) / 2) = 0.5), group 2 has one sample.
REWARDS = torch.tensor([1.0, 9.0, 0.0, 0.5], dtype=torch.float64)
GROUPS = torch.tensor([7, 2, 7, 7])
# Two trajectories: the first cut into two samples, both with its reward.
FAN_REWARDS = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
FAN_GROUPS = torch.tensor([4, 4, 4])
FAN_TRAJECTORIES = torch.tensor([10, 11, 10])


def close(value, expected):
    torch.testing.assert_close(value, torch.tensor(expected, dtype=torch.float64), atol=1e-14, rtol=1e-12)


def test_grpo_by_hand():
    close(shaping.grpo_rewards(REWARDS, GROUPS), [0.5 / 0.500001, 0.0, -0.5 / 0.500001, 0.0])
    close(shaping.grpo_rewards(REWARDS, GROUPS, std_normalization=False), [0.5, 0.0, -0.5, 0.0])


def test_grpo_of_equal_rewards_is_exactly_zero_in_float32():
    rewards = torch.full((7,), 0.1)
    assert shaping.grpo_rewards(rewards, torch.zeros(7, dtype=torch.int64)).tolist() == [0.0] * 7


def test_rloo_by_hand():
    close(shaping.rloo_rewards(REWARDS, GROUPS), [0.75, 0.0, -0.75, 0.0])


def test_centred_by_hand():
    close(shaping.centred_rewards(REWARDS, GROUPS), [0.5, 0.0, -0.5, 0.0])


def test_maxrl_by_hand():
    close(shaping.maxrl_rewards(REWARDS, GROUPS), [0.5 / 0.500001, 0.0, -0.5 / 0.500001, 0.0])
    nothing = torch.zeros(3, dtype=torch.float64)
    close(shaping.maxrl_rewards(nothing, torch.zeros(3, dtype=torch.int64)), [0.0, 0.0, 0.0])


def test_opo_by_hand():
    # Baseline of group 7: (1·1 + 2·0 + 5·0.5) / 8 = 0.4375.
    close(shaping.opo_rewards(REWARDS, GROUPS, torch.tensor([1, 3, 2, 5])), [0.5625, 0.0, -0.4375, 0.0625])
    close(shaping.opo_rewards(REWARDS, GROUPS, torch.zeros(4, dtype=torch.int64)), [0.0] * 4)


def test_passk_by_hand():
    close(shaping.passk_rewards(REWARDS, GROUPS), [0.5 / 0.500001, 0.0, 0.0, 0.0])
    tie = torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)
    close(shaping.passk_rewards(tie, torch.zeros(3, dtype=torch.int64)), [0.0, 0.0, 0.0])


def test_gdpo_by_hand():
    # Both parts become ±0.5·spread / (spread/sqrt(2) + 1e-6), whatever their spread; the weights are 1 and 2.
    parts = torch.tensor([[1.0, 0.0], [0.0, 10.0]], dtype=torch.float64)
    result = shaping.gdpo_rewards(parts, torch.tensor([1.0, 2.0]), torch.tensor([3, 3]))
    first, second = 0.5 / (math.sqrt(0.5) + 1e-6), 5.0 / (math.sqrt(50.0) + 1e-6)
    close(result, [first - 2 * second, -first + 2 * second])


def test_a_fanned_out_trajectory_counts_once():
    # n = 2, mean 0.5, std sqrt(0.25 + 0.25) = sqrt(0.5).
    scale = 0.5 / (math.sqrt(0.5) + 1e-6)
    close(shaping.grpo_rewards(FAN_REWARDS, FAN_GROUPS, FAN_TRAJECTORIES), [scale, -scale, scale])
    close(shaping.rloo_rewards(FAN_REWARDS, FAN_GROUPS, FAN_TRAJECTORIES), [1.0, -1.0, 1.0])
    close(shaping.centred_rewards(FAN_REWARDS, FAN_GROUPS, FAN_TRAJECTORIES), [0.5, -0.5, 0.5])
    close(shaping.passk_rewards(FAN_REWARDS, FAN_GROUPS, FAN_TRAJECTORIES), [2 * scale, 0.0, 2 * scale])
    # Lengths 1 + 2 for the first trajectory, 3 for the second: baseline 3 / 6.
    close(shaping.opo_rewards(FAN_REWARDS, FAN_GROUPS, torch.tensor([1, 3, 2])), [0.5, -0.5, 0.5])


def test_a_group_of_one_trajectory_is_a_group_of_one():
    rewards, group = torch.tensor([3.0, 3.0]), torch.tensor([0, 0])
    same = torch.tensor([8, 8])
    for function in (shaping.grpo_rewards, shaping.rloo_rewards, shaping.centred_rewards, shaping.passk_rewards):
        assert function(rewards, group, same).tolist() == [0.0, 0.0]


def test_trajectory_ids_may_repeat_in_other_groups():
    rewards = torch.tensor([1.0, 0.0, 4.0, 2.0], dtype=torch.float64)
    groups, trajectories = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1])
    close(shaping.rloo_rewards(rewards, groups, trajectories), [1.0, -1.0, 2.0, -2.0])


def test_combine_clip_and_overlong_by_hand():
    parts = torch.tensor([[1.0, 0.5], [0.0, 2.0]])
    assert shaping.combine_rewards(parts, torch.tensor([1.0, -2.0]), scale=3.0, bias=0.5).tolist() == [0.5, -11.5]
    rewards = torch.tensor([-3.0, 0.5, 4.0])
    assert shaping.clip_rewards(rewards, -1.0, 2.0).tolist() == [-1.0, 0.5, 2.0]
    assert shaping.clip_rewards(rewards, None, 2.0).tolist() == [-3.0, 0.5, 2.0]
    penalty = shaping.overlong_penalty(
        torch.tensor([0, 80, 85, 100, 200]), max_length=100, buffer_length=20, factor=2.0
    )
    assert penalty.tolist() == [0.0, 0.0, -0.5, -2.0, -2.0]
    with pytest.raises(ConfigError, match="got 0"):
        shaping.overlong_penalty(torch.tensor([1]), max_length=10, buffer_length=0)
    with pytest.raises(ConfigError, match="lower bound 2"):
        shaping.clip_rewards(rewards, 2.0, 1.0)


@given(st.lists(st.lists(st.floats(-100, 100), max_size=6), max_size=5))
def test_running_moments_equal_those_of_all_rewards_at_once(batches):
    state = RunningMoments()
    for batch in batches:
        state = shaping.update_moments(state, torch.tensor(batch, dtype=torch.float64))
    everything = torch.tensor([r for batch in batches for r in batch], dtype=torch.float64)
    assert state.count == everything.numel()
    if state.count > 1:
        assert state.mean == pytest.approx(everything.mean().item(), abs=1e-9)
        assert state.std == pytest.approx(everything.std().item(), abs=1e-6)


def test_normalize_running_by_hand():
    state = shaping.update_moments(RunningMoments(), torch.tensor([1.0, 3.0]))  # mean 2, std sqrt(2)
    result = shaping.normalize_running(torch.tensor([2.0, 5.0], dtype=torch.float64), state)
    close(result, [0.0, 3.0 / (math.sqrt(2.0) + 1e-6)])
    assert shaping.normalize_running(torch.tensor([5.0]), RunningMoments()).tolist() == [5.0]


SHAPES = {
    "grpo": shaping.grpo_rewards,
    "rloo": shaping.rloo_rewards,
    "centred": shaping.centred_rewards,
    "maxrl": shaping.maxrl_rewards,
    "passk": shaping.passk_rewards,
    "opo": lambda rewards, groups, _: shaping.opo_rewards(rewards, groups, (rewards.abs() * 10).long()),
}


@pytest.mark.parametrize("name", SHAPES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_order_and_uneven_groups(name, data):
    """Any order and any group sizes: each group alone gives the same numbers, all finite."""
    count = data.draw(st.integers(0, 12))
    rewards = torch.tensor(data.draw(st.lists(st.floats(0, 10, width=32), min_size=count, max_size=count)))
    rewards = rewards.to(torch.float64)
    groups = torch.tensor(data.draw(st.lists(st.integers(-2, 3), min_size=count, max_size=count)), dtype=torch.int64)
    result = SHAPES[name](rewards, groups, None)
    assert torch.isfinite(result).all()
    order = torch.tensor(data.draw(st.permutations(range(count))), dtype=torch.int64)
    torch.testing.assert_close(SHAPES[name](rewards[order], groups[order], None), result[order], atol=1e-9, rtol=1e-9)
    for group in groups.unique():
        inside = groups == group
        torch.testing.assert_close(SHAPES[name](rewards[inside], groups[inside], None), result[inside])


@pytest.mark.parametrize("name", ["grpo", "rloo", "centred", "maxrl", "passk"])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_cutting_a_trajectory_changes_no_number(name, data):
    """However many samples each trajectory is cut into, they all get what the whole one got."""
    count = data.draw(st.integers(1, 6))
    rewards = torch.tensor(data.draw(st.lists(st.integers(0, 4), min_size=count, max_size=count)), dtype=torch.float64)
    groups = torch.tensor(data.draw(st.lists(st.integers(0, 1), min_size=count, max_size=count)))
    cuts = torch.tensor(data.draw(st.lists(st.integers(1, 4), min_size=count, max_size=count)))
    whole = SHAPES[name](rewards, groups, None)
    ids = torch.repeat_interleave(torch.arange(count), cuts)
    torch.testing.assert_close(SHAPES[name](rewards[ids], groups[ids], ids), whole[ids], atol=1e-9, rtol=1e-6)


class CountOperations(TorchDispatchMode):
    """Counts the tensor operations that run inside it."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", SHAPES)
def test_a_hundred_thousand_samples_take_no_loop(name):
    """As many operations as for eight samples."""
    counts = []
    for count in (8, 100_000):
        groups = torch.randperm(count, generator=torch.Generator().manual_seed(0)) // 4
        rewards = torch.linspace(0, 1, count)
        with CountOperations() as operations:
            SHAPES[name](rewards, groups, groups * 3)
        counts.append(operations.count)
    assert counts[0] == counts[1]


def test_gdpo_counts_a_trajectory_once():
    parts = torch.tensor([[1.0, 4.0], [1.0, 4.0], [0.0, 8.0]])
    fanned = shaping.gdpo_rewards(parts, torch.tensor([1.0, 3.0]), torch.zeros(3).long(), torch.tensor([5, 5, 6]))
    plain = shaping.gdpo_rewards(parts[1:], torch.tensor([1.0, 3.0]), torch.zeros(2).long())
    assert fanned.tolist() == pytest.approx(plain[[0, 0, 1]].tolist())
    assert plain.tolist() == pytest.approx([-(2**0.5), 2**0.5], abs=1e-4)  # ±√½ · (1 - 3)
