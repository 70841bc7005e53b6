"""Policy losses, the value loss and the plain language-model loss, all per token.

A loss here is one number per token; `reduce.weighted_sum` makes the loss of a step from it. The sequence-level ones
(`gspo`, `gmpo`, and the `opsm` mask) sum over a sample's trained tokens, so a micro-batch must hold whole samples.

Axis: `T` tokens of many samples one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from treadle import catalog
from treadle.algorithms.reduce import sample_means
from treadle.algorithms.segments import capped_exp, num_samples_of, where_trained


@dataclass(frozen=True, slots=True, eq=False)
class PolicyLossInputs:
    """What a policy loss may read. `mask` is True on trained tokens; None trains all of them.

    Only `logprobs` gets a gradient. `rollout_logprobs` are always there in training. A known `num_samples` saves a
    synchronisation with the GPU.
    """

    logprobs: Float[Tensor, " T"]
    old_logprobs: Float[Tensor, " T"]
    advantages: Float[Tensor, " T"]
    sample_index: Int64[Tensor, " T"]  # ascending
    mask: Bool[Tensor, " T"] | None = None
    num_samples: int | None = None
    eps_clip: float = 0.2  # how far below 1 the ratio may go; no lower bound from 1 on
    eps_clip_high: float | None = None  # how far above 1; eps_clip where None
    eps_clip_c: float | None = None  # bound of the loss if the advantage is negative (dual clip)
    rollout_logprobs: Float[Tensor, " T"] | None = None  # of the policy that drew the tokens

    @property
    def high(self) -> float:
        return self.eps_clip if self.eps_clip_high is None else self.eps_clip_high

    @property
    def samples(self) -> int:
        return num_samples_of(self.sample_index) if self.num_samples is None else self.num_samples


@dataclass(frozen=True, slots=True, eq=False)
class PolicyLoss:
    """What a policy loss returns: the loss per token, 0 on untrained tokens.

    `clipped` is True if a trained token's gradient was cut (for cispo: bounded) because its ratio had left the trust region.
    `ratio` is the probability ratio that the loss used, without gradient, 1 on untrained tokens.
    """

    loss: Float[Tensor, " T"]
    clipped: Bool[Tensor, " T"]
    ratio: Float[Tensor, " T"]


PolicyLossFn = Callable[[PolicyLossInputs], PolicyLoss]


def ppo(inputs: PolicyLossInputs) -> PolicyLoss:
    """Return PPO's loss: `max(-ρA, -clip(ρ, 1-ε, 1+ε_high) A)`; with `eps_clip_c`, at most `-c·A` if A < 0.

    Source: Schulman et al. 2017, eq. 7 (arXiv 1707.06347); dual clip: Ye et al. 2019, eq. 5 (arXiv 1912.09729);
    `ε_high`: DAPO 2025, eq. 10 (arXiv 2503.14476).

    >>> one = torch.tensor([1.0])
    >>> ppo(PolicyLossInputs(torch.tensor([0.5]), one * 0, one, torch.tensor([0]))).loss      # ratio 1.65
    tensor([-1.2000])
    """
    return _clipped_surrogate(_log_ratio(inputs), inputs)


def gspo(inputs: PolicyLossInputs) -> PolicyLoss:
    """Return GSPO's loss: one ratio for the sequence, `log ρ = Σ m (lp - lp_old) / Σ m`, then PPO's clip.

    The gradient goes through the mean to every token of the sample. Needs whole samples.
    Source: Zheng et al. 2025, eq. 5 to 7 (arXiv 2507.18071).
    """
    return _clipped_surrogate(_sample_mean(_log_ratio(inputs), inputs), inputs)


def gmpo(inputs: PolicyLossInputs) -> PolicyLoss:
    """Return GMPO's loss: `-A` times the geometric mean over the sample of its tokens' clipped ratios.

    A token's ratio is clipped if that lowers the objective: above `1+ε_high` for A ≥ 0, below `1-ε` for A < 0.
    The paper writes its range as exp(±0.4): that is `eps_clip` 0.33, `eps_clip_high` 0.49. Needs whole samples.
    Source: Zhao et al. 2025, "Geometric-Mean Policy Optimization", eq. 4 (arXiv 2507.20673).
    """
    log_ratio, advantages = _log_ratio(inputs), where_trained(inputs.advantages, inputs.mask)
    low = math.log1p(-inputs.eps_clip) if inputs.eps_clip < 1 else -math.inf
    high = math.log1p(inputs.high)
    clipped = _left_region(log_ratio, low, high, advantages)
    bounded = torch.where(clipped, log_ratio.detach().clamp(low, high), log_ratio)
    ratio = capped_exp(_sample_mean(bounded, inputs))
    return _finish(-advantages * ratio, clipped, ratio, inputs)


def cispo(inputs: PolicyLossInputs) -> PolicyLoss:
    """Return CISPO's loss: `-sg(clip(ρ, 1-ε, 1+ε_high)) · A · lp`.

    The clip bounds a token's weight; no token loses its gradient. The paper has no lower bound: ε = 1.
    Source: MiniMax-M1 2025, eq. 4 and 5 (arXiv 2506.13585).
    """
    ratio = capped_exp(_log_ratio(inputs).detach())
    weight = ratio.clamp(1.0 - inputs.eps_clip, 1.0 + inputs.high)
    loss = -weight * inputs.advantages * where_trained(inputs.logprobs, inputs.mask)
    return _finish(loss, weight != ratio, ratio, inputs)


def sapo(inputs: PolicyLossInputs, *, sapo_tau_positive: float, sapo_tau_negative: float) -> PolicyLoss:
    """Return SAPO's loss: a soft gate instead of a clip, `-(4/τ) · sigmoid(τ (ρ - 1)) · A`, τ by the sign of A.

    Nothing is ever clipped. Source: Gao et al. 2025, "Soft Adaptive Policy Optimization" (arXiv 2511.20347).
    """
    ratio = capped_exp(_log_ratio(inputs))
    tau = torch.where(inputs.advantages > 0, sapo_tau_positive, sapo_tau_negative).to(ratio.dtype)
    loss = -(4.0 / tau) * torch.sigmoid(tau * (ratio - 1.0)) * inputs.advantages
    return _finish(loss, torch.zeros_like(ratio, dtype=torch.bool), ratio, inputs)


def dppo_tv(inputs: PolicyLossInputs) -> PolicyLoss:
    """Return DPPO's loss with total variation: the trust region is on probabilities, not on their ratio.

    A token is kept if A > 0 and `p - p_roll ≤ ε_high`, or A ≤ 0 and `p - p_roll ≥ -ε`. p_roll is its probability under the
    policy that drew it (`rollout_logprobs`): the engine's rounding and older weights count as distance, so tokens are dropped
    in the first step of a rollout too. The loss of a kept token is `-A · sg(min(ρ, c)) · lp` with c = `eps_clip_c`, 20 unless
    set; ρ is the ratio to the trainer's old policy, as in the other losses.
    Source: "Rethinking the Trust Region in LLM Reinforcement Learning" 2026 (arXiv 2602.04879).
    """
    assert inputs.rollout_logprobs is not None, "dppo_tv compares with the rollout policy: give rollout_logprobs"
    logprobs = where_trained(inputs.logprobs, inputs.mask)
    ratio = capped_exp(_log_ratio(inputs).detach())
    change = logprobs.detach().exp() - where_trained(inputs.rollout_logprobs, inputs.mask).exp()
    kept = torch.where(inputs.advantages > 0, change <= inputs.high, change >= -inputs.eps_clip)
    weight = torch.where(kept, ratio.clamp(max=20.0 if inputs.eps_clip_c is None else inputs.eps_clip_c), 0.0)
    return _finish(-inputs.advantages * weight * logprobs, ~kept, ratio, inputs)


def find_policy_loss(name: str, settings: Mapping[str, Any] | None = None) -> PolicyLossFn:
    """Return the policy loss of this name, with its own parameters as in `settings`.

    Raises `ConfigError` if there is none.
    """
    found: PolicyLossFn = catalog.find("policy_loss", name, catalog.POLICY_LOSSES).load(settings)
    return found


POLICY_LOSSES: Mapping[str, PolicyLossFn] = {name: find_policy_loss(name) for name in catalog.POLICY_LOSSES}
"""Every policy loss by its name, with the defaults of its parameters."""


def opsm_mask(inputs: PolicyLossInputs, delta: float) -> Bool[Tensor, " T"]:
    """Return the off-policy sequence mask: False on tokens with A < 0 in a sample that drifted too far.

    Too far is `mean_m(lp_old - lp) > delta` over the sample's trained tokens. Multiply the policy loss by it and leave the
    denominator alone. Needs whole samples.

    Args:
        inputs: of a policy loss.
        delta: nats per token.
    Returns:
        bool [T].
    Source: DeepSeek-V3.2 2025, section 3.1 (arXiv 2512.02556).
    """
    drift = -_log_ratio(inputs).detach()
    return ~((inputs.advantages < 0) & (_sample_mean(drift, inputs) > delta))


@dataclass(frozen=True, slots=True, eq=False)
class ValueLoss:
    """Loss per token, 0 on untrained tokens; `clipped` is True if the clipped error was the larger one."""

    loss: Float[Tensor, " T"]
    clipped: Bool[Tensor, " T"]


def value_loss(
    values: Float[Tensor, " T"],
    old_values: Float[Tensor, " T"],
    returns: Float[Tensor, " T"],
    value_clip: float,
    mask: Bool[Tensor, " T"] | None = None,
) -> ValueLoss:
    """Return `max((V_clip - ret)², (V - ret)²)`, `V_clip = V_old + clip(V - V_old, ±value_clip)`; there is no factor ½.

    Args:
        values: float [T], the critic's now.
        old_values: float [T], the critic's before the step.
        returns: float [T], what they should have been.
        value_clip: above 0.
        mask: bool [T], True on trained tokens; None trains all.
    Returns:
        The loss float [T], and where the error was clipped, bool [T].

    >>> two = torch.tensor([2.0])
    >>> value_loss(two, two * 0, two, value_clip=0.5).loss
    tensor([2.2500])
    """
    values, old_values, returns = (where_trained(x, mask) for x in (values, old_values, returns))
    change = values - old_values
    bounded = old_values + change.clamp(-value_clip, value_clip)
    plain, limited = (values - returns).square(), (bounded - returns).square()
    clipped = (limited > plain) & (change.abs() > value_clip)  # within bounds the two differ by rounding
    return ValueLoss(torch.where(clipped, limited, plain), clipped)


def sft(logprobs: Float[Tensor, " T"], mask: Bool[Tensor, " T"] | None = None) -> Float[Tensor, " T"]:
    """Return `-lp` on trained tokens, 0 elsewhere."""
    return -where_trained(logprobs, mask)


def _log_ratio(inputs: PolicyLossInputs) -> Tensor:
    return where_trained(inputs.logprobs, inputs.mask) - where_trained(inputs.old_logprobs, inputs.mask)


def _sample_mean(values: Tensor, inputs: PolicyLossInputs) -> Tensor:
    """Return the mean over a sample's trained tokens, on each of its tokens."""
    return sample_means(values, inputs.sample_index, inputs.samples, inputs.mask)[inputs.sample_index]


