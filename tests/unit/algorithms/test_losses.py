import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.algorithms.losses import POLICY_LOSSES, PolicyLossInputs, find_policy_loss, opsm_mask, sft, value_loss
from treadle.errors import ConfigError


def f64(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def inputs_of(ratios, advantages, index=None, probs=None, **options):
    """Inputs whose ratios are these; `probs` are the probabilities now."""
    logprobs = f64(*probs).log() if probs else f64(*ratios).log() - 1.0
    return PolicyLossInputs(
        logprobs=logprobs.requires_grad_(),
        old_logprobs=logprobs.detach() - f64(*ratios).log(),
        advantages=f64(*advantages),
        sample_index=torch.tensor(index if index else [0] * len(ratios)),
        **{"rollout_logprobs": logprobs.detach() - f64(*ratios).log(), **options},
    )


def run(name, inputs):
    result = POLICY_LOSSES[name](inputs)
    (gradient,) = torch.autograd.grad(result.loss.sum(), inputs.logprobs)
    return result, gradient


def test_ppo_by_hand():
    inputs = inputs_of([1.5, 0.5, 0.5, 1.5, 1.1], [2.0, 1.0, -1.0, -1.0, 3.0], eps_clip=0.2)
    result, gradient = run("ppo", inputs)
    torch.testing.assert_close(result.loss, f64(-2.4, -0.5, 0.8, 1.5, -3.3))
    torch.testing.assert_close(gradient, f64(0, -0.5, 0, 1.5, -3.3))
    torch.testing.assert_close(result.ratio, f64(1.5, 0.5, 0.5, 1.5, 1.1))
    assert result.clipped.tolist() == [True, False, True, False, False]


def test_ppo_clip_higher_by_hand():
    result, _ = run("ppo", inputs_of([1.25, 1.5], [1.0, 1.0], eps_clip=0.2, eps_clip_high=0.28))
    torch.testing.assert_close(result.loss, f64(-1.25, -1.28))
    assert result.clipped.tolist() == [False, True]


def test_dual_clip_by_hand():
    result, gradient = run("ppo", inputs_of([5.0, 2.0, 5.0], [-2.0, -2.0, 2.0], eps_clip_c=3.0))
    torch.testing.assert_close(result.loss, f64(6.0, 4.0, -2.4))
    torch.testing.assert_close(gradient, f64(0.0, 4.0, 0.0))
    assert result.clipped.tolist() == [True, False, True]


def test_gspo_by_hand():
    # Sample 0: geometric mean of 2 and 1 over its trained tokens is sqrt(2); sample 1: 0.25, clipped to 0.8.
    mask = torch.tensor([True, True, False, True])
    inputs = inputs_of([2.0, 1.0, 9.0, 0.25], [1.0, 1.0, 1.0, -1.0], [0, 0, 0, 1], mask=mask, eps_clip_high=0.5)
    result, gradient = run("gspo", inputs)
    root = math.sqrt(2)
    torch.testing.assert_close(result.loss, f64(-root, -root, 0, 0.8))
    torch.testing.assert_close(result.ratio, f64(root, root, 1, 0.25))
    # Each of the two losses moves each token by -sqrt(2) / 2.
    torch.testing.assert_close(gradient, f64(-root, -root, 0, 0))
    assert result.clipped.tolist() == [False, False, False, True]


def test_gmpo_by_hand():
    # A > 0: 2 is clipped to 1.2, 1.1 stays; A < 0: 0.5 is clipped to 0.8, 0.9 stays.
    inputs = inputs_of([2.0, 1.1, 0.5, 0.9], [1.0, 1.0, -1.0, -1.0], [0, 0, 1, 1])
    result, gradient = run("gmpo", inputs)
    up, down = math.sqrt(1.2 * 1.1), math.sqrt(0.8 * 0.9)
    torch.testing.assert_close(result.loss, f64(-up, -up, down, down))
    torch.testing.assert_close(gradient, f64(0, -up, 0, down))
    assert result.clipped.tolist() == [True, False, True, False]


def test_cispo_by_hand():
    inputs = inputs_of([1.5, 0.9], [2.0, -1.0], probs=[0.6, 0.3])
    result, gradient = run("cispo", inputs)
    torch.testing.assert_close(result.loss, f64(-1.2 * 2 * math.log(0.6), 0.9 * math.log(0.3)))
    torch.testing.assert_close(gradient, f64(-2.4, 0.9))
    assert result.clipped.tolist() == [True, False]


def test_sapo_by_hand():
    inputs = inputs_of([1.5, 1.5], [2.0, -1.0])
    result, gradient = run("sapo", inputs)
    up, down = 1 / (1 + math.exp(-0.5)), 1 / (1 + math.exp(-0.525))
    torch.testing.assert_close(result.loss, f64(-8 * up, 4 / 1.05 * down))
    # d/d lp = -4 σ (1 - σ) A ρ.
    torch.testing.assert_close(gradient, f64(-8 * up * (1 - up) * 1.5, 4 * down * (1 - down) * 1.5))
    assert not result.clipped.any()


def test_dppo_tv_by_hand():
    # p - p_old = 0.25, 0.05, -0.25, 0.189 with bounds 0.2 up and down.
    inputs = inputs_of([2.0, 1.2, 1 / 3.5, 190.0], [1.0, 1.0, -1.0, 1.0], probs=[0.5, 0.3, 0.1, 0.19])
    result, gradient = run("dppo_tv", inputs)
    torch.testing.assert_close(result.loss, f64(0, -1.2 * math.log(0.3), 0, -20 * math.log(0.19)))
    torch.testing.assert_close(gradient, f64(0, -1.2, 0, -20))
    assert result.clipped.tolist() == [True, False, True, False]
    capped, _ = run("dppo_tv", replace(inputs, eps_clip_c=5.0))
    torch.testing.assert_close(capped.loss[3], torch.tensor(-5 * math.log(0.19), dtype=torch.float64))


def test_dppo_tv_compares_with_the_policy_that_drew_the_token():
    """Ratio 1 throughout, as in the only step of a rollout; drawn with p = 0.2, 0.45, 0.9 and 0.5."""
    drawn = f64(0.2, 0.45, 0.9, 0.5).log()
    inputs = inputs_of([1.0] * 4, [1.0, 1.0, -1.0, -1.0], probs=[0.5, 0.5, 0.6, 0.5], rollout_logprobs=drawn)
    result, gradient = run("dppo_tv", inputs)
    assert result.clipped.tolist() == [True, False, True, False]
    torch.testing.assert_close(gradient, f64(0, -1, 0, 1))
    assert result.ratio.tolist() == [1.0] * 4


@pytest.mark.parametrize("name", ["ppo", "gspo", "gmpo", "cispo"])
def test_a_range_of_one_is_no_lower_bound(name):
    inputs = inputs_of([1e-6, 1.5], [-1.0, 1.0], [0, 1], eps_clip=1.0, eps_clip_high=0.28)
    result, gradient = run(name, inputs)
    assert result.clipped.tolist() == [False, True]
    assert gradient[0].item() == pytest.approx(1e-6)


def test_dppo_tv_keeps_a_token_that_moves_the_other_way():
    # A > 0 may fall and A < 0 may rise by any amount.
    result, _ = run("dppo_tv", inputs_of([1 / 3.5, 2.0], [1.0, -1.0], probs=[0.1, 0.8]))
    assert result.clipped.tolist() == [False, False]


def test_opsm_by_hand():
    # lp_old - lp: sample 0 (A < 0) has mean 0.3, sample 1 (A > 0) 0.3, sample 2 (A < 0) 0.1 over trained tokens.
    drift = f64(0.5, 0.1, 0.3, 0.1, 9.0)
    inputs = PolicyLossInputs(
        logprobs=-drift,
        old_logprobs=torch.zeros(5, dtype=torch.float64),
        advantages=f64(-1, -1, 1, -1, -1),
        sample_index=torch.tensor([0, 0, 1, 2, 2]),
        mask=torch.tensor([True, True, True, True, False]),
    )
    assert opsm_mask(inputs, delta=0.2).tolist() == [False, False, True, True, True]
    assert opsm_mask(inputs, delta=0.4).all()


def test_value_loss_by_hand():
    values = f64(2.0, 2.0, 1.1).requires_grad_()
    result = value_loss(values, f64(1.0, 1.0, 1.0), f64(3.0, 0.0, 2.0), value_clip=0.5)
    torch.testing.assert_close(result.loss, f64(2.25, 4.0, 0.81))
    assert result.clipped.tolist() == [True, False, False]
    result.loss.sum().backward()
    torch.testing.assert_close(values.grad, f64(0.0, 4.0, -1.8))


def test_a_value_within_bounds_is_not_clipped_by_rounding():
    draw = torch.Generator().manual_seed(0)
    old, values, returns = (torch.randn(1000, generator=draw) * size for size in (1.0, 0.01, 1.0))
    assert (old + (values - old) != values).any()
    assert not value_loss(values, old, returns, value_clip=5.0).clipped.any()


def test_value_loss_and_sft_ignore_untrained_tokens():
    mask = torch.tensor([True, False])
    values = f64(2.0, float("nan")).requires_grad_()
    result = value_loss(values, f64(2.0, 0.0), f64(1.0, 0.0), 0.5, mask)
    assert result.loss.tolist() == [1.0, 0.0]
    result.loss.sum().backward()
    assert values.grad.tolist() == [2.0, 0.0]
    assert sft(f64(-0.5, -9.0), mask).tolist() == [0.5, 0.0]
    assert sft(f64(-0.5, -9.0)).tolist() == [0.5, 9.0]


@pytest.mark.parametrize("name", ["ppo", "gspo", "gmpo", "sapo"])
@pytest.mark.parametrize("scale", [0.05, 0.6])
def test_gradcheck_of_losses_without_stop_gradient(name, scale):
    torch.manual_seed(2)
    old = -torch.rand(7, dtype=torch.float64) * 3
    logprobs = (old + scale * torch.randn(7, dtype=torch.float64)).requires_grad_()
    index = torch.tensor([0, 0, 0, 1, 2, 2, 2])
    advantages = f64(1.0, -2.0, 0.5)[index]
    inputs = PolicyLossInputs(logprobs, old, advantages, index, torch.rand(7) > 0.2, eps_clip_c=3.0)
    assert torch.autograd.gradcheck(lambda x: POLICY_LOSSES[name](replace(inputs, logprobs=x)).loss, logprobs)


@pytest.mark.parametrize("name", ["cispo", "dppo_tv"])
def test_gradcheck_of_losses_with_a_frozen_weight(name):
    """With its weight held fixed the loss is weight · -A · lp: the gradient is that of this line."""
    torch.manual_seed(2)
    inputs = inputs_of(torch.linspace(0.3, 2.0, 6).tolist(), [1.0, -1.0, 2.0, -2.0, 0.5, -0.5])
    result, gradient = run(name, inputs)
    weight = (result.loss / (-inputs.advantages * inputs.logprobs)).detach()
    assert torch.autograd.gradcheck(lambda x: -weight * inputs.advantages * x, inputs.logprobs)
    torch.testing.assert_close(gradient, -weight * inputs.advantages)


def test_gradcheck_of_value_loss_and_sft():
    values = f64(0.3, 2.0, -1.0).requires_grad_()
    old, returns = f64(0.2, 0.5, 0.0), f64(1.0, 3.0, -2.0)
    assert torch.autograd.gradcheck(lambda x: value_loss(x, old, returns, 0.4).loss, values)
    assert torch.autograd.gradcheck(sft, values)


@pytest.mark.parametrize("name", POLICY_LOSSES)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_never_nan_for_finite_input(name, data):
    count = data.draw(st.integers(1, 6))
    numbers = st.lists(st.floats(-1e4, 0, width=32), min_size=count, max_size=count)
    logprobs = torch.tensor(data.draw(numbers), requires_grad=True)
    advantages = data.draw(st.lists(st.floats(-1e3, 1e3, width=32), min_size=count, max_size=count))
    index = torch.tensor(sorted(data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))))
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)))
    inputs = PolicyLossInputs(
        logprobs,
        torch.tensor(data.draw(numbers)),
        torch.tensor(advantages),
        index,
        mask,
        rollout_logprobs=torch.tensor(data.draw(numbers)),
    )
    result = POLICY_LOSSES[name](inputs)
    assert not torch.isnan(result.loss).any()
    assert not torch.isnan(result.ratio).any()
    result.loss.sum().backward()
    assert not torch.isnan(logprobs.grad).any()


def test_unknown_loss_says_which_there_are():
    with pytest.raises(ConfigError, match=r"'pppo'.*gspo"):
        find_policy_loss("pppo")
