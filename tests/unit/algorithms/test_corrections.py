import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.algorithms.corrections import (
    CORRECTIONS,
    Bound,
    CorrectionSettings,
    Level,
    correct,
    m2po_mask,
    top_entropy_mask,
    vetoed,
)
from treadle.algorithms.losses import POLICY_LOSSES, PolicyLossInputs
from treadle.errors import ConfigError

# w = 3, 0.4, 1 (untrained: 50) in sample 0 and 0.25 in sample 1.
WEIGHTS = torch.tensor([3.0, 0.4, 50.0, 1.0, 0.25], dtype=torch.float64)
OLD = WEIGHTS.log()
ROLLOUT = torch.zeros(5, dtype=torch.float64)
INDEX = torch.tensor([0, 0, 0, 0, 1])
MASK = torch.tensor([True, True, False, True, True])


def weights_of(settings):
    result = correct(OLD, ROLLOUT, INDEX, settings, MASK)
    return result.weights, result.kept


def f64(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def test_token_level_by_hand():
    clip = CorrectionSettings(low=0.5, high=2.0)
    torch.testing.assert_close(weights_of(clip)[0], f64(2.0, 0.5, 0, 1.0, 0.5))
    torch.testing.assert_close(weights_of(replace(clip, bound=Bound.TRUNCATE))[0], f64(2.0, 0.4, 0, 1.0, 0.25))
    weights, kept = weights_of(replace(clip, bound=Bound.MASK))
    torch.testing.assert_close(weights, f64(0, 0, 0, 1.0, 0))
    assert kept.tolist() == [False, False, False, True, False]


def test_named_corrections_by_hand():
    torch.testing.assert_close(weights_of(CORRECTIONS["tis"])[0], f64(2.0, 0.4, 0, 1.0, 0.25))
    torch.testing.assert_close(weights_of(CORRECTIONS["icepop"])[0], f64(3.0, 0, 0, 1.0, 0))
    # 3 · 0.4 · 1 = 1.2 and its cube root.
    torch.testing.assert_close(weights_of(CORRECTIONS["sequence"])[0], f64(1.2, 1.2, 0, 1.2, 0.25))
    root = 1.2 ** (1 / 3)
    torch.testing.assert_close(weights_of(CORRECTIONS["geometric"])[0], f64(root, root, 0, root, 0.25))


def test_rejection_zeroes_and_says_so():
    by_token = CorrectionSettings(high=2.0, reject_level=Level.TOKEN, reject_low=0.3, reject_high=2.5)
    weights, kept = weights_of(by_token)
    torch.testing.assert_close(weights, f64(0, 0.4, 0, 1.0, 0))
    assert kept.tolist() == [False, True, False, True, False]
    weights, kept = weights_of(replace(by_token, reject_level=Level.SEQUENCE, reject_high=1.1))
    assert not kept.any()
    assert not weights.any()
    # The mean log weight keeps sample 0 (1.063), drops sample 1.
    _, kept = weights_of(replace(by_token, reject_level=Level.GEOMETRIC, reject_high=1.1))
    assert kept.tolist() == [True, True, False, True, False]


def test_veto_drops_the_whole_sample():
    old = torch.tensor([0.0, math.log(0.9e-4), 0.0, math.log(2e-4)], dtype=torch.float64)
    index = torch.tensor([0, 0, 1, 1])
    options = CorrectionSettings(veto_below=1e-4)
    result = correct(old, torch.zeros(4, dtype=torch.float64), index, options)
    torch.testing.assert_close(result.weights, f64(0, 0, 1.0, 2e-4))
    masked = correct(old, torch.zeros(4, dtype=torch.float64), index, options, torch.tensor([True, False, True, True]))
    torch.testing.assert_close(masked.weights, f64(1.0, 0, 1.0, 2e-4))
    trained = torch.tensor([True, False, True, True])
    assert vetoed(old, index, 1e-4).tolist() == [True, True, False, False]
    assert vetoed(old, index, 1e-4, trained).tolist() == [False, False, False, False]


def test_batch_mean_one_by_hand():
    # Clipped to 2, 0.5, 1, 0.5: mean 1.
    options = CorrectionSettings(low=0.5, high=2.0, batch_mean_one=True)
    torch.testing.assert_close(weights_of(options)[0], f64(2.0, 0.5, 0, 1.0, 0.5))
    # With another rank's sum 8 over 4 tokens: mean 12 / 8 = 1.5.
    result = correct(OLD, ROLLOUT, INDEX, options, MASK, sum_over_ranks=lambda sums: sums + f64(8.0, 4.0))
    torch.testing.assert_close(result.weights, f64(2.0, 0.5, 0, 1.0, 0.5) / 1.5)


def test_no_gradient_flows_through_a_correction():
    old = OLD.clone().requires_grad_()
    assert not correct(old, ROLLOUT, INDEX, CORRECTIONS["tis"], MASK).weights.requires_grad


def test_bad_bounds_are_refused_with_the_numbers():
    with pytest.raises(ConfigError, match=r"\[3.0, 2.0\]"):
        CorrectionSettings(low=3.0, high=2.0)


def test_m2po_by_hand():
    # Squares 0.01, 1, 0.04, 0.09: means of the smallest 1, 2, 3, 4 are 0.01, 0.025, 0.0467, 0.285.
    old = f64(0.1, -1.0, 0.2, -0.3)
    rollout = torch.zeros(4, dtype=torch.float64)
    assert m2po_mask(old, rollout, threshold=0.04).tolist() == [True, False, True, False]
    assert m2po_mask(old, rollout, threshold=0.05).tolist() == [True, False, True, True]
    assert m2po_mask(old, rollout, threshold=0.3).all()
    assert not m2po_mask(old, rollout, threshold=0.005).any()
    mask = torch.tensor([True, False, False, True])
    assert m2po_mask(old, rollout, threshold=0.06, mask=mask).tolist() == [True, False, False, True]
    with pytest.raises(ConfigError, match="got 0"):
        m2po_mask(old, rollout, threshold=0)


def test_decoupled_ppo_by_hand():
    """exp(lp_prox - lp_behave) = 2 and 0.5 on PPO's loss with the ratio to the proximal policy: 1.5 (clipped), 0.9."""
    logprobs = f64(math.log(0.3), math.log(0.45)).requires_grad_()
    prox, behave, index = f64(0.2, 0.5).log(), f64(0.1, 1.0).log(), torch.tensor([0, 0])
    inputs = PolicyLossInputs(logprobs, prox, advantages=f64(1.0, -1.0), sample_index=index)
    result = POLICY_LOSSES["ppo"](inputs)
    loss = result.loss * correct(prox, behave, index, CORRECTIONS["decoupled"]).weights
    torch.testing.assert_close(loss, f64(-1.2 * 2, 0.9 * 0.5))
    assert result.clipped.tolist() == [True, False]
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    torch.testing.assert_close(gradient, f64(0, 0.45))
    capped = correct(prox, behave, index, replace(CORRECTIONS["decoupled"], high=1.5)).weights
    torch.testing.assert_close(capped, f64(1.5, 0.5))


def test_the_decoupled_weight_has_no_bound_of_its_own():
    weights = weights_of(CORRECTIONS["decoupled"])[0]
    torch.testing.assert_close(weights, f64(3.0, 0.4, 0, 1.0, 0.25))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_finite_and_within_bounds_and_order_free(data):
    num = data.draw(st.integers(0, 4))
    lengths = torch.tensor(data.draw(st.lists(st.integers(0, 4), min_size=num, max_size=num)), dtype=torch.int64)
    index = torch.repeat_interleave(torch.arange(num), lengths)
    count = index.numel()
    logs = st.lists(st.floats(-1e4, 1e4, width=32), min_size=count, max_size=count)
    old, rollout = torch.tensor(data.draw(logs)), torch.tensor(data.draw(logs))
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)), dtype=torch.bool)
    options = CorrectionSettings(
        level=data.draw(st.sampled_from(list(Level))),
        bound=data.draw(st.sampled_from(list(Bound))),
        low=0.5,
        high=2.0,
        reject_level=data.draw(st.sampled_from([None, *Level])),
        reject_high=10.0,
        veto_below=data.draw(st.sampled_from([None, 1e-4])),
        batch_mean_one=data.draw(st.booleans()),
    )
    before = old.clone()
    result = correct(old, rollout, index, options, mask)
    assert torch.equal(old, before)
    assert torch.isfinite(result.weights).all()
    assert (result.weights >= 0).all()
    assert not result.kept[~mask].any()
    assert not result.weights[~result.kept].any()
    if not options.batch_mean_one:
        assert (result.weights <= 2.0).all()
        samples = [s for s in range(num) if lengths[s]]
        for sample in samples:
            inside = index == sample
            alone = correct(old[inside], rollout[inside], index[inside] * 0, options, mask[inside])
            torch.testing.assert_close(alone.weights, result.weights[inside])


