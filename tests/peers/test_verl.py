"""Our advantages, KL, losses and corrections against verl's own functions on the same random numbers, in float64.

Ran against verl 0.9.1. Where the two differ on purpose there is a test that says how.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from treadle.algorithms import (
    CORRECTIONS,
    AdaptiveKL,
    AdvantageInputs,
    Advantages,
    AdvantageSettings,
    Bound,
    CorrectionSettings,
    Denominators,
    Level,
    Mode,
    PolicyLossInputs,
    compute_advantages,
    correct,
    find_policy_loss,
    kl_per_token,
    token_weights,
    trained_tokens,
    update_kl_coef,
    value_loss,
    weighted_sum,
    whiten,
    whitening_sums,
)

core = pytest.importorskip(
    "verl.trainer.ppo.core_algos", reason="verl is not installed; see tests/peers/requirements.txt"
)
corrections = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper")


def close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-7) -> None:
    # verl adds 1e-8 to the count in its means
    torch.testing.assert_close(ours, theirs.to(ours.dtype), atol=tolerance, rtol=tolerance)


def ours(rollout, name: str, settings: AdvantageSettings | None = None, **more: Any) -> Advantages:
    inputs = AdvantageInputs(
        rewards=rollout.rewards,
        group_ids=rollout.group_ids,
        sample_index=rollout.sample_index,
        mask=rollout.trained,
        **more,
    )
    return compute_advantages(name, inputs, settings)


def theirs(rollout, name: str, token_rewards: Tensor | None = None, **more: Any) -> tuple[Tensor, Tensor]:
    rewards = rollout.at_last_trained if token_rewards is None else token_rewards
    estimator = core.get_adv_estimator_fn(name)
    return estimator(
        token_level_rewards=rewards.clone(),
        response_mask=rollout.mask.double(),
        index=rollout.group_ids.numpy(),
        **more,
    )


GROUP_CASES: dict[str, tuple[str, AdvantageSettings, str, dict[str, Any]]] = {
    "grpo": ("grpo", AdvantageSettings(), "grpo", {}),
    "dr_grpo": ("grpo", AdvantageSettings(std_normalization=False), "grpo", {"norm_adv_by_std_in_grpo": False}),
    "rloo": ("rloo", AdvantageSettings(), "rloo", {}),
    "rloo, vectorized": ("rloo", AdvantageSettings(), "rloo_vectorized", {}),
    "opo": ("opo", AdvantageSettings(), "opo", {}),
    "passk": ("passk", AdvantageSettings(), "grpo_passk", {"config": {"norm_adv_by_std_in_grpo": True}}),
    "passk without std": (
        "passk",
        AdvantageSettings(std_normalization=False),
        "grpo_passk",
        {"config": {"norm_adv_by_std_in_grpo": False}},
    ),
    "reinforce_plus_plus_baseline": (
        "reinforce_plus_plus_baseline",
        AdvantageSettings(),
        "reinforce_plus_plus_baseline",
        {},
    ),
}


@pytest.mark.parametrize("case", GROUP_CASES)
def test_group_estimators(case, rollout) -> None:
    name, settings, peer, more = GROUP_CASES[case]
    result = ours(rollout, name, settings)
    advantages, _ = theirs(rollout, peer, **more)
    close(rollout.unpack(result.advantages), advantages)
    assert advantages.abs().max() > 0.3


def test_grpo_vectorized_in_float32(rollout) -> None:
    advantages, _ = theirs(rollout, "grpo_vectorized")
    close(rollout.unpack(ours(rollout, "grpo").advantages), advantages, 1e-5)


def test_gdpo(rollout) -> None:
    parts = torch.stack([rollout.rewards, rollout.random(4)[:, 0] * 5, rollout.random(5)[:, 0]], dim=1)
    weights = [1.0, 0.3, 2.0]
    result = ours(rollout, "gdpo", reward_parts=parts, part_weights=torch.tensor(weights))
    batch = {"prompts": torch.zeros(len(parts), 0), "attention_mask": rollout.mask.long()}
    # verl puts the reward where the attention mask's count of tokens ends; only its sum over the sample matters
    named = {name: parts[:, k].numpy() for k, name in enumerate("abc")}
    config = {"gdpo_reward_keys": list("abc"), "gdpo_reward_weights": weights}
    advantages, _ = theirs(rollout, "gdpo", config=config, non_tensor_batch=named, batch=batch)
    close(rollout.unpack(result.advantages), advantages, 1e-5)  # verl's parts are float32


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_plus_plus(gamma, rollout) -> None:
    kl = rollout.random(1)
    # verl's discount does not count tool output (test below), so with a discount the sample with a gap is left whole.
    if gamma != 1.0:
        rollout.mask[1] = rollout.present[1]
    rewards = rollout.at_last_trained - 0.1 * kl * rollout.mask
    settings = AdvantageSettings(kl_coef=0.1, gamma=gamma)
    result = ours(rollout, "reinforce_plus_plus", settings, kl=rollout.pack(kl))
    advantages, returns = theirs(rollout, "reinforce_plus_plus", rewards, config=type("C", (), {"gamma": gamma}))
    close(rollout.unpack(result.returns), returns)
    close(rollout.unpack(result.advantages), advantages)


@pytest.mark.parametrize(("gamma", "lambd"), [(1.0, 1.0), (0.97, 0.9)])
def test_ppo(gamma, lambd, rollout) -> None:
    kl, values = rollout.random(1), rollout.random(2)
    settings = AdvantageSettings(kl_coef=0.1, gamma=gamma, lambd=lambd, whiten=True)  # verl always whitens
    result = ours(rollout, "ppo", settings, kl=rollout.pack(kl), values=rollout.pack(values))
    rewards = rollout.at_last_trained - 0.1 * kl * rollout.mask
    advantages, returns = core.compute_gae_advantage_return(rewards, values, rollout.mask.double(), gamma, lambd)
    # verl leaves numbers on untrained tokens, ours are 0 there
    close(rollout.unpack(result.advantages), torch.where(rollout.mask, advantages, 0.0))
    close(rollout.unpack(result.returns), torch.where(rollout.mask, returns, 0.0))


def test_whitening(rollout) -> None:
    values, mask = rollout.random(3), rollout.mask
    mine = whiten(values[mask], whitening_sums(values[mask]))
    close(mine, core.verl_F.masked_whiten(values, mask.double())[mask])


def test_differs_a_group_of_one_teaches_nothing(rollout) -> None:
    """verl gives it baseline 0, so its advantage is the whole reward; a lone sample has nothing to be compared with."""
    rollout.group_ids[0] = 77
    for name, peer in (("grpo", "grpo"), ("rloo", "rloo"), ("opo", "opo")):
        advantages, _ = theirs(rollout, peer)
        assert advantages[0, 0] == pytest.approx(1.0, abs=1e-5)
        mine = rollout.unpack(ours(rollout, name).advantages)
        assert (mine[0] == 0).all()
        close(mine[1:], advantages[1:])
    with pytest.raises(ValueError, match="at least 2 samples"):
        theirs(rollout, "grpo_passk", config={})
    assert (rollout.unpack(ours(rollout, "passk").advantages)[0] == 0).all()


def test_differs_equal_rewards_are_exactly_zero(rollout) -> None:
    """verl divides the rounding of the mean (of three times 0.9 in float32, say) by 1e-6: an advantage of 0.06."""
    rewards = torch.full((3,), 0.9)
    group = AdvantageInputs(rewards=rewards, group_ids=torch.zeros(3).long(), sample_index=torch.arange(3))
    assert compute_advantages("grpo", group).advantages.tolist() == [0.0, 0.0, 0.0]
    advantages, _ = core.compute_grpo_outcome_advantage(rewards[:, None], torch.ones(3, 1), np.zeros(3))
    assert float(advantages.abs().max()) == pytest.approx(0.0555, abs=1e-3)


def test_differs_discount_counts_tool_output(rollout) -> None:
    """Ours discounts by the tokens between two trained ones, verl by the trained tokens between them."""
    gamma, mask = 0.9, rollout.mask
    rollout.rewards[1] = 1.0
    result = rollout.unpack(ours(rollout, "reinforce_plus_plus", AdvantageSettings(gamma=gamma)).returns)
    _, returns = theirs(rollout, "reinforce_plus_plus", config=type("C", (), {"gamma": gamma}))
    assert mask[1].tolist() == [True, True, False, False, False, True, True, True]
    assert result[1, 0] == pytest.approx(gamma**7)
    assert returns[1, 0] == pytest.approx(gamma**4)
    others = torch.arange(len(mask)) != 1
    close(result[others], returns[others])


def test_differs_where_kl_enters_the_baseline_variant(rollout) -> None:
    """verl adds a sample's KL to its reward before the group mean; ours charges each token its own, after it."""
    kl, coef, mask = rollout.random(1), 0.1, rollout.mask
    settings = AdvantageSettings(kl_coef=coef, whiten=False)
    mine = rollout.unpack(ours(rollout, "reinforce_plus_plus_baseline", settings, kl=rollout.pack(kl)).advantages)
    plain = rollout.unpack(ours(rollout, "reinforce_plus_plus_baseline", AdvantageSettings(whiten=False)).advantages)
    close(mine, torch.where(mask, plain - coef * kl, 0.0))
    advantages, _ = theirs(rollout, "reinforce_plus_plus_baseline", rollout.at_last_trained - coef * kl * mask)
    rollout.rewards[:] = rollout.rewards - coef * (kl * mask).sum(1)
    close(rollout.unpack(ours(rollout, "reinforce_plus_plus_baseline").advantages), advantages)


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "low_var_kl", "abs", "k3+"])
def test_kl_estimators(name, rollout) -> None:
    scale = 0.5 if name.startswith("k3") else 2.0  # verl clamps k3 at 10 (test below)

    def run(estimator) -> tuple[Tensor, Tensor]:
        logprobs = rollout.random(1, scale).requires_grad_()
        value = estimator(logprobs, rollout.random(2, scale))
        (gradient,) = torch.autograd.grad(value.sum(), logprobs)
        return value.detach(), gradient

    mine = run(lambda a, b: kl_per_token(name, a, b))
    peer = run(lambda a, b: core.kl_penalty(a, b, name))
    close(mine[0], peer[0])
    close(mine[1], peer[1])


