"""From rewards to an advantage per token: one table of estimators, one function that runs any of them.

An estimator is two steps. `shape` turns the rewards of a batch into one number per sample (within groups known by
id), `spread` lays it over the tokens. Then, in this order: the distillation term, and whitening.

Axes: `S` samples, `P` parts of a reward, `T` tokens of many samples one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from treadle.algorithms import shaping
from treadle.algorithms.gae import discounted_returns, gae, last_of_sample
from treadle.algorithms.reduce import trained_tokens
from treadle.algorithms.segments import safe_divide, where_trained
from treadle.errors import ConfigError

SumOverRanks = Callable[[Tensor], Tensor]
"""Adds a small tensor over all ranks and returns the sum; the identity where there is one rank."""


@dataclass(frozen=True, slots=True, eq=False)
class AdvantageInputs:
    """A whole rollout's rewards and the tokens they belong to; only whole groups, in any order.

    `mask` is True on trained tokens (all of them where it is None). `positions` is each token's place in its
    sequence, needed only where a discount meets tokens that were left out. `kl` and `values` are read by the
    estimators that say so, `reward_parts` and `part_weights` by gdpo, the last two by on-policy distillation.
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
    positions: Int64[Tensor, " T"] | None = None
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


@dataclass(frozen=True, slots=True)
class Estimator:
    """One way to turn rewards into advantages; your own may be given wherever a name may.

    `shape` sees whole groups, and of the tokens only which are trained; `spread` sees what models say of each token,
    and groups that may be in parts.
    """

    name: str
    shape: ShapeFn
    spread: SpreadFn
    source: str
    needs_group: bool = False  # compares samples of a group: it needs more than one of them
    per_token_reward: bool = False  # reads `kl` and `kl_coef`
    uses_gamma: bool = False
    needs_values: bool = False
    needs_parts: bool = False  # reads `reward_parts`
    whitens: bool = False
    divides_by_mean: bool = False  # by that of the group, so rewards must not be negative
    policy_loss: str = "ppo"  # the loss it is used with unless another is asked for


def compute_advantages(
    estimator: Estimator | str,
    inputs: AdvantageInputs,
    settings: AdvantageSettings | None = None,
    sum_over_ranks: SumOverRanks | None = None,
) -> Advantages:
    """Advantages and returns of a rollout by this estimator.

    Groups must be whole in `inputs`; whitening sums over ranks through `sum_over_ranks`. Raises `ConfigError` where
    an input the estimator needs is missing, or a setting is given that it does not read.

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
    """The first half of `compute_advantages`: one number per sample, from rewards, ids and lengths alone.

    Groups must be whole. What models say of tokens (`kl`, `values`, logprobs) is withheld: where ranks train, the
    driver shapes rewards before any model is asked.
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
    """The second half: shaped rewards laid over the tokens, distilled, whitened. Groups may be spread over ranks."""
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


def find_estimator(name: str) -> Estimator:
    """The estimator of this name; `ConfigError` where there is none."""
    if name not in ESTIMATORS:
        raise ConfigError(f"advantage_estimator {name!r} is unknown; choose one of {', '.join(ESTIMATORS)}")
    return ESTIMATORS[name]


_SHAPE_NEEDS = ("reward_parts", "part_weights")
_SPREAD_NEEDS = ("kl", "values", "student_logprobs", "teacher_logprobs")


def _check(names: tuple[str, ...], rule: Estimator, inputs: AdvantageInputs, settings: AdvantageSettings) -> None:
    """Raise `ConfigError` where a setting is not read, or one of these inputs is needed and missing."""
    if settings.kl_coef and not rule.per_token_reward:
        raise ConfigError(
            f"kl_coef {settings.kl_coef} does nothing with advantage_estimator {rule.name!r}; use use_kl_loss instead"
        )
    opd = settings.opd_kl_coef != 0
    needed = {
        "kl": settings.kl_coef != 0,
        "values": rule.needs_values,
        "reward_parts": rule.needs_parts,
        "part_weights": rule.needs_parts,
        "student_logprobs": opd,
        "teacher_logprobs": opd,
    }
    given = {
        "kl": inputs.kl,
        "values": inputs.values,
        "reward_parts": inputs.reward_parts,
        "part_weights": inputs.part_weights,
        "student_logprobs": inputs.student_logprobs,
        "teacher_logprobs": inputs.teacher_logprobs,
    }
    missing = [name for name in needed if name in names and needed[name] and given[name] is None]
    if missing:
        raise ConfigError(f"advantage_estimator {rule.name!r} needs {', '.join(missing)} with these settings")


def whitening_sums(values: Float[Tensor, " T"], mask: Bool[Tensor, " T"] | None = None) -> Float[Tensor, " 3"]:
    """Count, sum and sum of squares over the trained tokens, in float64; add those of all ranks, then `whiten`."""
    kept = (values if mask is None else values[mask]).to(torch.float64)
    count = torch.full((), float(kept.numel()), dtype=torch.float64, device=values.device)
    return torch.stack((count, kept.sum(), kept.square().sum()))