def test_m2po_brings_the_mean_under_its_threshold_not_to_it():
    gap = torch.tensor([0.5, 0.0])  # mean square 0.125
    assert m2po_mask(gap, torch.zeros(2), 0.125).tolist() == [False, True]
    assert m2po_mask(gap, torch.zeros(2), 0.126).tolist() == [True, True]


# Tokens chosen by entropy


ENTROPY = torch.tensor([0.3, 2.0, 0.0, 1.0, 1.0, 5.0])
CHOSEN = torch.tensor([True, True, True, True, True, False])


def test_the_highest_of_the_trained_tokens_are_kept():
    # five trained tokens: 2.0, then two of 1.0, then 0.3, 0.0; the 5.0 is not trained
    assert top_entropy_mask(ENTROPY, 0.2, CHOSEN).tolist() == [False, True, False, False, False, False]
    assert top_entropy_mask(ENTROPY, 0.4, CHOSEN).tolist() == [
        False,
        True,
        False,
        True,
        True,
        False,
    ]  # a tie stays together
    assert top_entropy_mask(ENTROPY, 1.0, CHOSEN).tolist() == CHOSEN.tolist()
    assert top_entropy_mask(ENTROPY, 0.001, CHOSEN).sum() == 1


def test_order_does_not_matter_and_nothing_is_fine():
    order = torch.tensor([4, 2, 5, 0, 3, 1])
    assert torch.equal(
        top_entropy_mask(ENTROPY, 0.5, CHOSEN)[order], top_entropy_mask(ENTROPY[order], 0.5, CHOSEN[order])
    )
    assert top_entropy_mask(torch.zeros(0), 0.5).tolist() == []
    assert not top_entropy_mask(ENTROPY, 0.5, torch.zeros(6, dtype=torch.bool)).any()


@pytest.mark.parametrize("fraction", [0.0, -1.0, 1.5])
def test_a_fraction_is_a_fraction(fraction):
    with pytest.raises(ConfigError, match="top_entropy_fraction"):
        top_entropy_mask(ENTROPY, fraction)