def test_differs_only_low_var_kl_is_clamped() -> None:
    """verl clamps k3 as well, and the value of k3+; in ours the name says whether it is clamped."""
    far, zero = torch.tensor([-5.0, 30.0], dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    for name in ("k3", "k3+"):
        assert core.kl_penalty(far, zero, name).tolist() == [10.0, 10.0]
        close(kl_per_token(name, far, zero), (-far).exp() - 1 + far)
    close(kl_per_token("low_var_kl", far, zero), core.kl_penalty(far, zero, "low_var_kl"))


def test_adaptive_kl() -> None:
    state, peer = AdaptiveKL(coef=0.2, target=0.1, horizon=1000.0), core.AdaptiveKLController(0.2, 0.1, 1000.0)
    for measured in (0.09, 0.3, 0.0, 0.11):
        state = update_kl_coef(state, measured, 128)
        peer.update(measured, 128)
        assert state.coef == pytest.approx(peer.value, rel=1e-12)


MODES = {
    "token-mean": Mode.PER_TOKEN,
    "seq-mean-token-mean": Mode.PER_SAMPLE,
    "seq-mean-token-sum-norm": Mode.CONSTANT,
}
LOSSES: dict[str, tuple[str, dict[str, Any], dict[str, Any], list[str]]] = {
    # verl's vanilla always has a dual clip; 1e9 turns it off
    "vanilla": ("ppo", {}, {"clip_ratio_c": 1e9}, list(MODES)),
    "dual clip": ("ppo", {"eps_clip_c": 1.6}, {"clip_ratio_c": 1.6}, list(MODES)),
    "gspo": ("gspo", {}, {}, list(MODES)),
    "cispo": ("cispo", {}, {}, list(MODES)),
    "sapo": ("sapo", {"sapo_tau_positive": 1.3, "sapo_tau_negative": 2.0}, {"tau_pos": 1.3, "tau_neg": 2.0}, []),
    # verl's range is of log ρ: [-ε, ε_high]; ours of ρ, as everywhere else
    "geo_mean": ("gmpo", {"eps_clip": 1 - math.exp(-0.1), "eps_clip_high": math.expm1(0.3)}, {}, []),
    "dppo_tv": ("dppo_tv", {"eps_clip_c": 2.5}, {"clip_ratio_c": 2.5}, list(MODES)),
}


def actor_config(mode: str, **more: Any):
    from verl.workers.config import ActorConfig

    return ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        use_dynamic_bsz=True,
        loss_agg_mode=mode,
        **{"clip_ratio_low": 0.1, "clip_ratio_high": 0.3, **more},
    )


