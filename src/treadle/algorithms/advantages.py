"""From rewards to an advantage per token: the estimators by name, and one function that runs any of them.

An estimator is two steps. `shape` turns the rewards of a batch into one number per sample (within groups known by id),
`spread` lays it over the tokens. Then, in this order: the distillation term, and whitening.

Axes: `S` samples, `P` parts of a reward, `T` tokens of many samples one after the other.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from treadle import catalog
from treadle.algorithms.gae import discounted_returns, gae, last_of_sample
from treadle.algorithms.reduce import trained_tokens
from treadle.algorithms.segments import safe_divide, where_trained
from treadle.errors import ConfigError

SumOverRanks = Callable[[Tensor], Tensor]
"""Adds a small tensor over all ranks and returns the sum; the identity if there is one rank."""


@dataclass(frozen=True, slots=True, eq=False)
class AdvantageInputs:
    """The rewards of a whole rollout and the tokens they belong to; only whole groups, in any order.

    `mask` is True on trained tokens; None trains all of them. `kl`, `values`, `reward_parts` and `part_weights` are read by
    the estimators whose traits say so, the last two by on-policy distillation.
    """

    rewards: Float[Tensor, " S"]
    group_ids: Int64[Tensor, " S"]
    sample_index: Int64[Tensor, " T"]  # ascending
    mask: Bool[Tensor, " T"] | None = None
    trajectory_ids: Int64[Tensor, " S"] | None = None
    reward_parts: Float[Tensor, "S P"] | None = None
    part_weights: Float[Tensor, " P"] | None = None
    kl: Float[Tensor, " T"] | None = None  # KL of policy and reference, for the reward
    values: Float[Tensor, " T"] | None = None  # the critic's
    student_logprobs: Float[Tensor, " T"] | None = None
    teacher_logprobs: Float[Tensor, " T"] | None = None


@dataclass(frozen=True, slots=True)
class AdvantageSettings:
    """The numbers an estimator is run with; `whiten` None leaves it to the estimator."""

    std_normalization: bool = True
    whiten: bool | None = None
    kl_coef: float = 0.0
    gamma: float = 1.0
    lambd: float = 1.0
    opd_kl_coef: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Advantages:
    """`advantages` and `returns` are 0 on untrained tokens; `shaped` is the shaped reward of each sample."""

    advantages: Float[Tensor, " T"]
    returns: Float[Tensor, " T"]
    shaped: Float[Tensor, " S"]


ShapeFn = Callable[[AdvantageInputs, AdvantageSettings], Float[Tensor, " S"]]
SpreadFn = Callable[
    [Float[Tensor, " S"], AdvantageInputs, AdvantageSettings], tuple[Float[Tensor, " T"], Float[Tensor, " T"]]
]
"""(shaped rewards, inputs, settings) → (advantages, returns), not yet whitened; untrained tokens are zeroed later."""


@dataclass(frozen=True)
class Estimator(catalog.Traits):
    """One way to turn rewards into advantages; your own may be given in place of a name.

    `shape` reads whole groups, and of the tokens only which are trained. `spread` reads what models say of each token, and
    groups may be in parts.
    """

    name: str
    shape: ShapeFn
    spread: SpreadFn
    source: str = ""


def compute_advantages(
    estimator: Estimator | str,
    inputs: AdvantageInputs,
    settings: AdvantageSettings | None = None,
    sum_over_ranks: SumOverRanks | None = None,
) -> Advantages:
    """Return the advantages and returns of a rollout by this estimator.

    Args:
        estimator: its name, or your own.
        inputs: whole groups.
        settings: numbers for the estimator; the defaults if None.
        sum_over_ranks: adds a small tensor over all ranks, for whitening.
    Raises:
        ConfigError: if an input that the estimator needs is missing, or a setting is given that it does not read.

    >>> inputs = AdvantageInputs(
    ...     rewards=torch.tensor([1.0, 0.0]), group_ids=torch.tensor([3, 3]), sample_index=torch.tensor([0, 0, 1])
    ... )
    >>> compute_advantages("rloo", inputs).advantages.tolist()
    [1.0, 1.0, -1.0]
    """
    settings = AdvantageSettings() if settings is None else settings
    rule = find_estimator(estimator) if isinstance(estimator, str) else estimator
    _check(_SHAPE_NEEDS + _SPREAD_NEEDS, rule, inputs, settings)
    return spread_advantages(rule, shape_rewards(rule, inputs, settings), inputs, settings, sum_over_ranks)


def shape_rewards(
    rule: Estimator, inputs: AdvantageInputs, settings: AdvantageSettings | None = None
) -> Float[Tensor, " S"]:
    """Return one shaped reward per sample, from rewards, ids and lengths alone: the first half of `compute_advantages`.

    Groups must be whole. What models say of tokens (`kl`, `values`, logprobs) is withheld: with several ranks, the driver
    shapes rewards before any model has run.

    Returns:
        float [S].
    """
    settings = AdvantageSettings() if settings is None else settings
    _check(_SHAPE_NEEDS, rule, inputs, settings)
    known = replace(inputs, kl=None, values=None, student_logprobs=None, teacher_logprobs=None)
    return rule.shape(known, settings)


def spread_advantages(
    rule: Estimator,
    shaped: Float[Tensor, " S"],
    inputs: AdvantageInputs,
    settings: AdvantageSettings | None = None,
    sum_over_ranks: SumOverRanks | None = None,
) -> Advantages:
    """Lay shaped rewards over the tokens, distil and whiten: the second half of `compute_advantages`.

    Groups may be spread over ranks.

    Args:
        shaped: float [S], from `shape_rewards`.
    """
    settings = AdvantageSettings() if settings is None else settings
    _check(_SPREAD_NEEDS, rule, inputs, settings)
    advantages, returns = rule.spread(shaped, inputs, settings)
    if settings.opd_kl_coef and inputs.student_logprobs is not None and inputs.teacher_logprobs is not None:
        advantages = advantages - settings.opd_kl_coef * (inputs.student_logprobs - inputs.teacher_logprobs)
    advantages = where_trained(advantages, inputs.mask)
    if rule.whitens if settings.whiten is None else settings.whiten:
        sums = whitening_sums(advantages, inputs.mask)
        advantages = whiten(advantages, sums if sum_over_ranks is None else sum_over_ranks(sums), inputs.mask)
    return Advantages(advantages, where_trained(returns, inputs.mask), shaped)


def find_estimator(name: str, settings: Mapping[str, Any] | None = None) -> Estimator:
    """Return the estimator of this name, with its own parameters as in `settings`; raise `ConfigError` if there is none."""
    record = catalog.find("advantage_estimator", name, catalog.ESTIMATORS)
    traits = {trait.name: getattr(record, trait.name) for trait in fields(catalog.Traits)}
    return Estimator(name, _by_names(record.load(settings)), record.load_spread(), record.source, **traits)


def _by_names(function: Callable[..., Tensor]) -> ShapeFn:
    """Return a shaping function of inputs and settings that passes on what `function` names as its arguments."""
    names = inspect.signature(function).parameters

    def shape(inputs: AdvantageInputs, settings: AdvantageSettings) -> Tensor:
        parts = (inputs, settings)
        known = {f.name: getattr(part, f.name) for part in parts for f in fields(part) if f.name in names}
        if "lengths" in names:
            known["lengths"] = trained_tokens(inputs.sample_index, inputs.rewards.numel(), inputs.mask)
        return function(**known)

    return shape


_SHAPE_NEEDS = ("reward_parts", "part_weights")
_SPREAD_NEEDS = ("kl", "values", "student_logprobs", "teacher_logprobs")


def _check(names: tuple[str, ...], rule: Estimator, inputs: AdvantageInputs, settings: AdvantageSettings) -> None:
    """Raise `ConfigError` if a setting is not read, or one of these inputs is needed and missing."""
    if settings.kl_coef and not rule.per_token_reward:
        raise ConfigError(
            f"kl_coef {settings.kl_coef} does nothing with advantage_estimator {rule.name!r}; use use_kl_loss instead"
        )
    opd = settings.opd_kl_coef != 0
    needed = {
        "kl": settings.kl_coef != 0,
        "values": rule.needs_values,
        **dict.fromkeys(("reward_parts", "part_weights"), rule.needs_parts),
        **dict.fromkeys(("student_logprobs", "teacher_logprobs"), opd),
    }
    missing = [name for name in names if needed[name] and getattr(inputs, name) is None]
    if missing:
        raise ConfigError(f"advantage_estimator {rule.name!r} needs {', '.join(missing)} with these settings")


def whitening_sums(values: Float[Tensor, " T"], mask: Bool[Tensor, " T"] | None = None) -> Float[Tensor, " 3"]:
    """Return count, sum and sum of squares over the trained tokens, float64 [3]; add those of all ranks, then `whiten`."""
    kept = (values if mask is None else values[mask]).to(torch.float64)
    count = torch.full((), float(kept.numel()), dtype=torch.float64, device=values.device)
    return torch.stack((count, kept.sum(), kept.square().sum()))


def whiten(
    values: Float[Tensor, " T"], sums: Float[Tensor, " 3"], mask: Bool[Tensor, " T"] | None = None
) -> Float[Tensor, " T"]:
    """Return `(A - μ) · rsqrt(σ² · N / (N - 1) + 1e-8)` on trained tokens, 0 elsewhere; a single token becomes 0.

    Args:
        values: float [T].
        sums: float64 [3], `whitening_sums` of all ranks added up.
        mask: bool [T], True on trained tokens; None trains all.

    >>> values = torch.tensor([1.0, 3.0])
    >>> whiten(values, whitening_sums(values)).tolist()
    [-0.7071067690849304, 0.7071067690849304]
    """
    count, total, squares = sums.unbind()
    mean = safe_divide(total, count)
    spread = (squares - total * mean).clamp(min=0.0)
    variance = safe_divide(spread, (count - 1.0).clamp(min=0.0))
    whitened = (values.to(torch.float64) - mean) * torch.rsqrt(variance + 1e-8)
    return where_trained(whitened.to(values.dtype), mask)


def broadcast(
    shaped: Float[Tensor, " S"], inputs: AdvantageInputs, settings: AdvantageSettings
) -> tuple[Float[Tensor, " T"], Float[Tensor, " T"]]:
    """Return the shaped reward of each sample on its tokens, as advantages and as returns."""
    tokens = shaped[inputs.sample_index]
    return tokens, tokens


def broadcast_minus_kl(
    shaped: Float[Tensor, " S"], inputs: AdvantageInputs, settings: AdvantageSettings
) -> tuple[Float[Tensor, " T"], Float[Tensor, " T"]]:
    """Return `R - kl_coef · KL_t` as advantages and as returns."""
    tokens = shaped[inputs.sample_index] + _kl_rewards(shaped, inputs, settings)
    return tokens, tokens


def returns_to_go(
    shaped: Float[Tensor, " S"], inputs: AdvantageInputs, settings: AdvantageSettings
) -> tuple[Float[Tensor, " T"], Float[Tensor, " T"]]:
    """Return `G_t = r_t + γ G_{t+1}` as advantages and as returns.

    The reward is on the last trained token and -kl_coef · KL on all trained ones.
    """
    rewards = token_rewards(shaped, inputs, settings)
    tokens = discounted_returns(rewards, inputs.sample_index, settings.gamma)
    return tokens, tokens


def critic_advantages(
    shaped: Float[Tensor, " S"], inputs: AdvantageInputs, settings: AdvantageSettings
) -> tuple[Float[Tensor, " T"], Float[Tensor, " T"]]:
    """Return generalised advantages (`gae`) of the token rewards, and the critic's targets."""
    assert inputs.values is not None
    rewards = token_rewards(shaped, inputs, settings)
    return gae(rewards, inputs.values, inputs.sample_index, inputs.mask, settings.gamma, settings.lambd)