def whiten(
    values: Float[Tensor, " T"], sums: Float[Tensor, " 3"], mask: Bool[Tensor, " T"] | None = None
) -> Float[Tensor, " T"]:
    """`(A - μ) · rsqrt(σ² · N / (N - 1) + 1e-8)` on trained tokens, 0 elsewhere; one token alone becomes 0.

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
    """Every trained token of a sample gets its shaped reward."""
    tokens = shaped[inputs.sample_index]
    return tokens, tokens


def broadcast_minus_kl(
    shaped: Float[Tensor, " S"], inputs: AdvantageInputs, settings: AdvantageSettings
) -> tuple[Float[Tensor, " T"], Float[Tensor, " T"]]:
    """`R - kl_coef · KL_t`."""
    tokens = shaped[inputs.sample_index] + _kl_rewards(shaped, inputs, settings)
    return tokens, tokens


def returns_to_go(
    shaped: Float[Tensor, " S"], inputs: AdvantageInputs, settings: AdvantageSettings
) -> tuple[Float[Tensor, " T"], Float[Tensor, " T"]]:
    """`G_t = r_t + γ G_{t+1}`, with the reward on the last trained token and -kl_coef · KL on all trained ones."""
    rewards = token_rewards(shaped, inputs, settings)
    tokens = discounted_returns(rewards, inputs.sample_index, settings.gamma, inputs.positions)
    return tokens, tokens


def critic_advantages(
    shaped: Float[Tensor, " S"], inputs: AdvantageInputs, settings: AdvantageSettings
) -> tuple[Float[Tensor, " T"], Float[Tensor, " T"]]:
    """Generalised advantages (`gae`) of the token rewards, and the critic's targets."""
    assert inputs.values is not None
    rewards = token_rewards(shaped, inputs, settings)
    return gae(rewards, inputs.values, inputs.sample_index, inputs.mask, settings.gamma, settings.lambd)


def token_rewards(
    shaped: Float[Tensor, " S"], inputs: AdvantageInputs, settings: AdvantageSettings
) -> Float[Tensor, " T"]:
    """`-kl_coef · KL_t` on each trained token, plus the sample's reward on its last trained one; 0 elsewhere."""
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


def _identity(inputs: AdvantageInputs, settings: AdvantageSettings) -> Tensor:
    return inputs.rewards.clone()


def _grpo(inputs: AdvantageInputs, settings: AdvantageSettings) -> Tensor:
    return shaping.grpo_rewards(
        inputs.rewards, inputs.group_ids, inputs.trajectory_ids, std_normalization=settings.std_normalization
    )


def _rloo(inputs: AdvantageInputs, settings: AdvantageSettings) -> Tensor:
    return shaping.rloo_rewards(inputs.rewards, inputs.group_ids, inputs.trajectory_ids)


def _centred(inputs: AdvantageInputs, settings: AdvantageSettings) -> Tensor:
    return shaping.centred_rewards(inputs.rewards, inputs.group_ids, inputs.trajectory_ids)


def _maxrl(inputs: AdvantageInputs, settings: AdvantageSettings) -> Tensor:
    return shaping.maxrl_rewards(inputs.rewards, inputs.group_ids, inputs.trajectory_ids)


def _opo(inputs: AdvantageInputs, settings: AdvantageSettings) -> Tensor:
    lengths = trained_tokens(inputs.sample_index, inputs.rewards.numel(), inputs.mask)
    return shaping.opo_rewards(inputs.rewards, inputs.group_ids, lengths)


def _gdpo(inputs: AdvantageInputs, settings: AdvantageSettings) -> Tensor:
    assert inputs.reward_parts is not None
    assert inputs.part_weights is not None
    return shaping.gdpo_rewards(
        inputs.reward_parts, inputs.part_weights, inputs.group_ids, inputs.trajectory_ids, settings.std_normalization
    )


def _passk(inputs: AdvantageInputs, settings: AdvantageSettings) -> Tensor:
    return shaping.passk_rewards(
        inputs.rewards, inputs.group_ids, inputs.trajectory_ids, std_normalization=settings.std_normalization
    )


_GRPO_SOURCE = "DeepSeekMath 2024, section 4.1.2, arXiv 2402.03300"
_HU_SOURCE = "Hu 2025, REINFORCE++, arXiv 2501.03262"
_ALL = (
    Estimator("grpo", _grpo, broadcast, _GRPO_SOURCE, needs_group=True),
    Estimator("gspo", _grpo, broadcast, "Zheng et al. 2025, arXiv 2507.18071", needs_group=True, policy_loss="gspo"),
    Estimator("cispo", _grpo, broadcast, "MiniMax-M1 2025, arXiv 2506.13585", needs_group=True, policy_loss="cispo"),
    Estimator("rloo", _rloo, broadcast, "Ahmadian et al. 2024, arXiv 2402.14740", needs_group=True),
    Estimator(
        "reinforce_plus_plus",
        _identity,
        returns_to_go,
        _HU_SOURCE,
        per_token_reward=True,
        uses_gamma=True,
        whitens=True,
    ),
    Estimator(
        "reinforce_plus_plus_baseline",
        _centred,
        broadcast_minus_kl,
        _HU_SOURCE,
        needs_group=True,
        per_token_reward=True,
        whitens=True,
    ),
    Estimator(
        "maxrl", _maxrl, broadcast, "Tajwar et al. 2026, arXiv 2602.02710", needs_group=True, divides_by_mean=True
    ),
    Estimator("opo", _opo, broadcast, "Hao et al. 2025, arXiv 2505.23585", needs_group=True),
    Estimator(
        "gdpo", _gdpo, broadcast, "GDPO 2026, arXiv 2601.05242", needs_group=True, needs_parts=True, whitens=True
    ),
    Estimator("passk", _passk, broadcast, "Tang et al. 2025, arXiv 2503.19595", needs_group=True),
    Estimator(
        "ppo",
        _identity,
        critic_advantages,
        "Schulman et al. 2015 and 2017, arXiv 1506.02438 and 1707.06347",
        per_token_reward=True,
        uses_gamma=True,
        needs_values=True,
    ),
)

ESTIMATORS: Mapping[str, Estimator] = MappingProxyType({rule.name: rule for rule in _ALL})
"""Every estimator by its name in a recipe (`advantage_estimator`)."""
