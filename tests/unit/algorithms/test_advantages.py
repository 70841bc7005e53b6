import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.algorithms.advantages import (
    ESTIMATORS,
    AdvantageInputs,
    AdvantageSettings,
    Estimator,
    broadcast,
    compute_advantages,
    whiten,
    whitening_sums,
)
from treadle.errors import ConfigError


def f64(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


# Two samples of one group, three and two tokens; the middle token of the first is a tool result.
INPUTS = AdvantageInputs(
    rewards=f64(2.0, 1.0),
    group_ids=torch.tensor([5, 5]),
    sample_index=torch.tensor([0, 0, 0, 1, 1]),
    mask=torch.tensor([True, False, True, True, True]),
    kl=f64(0.1, 7.0, 0.1, 0.2, 0.2),
    values=f64(0.5, 99.0, 1.0, 0.0, 0.25),
    reward_parts=torch.tensor([[1.0, 0.0], [0.0, 10.0]], dtype=torch.float64),
    part_weights=f64(1.0, 1.0),
)


def test_grpo_by_hand():
    # mean 1.5, std sqrt(0.5).
    scale = 0.5 / (math.sqrt(0.5) + 1e-6)
    result = compute_advantages("grpo", INPUTS)
    expected = f64(scale, 0, scale, -scale, -scale)
    torch.testing.assert_close(result.advantages, expected)
    torch.testing.assert_close(result.returns, expected)
    torch.testing.assert_close(result.shaped, f64(scale, -scale))
    dr = compute_advantages("grpo", INPUTS, AdvantageSettings(std_normalization=False))
    torch.testing.assert_close(dr.advantages, f64(0.5, 0, 0.5, -0.5, -0.5))


def test_gspo_and_cispo_shape_like_grpo_with_their_own_loss():
    for name in ("gspo", "cispo"):
        assert ESTIMATORS[name].policy_loss == name
        assert torch.equal(compute_advantages(name, INPUTS).advantages, compute_advantages("grpo", INPUTS).advantages)


def test_opo_reads_trained_tokens_as_lengths():
    # Lengths 2 and 2: baseline 1.5; with all tokens trained 3 and 2: baseline 8/5.
    torch.testing.assert_close(compute_advantages("opo", INPUTS).shaped, f64(0.5, -0.5))
    torch.testing.assert_close(compute_advantages("opo", replace(INPUTS, mask=None)).shaped, f64(0.4, -0.6))


def test_reinforce_plus_plus_by_hand():
    # kl_coef 1, γ 0.5. Sample 0: r = (-0.1, 0, 1.9), G = (0.375, -, 1.9). Sample 1: r = (-0.2, 0.8), G = (0.2, 0.8).
    options = AdvantageSettings(kl_coef=1.0, gamma=0.5, whiten=False)
    result = compute_advantages("reinforce_plus_plus", INPUTS, options)
    torch.testing.assert_close(result.advantages, f64(0.375, 0, 1.9, 0.2, 0.8))


def test_reinforce_plus_plus_whitens_but_keeps_its_returns():
    result = compute_advantages("reinforce_plus_plus", INPUTS, AdvantageSettings(kl_coef=1.0, gamma=0.5))
    mean = (0.375 + 1.9 + 0.2 + 0.8) / 4
    variance = sum((x - mean) ** 2 for x in (0.375, 1.9, 0.2, 0.8)) / 3
    expected = [(x - mean) / math.sqrt(variance + 1e-8) for x in (0.375, 1.9, 0.2, 0.8)]
    torch.testing.assert_close(result.advantages, f64(expected[0], 0, *expected[1:]))
    torch.testing.assert_close(result.returns, f64(0.375, 0, 1.9, 0.2, 0.8))


def test_reinforce_plus_plus_baseline_by_hand():
    result = compute_advantages(
        "reinforce_plus_plus_baseline", INPUTS, AdvantageSettings(kl_coef=0.5, whiten=False, gamma=0.1)
    )
    torch.testing.assert_close(result.advantages, f64(0.45, 0, 0.45, -0.6, -0.6))


def test_ppo_by_hand():
    # kl_coef 1, γ 0.9, λ 0.5. Sample 0: r = (-0.1, 1.9); δ = (-0.1 + 0.9·1 - 0.5, 1.9 - 1) = (0.3, 0.9).
    # Sample 1: r = (-0.2, 0.8); δ = (-0.2 + 0.9·0.25, 0.8 - 0.25) = (0.025, 0.55).
    result = compute_advantages("ppo", INPUTS, AdvantageSettings(kl_coef=1.0, gamma=0.9, lambd=0.5))
    torch.testing.assert_close(result.advantages, f64(0.705, 0, 0.9, 0.2725, 0.55))
    torch.testing.assert_close(result.returns, f64(1.205, 0, 1.9, 0.2725, 0.8))


def test_ppo_defaults_give_reward_minus_value():
    result = compute_advantages("ppo", INPUTS)
    torch.testing.assert_close(result.advantages, f64(1.5, 0, 1.0, 1.0, 0.75))
    torch.testing.assert_close(result.returns, f64(2, 0, 2, 1, 1))


def test_distillation_comes_before_whitening():
    inputs = replace(
        INPUTS, student_logprobs=f64(-1.0, -5.0, -2.0, -1.0, -1.0), teacher_logprobs=f64(-2.0, 0.0, -1.0, -1.0, -1.0)
    )
    plain = compute_advantages("rloo", inputs, AdvantageSettings(opd_kl_coef=0.5))
    # rloo gives 1 and -1; the term is -0.5 · (1, -, -1, 0, 0).
    torch.testing.assert_close(plain.advantages, f64(0.5, 0, 1.5, -1.0, -1.0))
    white = compute_advantages("rloo", inputs, AdvantageSettings(opd_kl_coef=0.5, whiten=True))
    values, spread = (0.5, 1.5, -1.0, -1.0), math.sqrt((0.5**2 + 1.5**2 + 1 + 1) / 3 + 1e-8)
    torch.testing.assert_close(white.advantages, f64(values[0], 0, *values[1:]) / spread)


def test_gdpo_is_whitened():
    result = compute_advantages("gdpo", INPUTS)
    assert abs(result.advantages.sum().item()) < 1e-12
    first, second = 0.5 / (math.sqrt(0.5) + 1e-6), 5.0 / (math.sqrt(50.0) + 1e-6)
    torch.testing.assert_close(result.shaped, f64(first - second, second - first))


def test_whiten_by_hand():
    # 1, 2, 3, 6: mean 3, squared distances 4 + 1 + 0 + 9, by n - 1 = 14/3. The masked 100 is not seen.
    values, mask = f64(1, 2, 100, 3, 6), torch.tensor([True, True, False, True, True])
    result = whiten(values, whitening_sums(values, mask), mask)
    scale = 1 / math.sqrt(14 / 3 + 1e-8)
    torch.testing.assert_close(result, f64(-2 * scale, -scale, 0, 0, 3 * scale))


def test_whitening_over_ranks_equals_one_rank():
    values = torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ranks = (values[:4], values[4:4], values[4:])
    sums = sum(whitening_sums(part) for part in ranks)
    together = torch.cat([whiten(part, sums) for part in ranks])
    torch.testing.assert_close(together, whiten(values, whitening_sums(values)))


def test_compute_advantages_whitens_over_ranks():
    options = AdvantageSettings(whiten=True)
    other = whitening_sums(f64(4.0, -2.0, 0.0))
    result = compute_advantages("rloo", INPUTS, options, sum_over_ranks=lambda sums: sums + other)
    everything = f64(1, 1, -1, -1, 4, -2, 0)
    expected = (everything - everything.mean()) / torch.sqrt(everything.var() + 1e-8)
    torch.testing.assert_close(result.advantages, f64(*expected[:1], 0, *expected[1:4]))


@pytest.mark.parametrize("numbers", [[], [3.0], [0.1] * 5])
def test_whitening_nothing_or_equal_numbers_is_zero(numbers):
    values = torch.tensor(numbers)
    assert whiten(values, whitening_sums(values)).abs().sum() < 1e-3


def test_missing_inputs_and_idle_settings_are_refused():
    bare = AdvantageInputs(INPUTS.rewards, INPUTS.group_ids, INPUTS.sample_index)
    with pytest.raises(ConfigError, match="'ppo' needs values"):
        compute_advantages("ppo", bare)
    with pytest.raises(ConfigError, match="'gdpo' needs reward_parts, part_weights"):
        compute_advantages("gdpo", bare)
    with pytest.raises(ConfigError, match="needs kl"):
        compute_advantages("reinforce_plus_plus", bare, AdvantageSettings(kl_coef=0.1))
    with pytest.raises(ConfigError, match=r"kl_coef 0.1 does nothing .*'grpo'"):
        compute_advantages("grpo", INPUTS, AdvantageSettings(kl_coef=0.1))
    with pytest.raises(ConfigError, match="teacher_logprobs"):
        compute_advantages("grpo", bare, AdvantageSettings(opd_kl_coef=0.1))
    with pytest.raises(ConfigError, match=r"'gpro'.*grpo"):
        compute_advantages("gpro", bare)


def test_your_own_estimator_runs_where_a_name_does():
    own = Estimator("sign", lambda inputs, _: inputs.rewards.sign(), broadcast, "none")
    assert compute_advantages(own, INPUTS).advantages.tolist() == [1, 0, 1, 1, 1]


@pytest.mark.parametrize("name", ESTIMATORS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_never_nan_and_zero_on_untrained_tokens(name, data):
    num = data.draw(st.integers(0, 6))
    lengths = torch.tensor(data.draw(st.lists(st.integers(0, 4), min_size=num, max_size=num)), dtype=torch.int64)
    index = torch.repeat_interleave(torch.arange(num), lengths)
    count = index.numel()
    numbers = st.floats(-100, 100, width=32)

    def draw(size):
        return torch.tensor(data.draw(st.lists(numbers, min_size=size, max_size=size)), dtype=torch.float32)

    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)), dtype=torch.bool)
    groups = torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=num, max_size=num)), dtype=torch.int64)
    inputs = AdvantageInputs(
        rewards=draw(num),
        group_ids=groups,
        sample_index=index,
        mask=mask,
        trajectory_ids=groups * 10 + torch.arange(num) // 2,
        reward_parts=draw(num * 2).view(num, 2),
        part_weights=torch.tensor([1.0, -0.5]),
        kl=draw(count),
        values=draw(count),
    )
    options = AdvantageSettings(kl_coef=0.1 if ESTIMATORS[name].per_token_reward else 0.0, gamma=0.9, lambd=0.9)
    result = compute_advantages(name, inputs, options)
    assert torch.isfinite(result.advantages).all()
    assert torch.isfinite(result.returns).all()
    assert not result.advantages[~mask].any()
    assert not result.returns[~mask].any()
