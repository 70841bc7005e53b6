import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from treadle.algorithms.gae import backward_scan, discounted_returns, gae, last_of_sample


def f64(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def test_gae_by_hand():
    # γ = 0.9, λ = 0.5: δ = (0.9·0.2 - 0.5, 0.9·0.4 - 0.2, 1 - 0.4) = (-0.32, 0.16, 0.6).
    # A = (-0.32 + 0.45·0.43, 0.16 + 0.45·0.6, 0.6) = (-0.1265, 0.43, 0.6).
    advantages, returns = gae(f64(0, 0, 1), f64(0.5, 0.2, 0.4), torch.zeros(3, dtype=torch.int64), None, 0.9, 0.5)
    torch.testing.assert_close(advantages, f64(-0.1265, 0.43, 0.6))
    torch.testing.assert_close(returns, f64(0.3735, 0.63, 1.0))


def test_masked_tokens_pass_the_recursion_through():
    # The same three trained tokens with tool output between, before and after them.
    mask = torch.tensor([False, True, True, False, False, True, False])
    rewards = f64(7, 0, 0, 8, 9, 1, 7)
    values = f64(5, 0.5, 0.2, 99, -99, 0.4, 3)
    advantages, returns = gae(rewards, values, torch.zeros(7, dtype=torch.int64), mask, 0.9, 0.5)
    torch.testing.assert_close(advantages, f64(0, -0.1265, 0.43, 0, 0, 0.6, 0))
    torch.testing.assert_close(returns, f64(0, 0.3735, 0.63, 0, 0, 1.0, 0))


def test_returns_by_hand():
    index = torch.tensor([0, 0, 0, 2])
    result = discounted_returns(f64(1, 0, 4, 3), index, gamma=0.5)
    torch.testing.assert_close(result, f64(2, 2, 4, 3))


def test_last_of_sample():
    assert last_of_sample(torch.tensor([0, 0, 1, 4])).tolist() == [False, True, True, True]
    assert last_of_sample(torch.zeros(0, dtype=torch.int64)).tolist() == []


def test_gamma_zero_keeps_each_token_to_itself():
    result = discounted_returns(f64(1, 2, 3), torch.tensor([0, 0, 0]), gamma=0.0)
    torch.testing.assert_close(result, f64(1, 2, 3))


def loop_gae(rewards, values, index, mask, gamma, lambd):
    """The textbook loop, backwards over one token at a time."""
    rewards, values, index, mask = rewards.tolist(), values.tolist(), index.tolist(), mask.tolist()
    advantages, returns = [0.0] * len(rewards), [0.0] * len(rewards)
    sample, next_value, next_advantage = None, 0.0, 0.0
    for t in reversed(range(len(rewards))):
        if index[t] != sample:
            sample, next_value, next_advantage = index[t], 0.0, 0.0
        if mask[t]:
            delta = rewards[t] + gamma * next_value - values[t]
            next_advantage = delta + gamma * lambd * next_advantage
            next_value = values[t]
            advantages[t], returns[t] = next_advantage, next_advantage + values[t]
    return f64(*advantages), f64(*returns)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 20), max_size=5),
    gamma=st.floats(0, 1),
    lambd=st.floats(0, 1),
    seed=st.integers(0, 1000),
)
def test_the_scan_equals_the_loop(lengths, gamma, lambd, seed):
    torch.manual_seed(seed)
    index = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
    rewards, values = torch.randn(2, index.numel(), dtype=torch.float64).unbind()
    mask = torch.rand(index.numel()) > 0.3
    expected = loop_gae(rewards, values, index, mask, gamma, lambd)
    torch.testing.assert_close(gae(rewards, values, index, mask, gamma, lambd), expected, atol=1e-12, rtol=1e-12)


class CountOperations(TorchDispatchMode):
    """Counts the tensor operations that run inside it."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_sample_of_65536_tokens_is_exact_without_a_loop_over_tokens():
    torch.manual_seed(0)
    count = 65536
    rewards, values = torch.randn(2, count, dtype=torch.float64).unbind()
    index = torch.zeros(count, dtype=torch.int64)
    with CountOperations() as operations:
        advantages, _ = gae(rewards, values, index, None, 0.999, 0.97)
    assert operations.count < 400  # 16 rounds of doubling, some ten operations each
    expected, _ = loop_gae(rewards, values, index, torch.ones(count, dtype=torch.bool), 0.999, 0.97)
    torch.testing.assert_close(advantages, expected, atol=1e-10, rtol=1e-10)


def test_the_scan_leaves_its_inputs_alone():
    values, carry = f64(1, 1, 1), f64(0.5, 0.5, 0)
    assert backward_scan(values, carry).tolist() == [1.75, 1.5, 1.0]
    assert values.tolist() == [1, 1, 1]
    assert carry.tolist() == [0.5, 0.5, 0]
