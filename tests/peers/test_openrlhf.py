"""Our losses, KL, corrections and rewards against OpenRLHF's own functions on the same random numbers.

Ran against openrlhf 0.11.2. `openrlhf.models` imports flash-attn, which needs a GPU; the two of its files compared here
do not, so they are loaded from the installed package's folder, past its `__init__`. What needs the package as a whole
(its advantages, in `experience_maker`) is not compared.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from treadle.algorithms import (
    AdaptiveKL,
    AdvantageInputs,
    AdvantageSettings,
    Bound,
    CorrectionSettings,
    Denominators,
    Level,
    Mode,
    PolicyLossInputs,
    correct,
    find_policy_loss,
    kl_per_token,
    overlong_penalty,
    token_weights,
    trained_tokens,
    update_kl_coef,
    value_loss,
    weighted_sum,
)
from treadle.algorithms.advantages import token_rewards

reason = "openrlhf is not installed; see tests/peers/requirements.txt"
pytest.importorskip("openrlhf", reason=reason)
pytest.importorskip("deepspeed", reason=reason)


def models_file(name: str) -> ModuleType:
    """`openrlhf/models/NAME.py` itself, in a namespace over its folder."""
    package = "openrlhf_models_files"
    if package not in sys.modules:
        found = find_spec("openrlhf")
        assert found is not None
        assert found.origin is not None
        spec = ModuleSpec(package, None, is_package=True)
        spec.submodule_search_locations = [str(Path(found.origin).parent / "models")]
        sys.modules[package] = module_from_spec(spec)
    return import_module(f"{package}.{name}")


@pytest.fixture(scope="module")
def losses() -> ModuleType:
    return models_file("loss")


@pytest.fixture(scope="module")
def kl_and_rewards() -> ModuleType:
    return models_file("utils")


def close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-7) -> None:
    # OpenRLHF adds 1e-8 to the count in its means
    torch.testing.assert_close(ours, theirs.to(ours.dtype), atol=tolerance, rtol=tolerance)


def value_and_gradient(loss: Tensor, of: Tensor) -> tuple[Tensor, Tensor]:
    (gradient,) = torch.autograd.grad(loss, of)
    return loss.detach(), gradient


def our_loss(
    rollout, name: str, logprobs: Tensor, per_token: bool, factor: Tensor | None = None, **more: Any
) -> Tensor:
    old, advantages, samples = rollout.logprobs(1), per_sample_advantages(rollout), len(rollout.mask)
    vectors = (rollout.pack(x) for x in (logprobs, old, advantages))
    index, mask = rollout.sample_index, rollout.trained
    clips = {"eps_clip": 0.1, "eps_clip_high": 0.3, **more}
    result = find_policy_loss(name)(PolicyLossInputs(*vectors, sample_index=index, mask=mask, **clips))
    mode = Mode.PER_TOKEN if per_token else Mode.PER_SAMPLE
    denominators = Denominators(mode, float(samples), float(mask.sum()))
    lengths = trained_tokens(index, samples, mask)
    weights = token_weights(index, lengths, denominators, mask, torch.float64)
    return weighted_sum(result.loss * (1.0 if factor is None else factor), weights)


def per_sample_advantages(rollout) -> Tensor:
    return torch.linspace(-2, 3, len(rollout.mask), dtype=torch.float64)[:, None].expand(rollout.mask.shape)


def moved(rollout) -> Tensor:
    return (rollout.logprobs(1) + rollout.random(2, 0.4) * rollout.mask).requires_grad_()


@pytest.mark.parametrize(
    ("name", "dual_clip", "per_token"),
    [("ppo", None, True), ("ppo", None, False), ("ppo", 1.6, True), ("ppo", 1.6, False), ("gspo", None, False)],
)
def test_policy_losses(name, dual_clip, per_token, losses, rollout) -> None:
    logprobs = moved(rollout)
    mine = value_and_gradient(our_loss(rollout, name, logprobs, per_token, eps_clip_c=dual_clip), logprobs)
    peer = losses.PolicyLoss(0.1, 0.3, dual_clip=dual_clip, token_level_loss=per_token, policy_loss_type=name)
    loss, *_ = peer(logprobs, rollout.logprobs(1), per_sample_advantages(rollout), rollout.mask.double())
    theirs = value_and_gradient(loss, logprobs)
    close(mine[0], theirs[0])
    close(mine[1], theirs[1])
    assert theirs[1].abs().max() > 1e-3


CORRECTION_CASES: dict[str, tuple[CorrectionSettings, dict[str, str]]] = {
    "tis": (
        CorrectionSettings(Level.TOKEN, Bound.CLIP, 0.7, 1.5),
        {"is_correction_level": "token", "is_correction_mode": "clip"},
    ),
    "icepop": (
        CorrectionSettings(Level.TOKEN, Bound.MASK, 0.7, 1.5),
        {"is_correction_level": "token", "is_correction_mode": "mask"},
    ),
    # a sample is rejected by its geometric mean, its tokens keep their own weight
    "geometric rejection": (
        CorrectionSettings(
            Level.TOKEN,
            Bound.TRUNCATE,
            high=float("inf"),
            reject_level=Level.GEOMETRIC,
            reject_low=0.7,
            reject_high=1.5,
        ),
        {"is_correction_level": "seq", "is_correction_mode": "mask"},
    ),
}


@pytest.mark.parametrize("case", CORRECTION_CASES)
@pytest.mark.parametrize("per_token", [True, False])
def test_corrections(case, per_token, losses, rollout) -> None:
    """Here too a rejected token stays in the denominator."""
    settings, peer_settings = CORRECTION_CASES[case]
    engine, logprobs = rollout.logprobs(1) + rollout.random(3, 0.5), moved(rollout)
    tokens = (rollout.pack(rollout.logprobs(1)), rollout.pack(engine))
    correction = correct(*tokens, rollout.sample_index, settings, rollout.trained)
    mine = value_and_gradient(our_loss(rollout, "ppo", logprobs, per_token, correction.weights), logprobs)
    peer = losses.PolicyLoss(0.1, 0.3, None, per_token, "ppo", is_correction_threshold=[0.7, 1.5], **peer_settings)
    mask = rollout.mask.double()
    loss, _, _, _, dropped = peer(logprobs, rollout.logprobs(1), per_sample_advantages(rollout), mask, engine)
    theirs = value_and_gradient(loss, logprobs)
    close(mine[0], theirs[0])
    close(mine[1], theirs[1])
    if case == "icepop":
        assert float(dropped) == pytest.approx(1 - float(correction.kept.sum() / mask.sum()))
    assert float(dropped) > 0


def test_value_loss_is_twice_theirs(losses, rollout) -> None:
    """OpenRLHF has the factor ½, ours has not."""
    values, old, returns, mask = rollout.random(1), rollout.random(2), rollout.random(3), rollout.mask
    result = value_loss(*(rollout.pack(x) for x in (values, old, returns)), 0.2, rollout.trained)
    close(result.loss.sum() / mask.sum(), 2 * losses.ValueLoss(0.2)(values, old, returns, mask.double()))


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_kl_estimators(name, kl_and_rewards, rollout) -> None:
    """In float32, as OpenRLHF casts to it; it clamps each of them to ±10, ours only low_var_kl."""
    logprobs, reference = rollout.random(1, 0.5).requires_grad_(), rollout.random(2, 0.5)
    mine = kl_per_token(name, logprobs, reference)
    theirs = kl_and_rewards.compute_approx_kl(logprobs, reference, kl_estimator=name)
    close(mine, theirs, 1e-4)
    close(value_and_gradient(mine.sum(), logprobs)[1], value_and_gradient(theirs.sum(), logprobs)[1], 1e-4)
    far = torch.tensor([-30.0])
    assert abs(float(kl_and_rewards.compute_approx_kl(far, far * 0, kl_estimator=name))) == 10.0
    assert abs(float(kl_per_token(name, far, far * 0))) >= 30.0


@pytest.mark.parametrize("name", ["k2", "k3"])
def test_unbiased_kl_has_one_gradient_and_two_values(name, kl_and_rewards, rollout) -> None:
    """∇(ρ·k3) = ρ·d·∇lp: our k3 times ρ has the gradient OpenRLHF builds by hand for each estimator.

    The value differs: ours is ρ·KL, unbiased for the old policy's tokens, OpenRLHF's the plain KL. So does k2: as the
    value ρ·k2 is another function, its gradient is too. OpenRLHF cuts ρ at 10, ours does not.
    """
    logprobs, reference, old = rollout.random(1, 0.6).requires_grad_(), rollout.random(2, 0.6), rollout.random(3, 0.6)
    mine = kl_per_token(name, logprobs, reference, old)
    peer = {"log_probs_old": old, "kl_estimator": name, "unbiased_gradient": True}
    theirs = kl_and_rewards.compute_approx_kl(logprobs, reference, **peer)
    ratio = (logprobs - old).exp().detach()
    assert ratio.max() < 10
    close(mine, theirs * ratio, 1e-4)
    our_gradient, their_gradient = (value_and_gradient(x.sum(), logprobs)[1] for x in (mine, theirs))
    close(their_gradient, ratio * (logprobs - reference).detach(), 1e-4)
    if name == "k3":
        close(our_gradient, their_gradient, 1e-4)
    else:
        assert (our_gradient - their_gradient).abs().max() > 0.1


def test_token_rewards(kl_and_rewards, rollout) -> None:
    kl, index, mask = rollout.random(1), rollout.sample_index, rollout.trained
    inputs = AdvantageInputs(rollout.rewards, rollout.group_ids, index, mask, kl=rollout.pack(kl))
    mine = rollout.unpack(token_rewards(rollout.rewards, inputs, AdvantageSettings(kl_coef=0.1)))
    theirs = kl_and_rewards.compute_reward(rollout.rewards, 0.1, kl, rollout.mask.long())
    close(mine, torch.where(rollout.mask, theirs, 0.0))  # theirs has KL on untrained tokens too, masked later


def test_overlong_penalty() -> None:
    from openrlhf.trainer.ppo_utils import Experience, apply_overlong_penalty

    lengths = torch.tensor([3, 11, 12, 13, 15, 16, 40])
    experience = Experience(response_length=lengths, rewards=torch.ones(7))
    apply_overlong_penalty([experience], 16, 4, 0.5)
    close(1.0 + overlong_penalty(lengths, 16, 4, 0.5), experience.rewards)


def test_adaptive_kl() -> None:
    from openrlhf.trainer.ppo_utils import AdaptiveKLController

    state, peer = AdaptiveKL(coef=0.2, target=0.1, horizon=1000.0), AdaptiveKLController(0.2, 0.1, 1000.0)
    for measured in (0.09, 0.3, 0.0, 0.11):
        state = update_kl_coef(state, measured, 128)
        peer.update(measured, 128)
        assert state.coef == pytest.approx(peer.value, rel=1e-12)
