import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treadle.algorithms.kl import KL_ESTIMATORS, AdaptiveKL, kl_per_token, update_kl_coef
from treadle.errors import ConfigError

# d = ln 2 and -ln 4, so exp(-d) = 0.5 and 4.
LOGPROBS = torch.tensor([math.log(0.5), math.log(0.1)], dtype=torch.float64)
REF = torch.tensor([math.log(0.25), math.log(0.4)], dtype=torch.float64)
D = (math.log(2), -math.log(4))
BY_HAND = {
    "k1": D,
    "k2": (D[0] ** 2 / 2, D[1] ** 2 / 2),
    "k3": (0.5 - 1 + D[0], 4 - 1 + D[1]),
    "low_var_kl": (0.5 - 1 + D[0], 4 - 1 + D[1]),
    "abs": (D[0], -D[1]),
    "k3+": (0.5 - 1 + D[0], 4 - 1 + D[1]),
}
GRADIENT_BY_HAND = {
    "k1": (1, 1),
    "k2": D,
    "k3": (1 - 0.5, 1 - 4),
    "low_var_kl": (1 - 0.5, 1 - 4),
    "abs": (1, -1),
    "k3+": D,
}


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_value_and_gradient_by_hand(name):
    logprobs = LOGPROBS.clone().requires_grad_()
    value = kl_per_token(name, logprobs, REF)
    torch.testing.assert_close(value, torch.tensor(BY_HAND[name], dtype=torch.float64))
    value.sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor(GRADIENT_BY_HAND[name], dtype=torch.float64))


@pytest.mark.parametrize("name", [n for n in KL_ESTIMATORS if n != "k3+"])  # k3+ swaps its gradient on purpose
def test_gradcheck(name):
    logprobs = LOGPROBS.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: kl_per_token(name, x, REF), logprobs)
    assert torch.autograd.gradcheck(lambda x: kl_per_token(name, x, REF, REF), logprobs)


def test_low_var_kl_is_cut_at_ten_without_gradient():
    logprobs = torch.tensor([-200.0, -3.0], requires_grad=True)  # exp(200) overflows float32; exp(3) - 1 - 3 = 16.1
    value = kl_per_token("low_var_kl", logprobs, torch.zeros(2))
    assert value.tolist() == [10.0, 10.0]
    value.sum().backward()
    assert logprobs.grad.tolist() == [0.0, 0.0]


def test_unbiased_kl_is_multiplied_by_the_ratio():
    old = torch.tensor([math.log(0.25), math.log(0.2)], dtype=torch.float64)  # ρ = 2 and 0.5
    logprobs = LOGPROBS.clone().requires_grad_()
    value = kl_per_token("k3", logprobs, REF, old)
    torch.testing.assert_close(value, torch.tensor([2 * BY_HAND["k3"][0], 0.5 * BY_HAND["k3"][1]], dtype=torch.float64))
    value.sum().backward()
    # ρ (k3 + k3') = 2 (ln 2 - 0.5 + 0.5) and 0.5 (3 - ln 4 - 3).
    torch.testing.assert_close(logprobs.grad, torch.tensor([2 * D[0], 0.5 * D[1]], dtype=torch.float64))


@given(
    logprobs=st.lists(st.floats(-1e4, 0, width=32), min_size=1, max_size=5),
    ref=st.floats(-1e4, 0, width=32),
    name=st.sampled_from(list(KL_ESTIMATORS)),
    with_old=st.booleans(),
)
def test_finite_for_any_logprobs(logprobs, ref, name, with_old):
    logprobs = torch.tensor(logprobs, requires_grad=True)
    reference = torch.full_like(logprobs, ref)
    value = kl_per_token(name, logprobs, reference)
    assert torch.isfinite(value).all()
    value.sum().backward()
    assert torch.isfinite(logprobs.grad).all()
    if name not in ("k1",):
        assert (value >= -1e-6).all()
    if with_old:
        assert not torch.isnan(kl_per_token(name, logprobs, reference, logprobs.detach() - 1)).any()


def test_small_differences_are_exact_in_float32():
    value = kl_per_token("k3", torch.tensor([1e-3]), torch.tensor([0.0]))
    assert value.item() == pytest.approx(0.5e-6, rel=1e-3)


def test_unknown_name_says_which_there_are():
    with pytest.raises(ConfigError, match=r"'kl9'.*low_var_kl"):
        kl_per_token("kl9", LOGPROBS, REF)


def test_adaptive_controller_by_hand():
    state = AdaptiveKL(coef=0.1, target=0.5, horizon=1000)
    # 0.55 / 0.5 - 1 = 0.1, times 200 / 1000 = 0.02.
    assert update_kl_coef(state, 0.55, 200).coef == pytest.approx(0.102)
    assert update_kl_coef(state, 99.0, 200).coef == pytest.approx(0.104)
    assert update_kl_coef(state, 0.0, 200).coef == pytest.approx(0.096)
    assert state.coef == 0.1
    with pytest.raises(ConfigError, match="target 0"):
        AdaptiveKL(coef=0.1, target=0, horizon=10)