def our_weights(rollout, mode: Mode) -> Tensor:
    samples, width = rollout.mask.shape
    denominators = Denominators(mode, float(samples), float(rollout.mask.sum()), float(width))
    lengths = trained_tokens(rollout.sample_index, samples, rollout.trained)
    return token_weights(rollout.sample_index, lengths, denominators, rollout.trained, torch.float64)


def loss_inputs(rollout, logprobs: Tensor, old: Tensor, advantages: Tensor, **more: Any) -> PolicyLossInputs:
    vectors = (rollout.pack(x) for x in (logprobs, old, advantages))
    clips = {"eps_clip": 0.1, "eps_clip_high": 0.3, "rollout_logprobs": rollout.pack(old), **more}
    return PolicyLossInputs(*vectors, sample_index=rollout.sample_index, mask=rollout.trained, **clips)


def value_and_gradient(loss: Tensor, logprobs: Tensor) -> tuple[Tensor, Tensor]:
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.detach(), gradient


def run_both(
    rollout, name: str, peer: str, mode: str, settings, peer_settings, advantages: Tensor, factor: Tensor | None = None
):
    """(loss, gradient) of ours and of verl's, on logprobs that moved by about 0.4."""
    old = rollout.logprobs(1)
    now = old + rollout.random(2, 0.4) * rollout.mask
    logprobs = now.clone().requires_grad_()
    clips = {key: value for key, value in settings.items() if key.startswith("eps_clip")}
    result = find_policy_loss(name, settings)(loss_inputs(rollout, logprobs, old, advantages, **clips))
    scale = 1.0 if factor is None else rollout.pack(factor)
    mine = value_and_gradient(weighted_sum(result.loss * scale, our_weights(rollout, MODES[mode])), logprobs)
    logprobs = now.clone().requires_grad_()
    mask, config = rollout.mask.double(), actor_config(mode, **peer_settings)
    loss, metrics = core.get_policy_loss_fn(peer)(old, logprobs, advantages, mask, mode, config, factor)
    return mine, value_and_gradient(loss, logprobs), result, metrics