def token_rewards(
    shaped: Float[Tensor, " S"], inputs: AdvantageInputs, settings: AdvantageSettings
) -> Float[Tensor, " T"]:
    """Return `-kl_coef · KL_t` on each trained token, plus the sample's reward on its last trained one; 0 elsewhere."""
    rewards = _kl_rewards(shaped, inputs, settings)
    if inputs.mask is None:
        last = last_of_sample(inputs.sample_index)
    else:
        chosen = inputs.mask.nonzero().squeeze(1)
        ends = last_of_sample(inputs.sample_index[chosen])
        last = torch.zeros_like(inputs.mask).index_copy(0, chosen, ends)
    return where_trained(rewards + torch.where(last, shaped[inputs.sample_index], 0.0), inputs.mask)


def _kl_rewards(shaped: Tensor, inputs: AdvantageInputs, settings: AdvantageSettings) -> Tensor:
    if settings.kl_coef == 0 or inputs.kl is None:
        return shaped.new_zeros(inputs.sample_index.shape)
    return -settings.kl_coef * where_trained(inputs.kl, inputs.mask)


ESTIMATORS: Mapping[str, Estimator] = {name: find_estimator(name) for name in catalog.ESTIMATORS}
"""Every estimator by its name in a recipe (`advantage_estimator`)."""