def _left_region(ratio: Tensor, low: float, high: float, advantages: Tensor) -> Tensor:
    """Return True where the ratio left [low, high] on the side that the update pushes it to."""
    return torch.where(advantages >= 0, ratio > high, ratio < low)


def _clipped_surrogate(log_ratio: Tensor, inputs: PolicyLossInputs) -> PolicyLoss:
    ratio, advantages = capped_exp(log_ratio), where_trained(inputs.advantages, inputs.mask)
    low, high = 1.0 - inputs.eps_clip, 1.0 + inputs.high
    clipped = _left_region(ratio, low, high, advantages) & (advantages != 0)
    loss = -torch.where(clipped, ratio.detach().clamp(low, high), ratio) * advantages
    if inputs.eps_clip_c is not None:
        bound = -inputs.eps_clip_c * advantages
        over = (advantages < 0) & (loss > bound)
        loss, clipped = torch.where(over, bound, loss), clipped | over
    return _finish(loss, clipped, ratio, inputs)


def _finish(loss: Tensor, clipped: Tensor, ratio: Tensor, inputs: PolicyLossInputs) -> PolicyLoss:
    if inputs.mask is None:
        return PolicyLoss(loss, clipped, ratio.detach())
    ratio = torch.where(inputs.mask, ratio.detach(), 1.0)
    return PolicyLoss(torch.where(inputs.mask, loss, 0.0), clipped & inputs.mask, ratio)