@pytest.mark.parametrize("case", LOSSES)
def test_policy_losses(case, rollout) -> None:
    name, settings, peer_settings, modes = LOSSES[case]
    peer = "vanilla" if name == "ppo" else case
    advantages = torch.linspace(-2, 3, len(rollout.mask), dtype=torch.float64)[:, None].expand(rollout.mask.shape)
    for mode in modes or ["seq-mean-token-mean"]:
        # per-token factors on the sequence losses have tests of their own below
        for factor in (None,) if case in ("gspo", "geo_mean") else (None, rollout.random(5).abs()):
            mine, verls, result, metrics = run_both(
                rollout, name, peer, mode, settings, peer_settings, advantages, factor
            )
            close(mine[0], verls[0])
            close(mine[1], verls[1])
            assert verls[1].abs().max() > 1e-3
    if name != "gmpo":  # verl counts a token out of range on either side there
        clipped = result.clipped.sum() / rollout.mask.sum()
        assert metrics["actor/pg_clipfrac"] <= float(clipped) + 1e-6
        assert name == "sapo" or clipped > 0


def test_ppo_with_an_advantage_for_each_token(rollout) -> None:
    mine, verls, _, _ = run_both(
        rollout, "ppo", "vanilla", "token-mean", {"eps_clip_c": 3.0}, {"clip_ratio_c": 3.0}, rollout.random(6)
    )
    close(mine[0], verls[0])
    close(mine[1], verls[1])


def test_differs_gspo_spreads_the_gradient_over_the_sample(rollout) -> None:
    """verl gives a token the gradient of its own advantage (the paper's GSPO-token), ours the mean over its sample.

    The two are one where advantage and factor are the sample's, and always in sum over a sample.
    """
    mine, verls, _, _ = run_both(rollout, "gspo", "gspo", "seq-mean-token-mean", {}, {}, rollout.random(6))
    close(mine[0], verls[0])
    close(mine[1].sum(1), verls[1].sum(1))
    assert (mine[1] - verls[1]).abs().max() > 1e-3


def test_differs_gmpo_takes_the_mean_of_the_correction(rollout) -> None:
    """verl multiplies a sample by the geometric mean of its tokens' weights, ours by their mean."""
    advantages, factor = torch.ones(rollout.mask.shape, dtype=torch.float64), rollout.random(5).abs() + 0.1
    settings = {"eps_clip": 1 - math.exp(-0.1), "eps_clip_high": math.expm1(0.3)}
    mode, mask = "seq-mean-token-mean", rollout.mask
    _, _, plain, _ = run_both(rollout, "gmpo", "geo_mean", mode, settings, {}, advantages)
    mine, verls, _, _ = run_both(rollout, "gmpo", "geo_mean", mode, settings, {}, advantages, factor)
    per_sample, tokens = rollout.unpack(plain.loss.detach())[:, 0], mask.sum(1)
    close(mine[0], (per_sample * (factor * mask).sum(1) / tokens).mean())
    close(verls[0], (per_sample * ((factor.log() * mask).sum(1) / tokens).exp()).mean(), 1e-7)


def test_differs_a_sample_without_trained_tokens_counts_in_the_batch(rollout) -> None:
    """Ours divides by the global batch size; verl does too where it is given one, else by the samples with tokens."""
    rollout.mask[3] = False
    advantages = torch.ones(rollout.mask.shape, dtype=torch.float64)
    mine, verls, _, _ = run_both(rollout, "cispo", "cispo", "seq-mean-token-mean", {}, {}, advantages)
    close(mine[0] * 10 / 9, verls[0])


def test_differs_a_far_ratio_is_not_cut() -> None:
    """verl clamps log ρ to ±20; ours is exact up to 60 (float32; 600 here) and finite beyond."""
    one = torch.ones(1, 1, dtype=torch.float64)
    inputs = PolicyLossInputs(25.0 * one[0], 0.0 * one[0], -one[0], torch.tensor([0]))
    config = actor_config("token-mean", clip_ratio_c=1e300)
    loss, _ = core.compute_policy_loss_vanilla(0.0 * one, 25.0 * one, -one, one, "token-mean", config)
    assert float(find_policy_loss("ppo")(inputs).loss) == pytest.approx(math.exp(25))
    assert float(loss) == pytest.approx(math.exp(20))


def test_value_loss_is_twice_theirs(rollout) -> None:
    """verl has the factor ½, ours has not."""
    values, old, returns, mask = rollout.random(1), rollout.random(2), rollout.random(3), rollout.mask
    packed = (rollout.pack(x) for x in (values, old, returns))
    result = value_loss(*packed, 0.2, rollout.trained)
    loss, clipped = core.compute_value_loss(values, returns, old, mask.double(), 0.2)
    close(result.loss.sum() / mask.sum(), 2 * loss)
    assert float(result.clipped.sum() / mask.sum()) == pytest.approx(float(clipped))


def both_corrections(rollout, settings: CorrectionSettings, **peer: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(our weights, our kept, their weights, their mask), [S, L]."""
    old, engine = rollout.logprobs(1), rollout.logprobs(1) + rollout.random(2, 0.5)
    tokens = (rollout.pack(old), rollout.pack(engine))
    mine = correct(*tokens, rollout.sample_index, settings, rollout.trained)
    proto, mask, _ = corrections.compute_rollout_correction_and_rejection_mask(
        old, engine, rollout.mask.double(), **peer
    )
    weights = rollout.mask.double() if proto is None else proto.batch["rollout_is_weights"]
    return rollout.unpack(mine.weights), rollout.unpack(mine.kept), weights, mask.bool()


CORRECTION_CASES: dict[str, tuple[CorrectionSettings, dict[str, Any]]] = {
    "tis": (CORRECTIONS["tis"], {"rollout_is": "token", "rollout_is_threshold": 2.0}),
    "icepop": (CORRECTIONS["icepop"], {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}),
    "sequence": (CORRECTIONS["sequence"], {"rollout_is": "sequence", "rollout_is_threshold": 2.0}),
    "sequence, masked": (
        CorrectionSettings(Level.SEQUENCE, Bound.MASK, 0.5, 2.0),
        {"rollout_is": "sequence", "rollout_is_threshold": "0.5_2.0"},
    ),
    "batch mean 1": (
        CorrectionSettings(batch_mean_one=True),
        {"rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_is_batch_normalize": True},
    ),
}


@pytest.mark.parametrize("case", CORRECTION_CASES)
def test_correction_weights(case, rollout) -> None:
    settings, peer = CORRECTION_CASES[case]
    mine, _, weights, _ = both_corrections(rollout, settings, **peer)
    close(mine, weights, 1e-8)
    assert len(weights.unique()) > 4


@pytest.mark.parametrize(
    ("level", "option"),
    [(Level.TOKEN, "token_k1"), (Level.SEQUENCE, "seq_sum_k1"), (Level.GEOMETRIC, "seq_mean_k1")],
)
def test_rejection(level, option, rollout) -> None:
    """verl bounds the engine's probability over the trainer's, ours the other way round: [a, b] there is [1/b, 1/a]."""
    settings = CorrectionSettings(reject_level=level, reject_low=1 / 1.4, reject_high=1 / 0.8)
    peer = {"rollout_is": "token", "rollout_rs": option, "rollout_rs_threshold": "0.8_1.4"}
    mine, kept, weights, mask = both_corrections(rollout, settings, **peer)
    assert torch.equal(kept, mask)
    close(mine, weights * mask)
    assert 0 < mask.sum() < rollout.mask.sum()


def test_differs_rejection_leaves_the_denominator(rollout) -> None:
    """verl takes rejected tokens out of the mask, and so out of the token count; in ours they weigh 0 and count."""
    settings = CorrectionSettings(reject_level=Level.TOKEN, reject_low=0.8, reject_high=1.25)
    mine, kept, _, mask = both_corrections(rollout, settings, rollout_rs="token_k1", rollout_rs_threshold="0.8_1.25")
    old, advantages = rollout.logprobs(1), rollout.random(6)
    result = find_policy_loss("ppo")(loss_inputs(rollout, old, old, advantages))
    ones = torch.where(rollout.pack(kept), 1.0, 0.0)
    our_loss = weighted_sum(result.loss * ones, our_weights(rollout, Mode.PER_TOKEN))
    loss, _ = core.compute_policy_loss_vanilla(
        old, old, advantages, mask.double(), "token-mean", actor_config("token-mean")
    )
    close(our_loss * rollout.mask.sum() / mask.sum(), loss)
    assert mine[kept].min() > 0


def test_differs_batch_mean_one_counts_tokens(rollout) -> None:
    """With a weight for each sample verl divides by the mean over samples, ours by the mean over tokens."""
    settings = CorrectionSettings(Level.SEQUENCE, Bound.TRUNCATE, 0.0, 2.0, batch_mean_one=True)
    peer = {"rollout_is": "sequence", "rollout_is_threshold": 2.0, "rollout_is_batch_normalize": True}
    mine, _, weights, _ = both_corrections(rollout, settings, **peer)
    assert float(mine[rollout.mask].mean()) == pytest.approx(1.0)
    assert float(weights.amax(1).mean()) == pytest.approx(1.0)
    close(mine / mine.max(), weights / weights.max(), 1e-8)


def test_decoupled_is_their_vanilla_loss_with_weights(rollout) -> None:
    """The ratio is to the policy before the step (proximal), the weight from the engine's (behaviour) to that one."""
    engine = rollout.logprobs(1)
    before = engine + rollout.random(2, 0.5)
    now = (before + rollout.random(3, 0.4)).requires_grad_()
    advantages, mask = rollout.random(6), rollout.mask.double()
    settings = CorrectionSettings(Level.TOKEN, Bound.TRUNCATE, high=2.0)
    tokens = (rollout.pack(before), rollout.pack(engine))
    factor = correct(*tokens, rollout.sample_index, settings, rollout.trained).weights
    result = find_policy_loss("ppo")(loss_inputs(rollout, now, before, advantages))
    mine = value_and_gradient(weighted_sum(result.loss * factor, our_weights(rollout, Mode.PER_TOKEN)), now)
    weights, _ = corrections.compute_rollout_correction_weights(before - engine, mask, "token", 2.0)
    config = actor_config("token-mean", clip_ratio_c=1e9)
    loss, _ = core.compute_policy_loss_vanilla(before, now, advantages, mask, "token-mean", config, weights)
    verls = value_and_gradient(loss, now)
    close(mine[0], verls[0])
    close(mine[1], verls[1])
