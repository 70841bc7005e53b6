"""Factors on the policy loss that correct for tokens another policy drew than the one that is trained.

The engine's logprobs differ a little from the trainer's for the same weights, and more for older weights. All of it
works on `w = exp(old_logprobs - rollout_logprobs)` (trainer before the step, engine), and none of it gets a
gradient. A dropped token has factor 0 and still counts in the loss's denominator.

Axis: `T` tokens of many samples one after the other; whole samples, for everything but the token level.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from treadle.algorithms.reduce import sample_means
from treadle.algorithms.segments import capped_exp, num_samples_of, safe_divide, segment_max, segment_sum, where_trained
from treadle.errors import ConfigError


class Level(StrEnum):
    """What one weight is for."""

    TOKEN = "token"  # w of the token
    SEQUENCE = "sequence"  # exp Σ log w over the sample's trained tokens
    GEOMETRIC = "geometric"  # exp mean log w over them


class Bound(StrEnum):
    """What happens to a weight outside its bounds."""

    TRUNCATE = "truncate"  # min(w, high)
    CLIP = "clip"  # clip(w, low, high)
    MASK = "mask"  # 0 outside [low, high]


@dataclass(frozen=True, slots=True)
class CorrectionSettings:
    """How tokens are weighted, and which are dropped.

    `reject_level` drops what lies outside [reject_low, reject_high] at that level, `veto_below` a whole sample if
    any of its trained tokens has w below it. `batch_mean_one` divides the weights by their mean over the trained
    tokens it is given, before anything is rejected.
    """

    level: Level = Level.TOKEN
    bound: Bound = Bound.CLIP
    low: float = 0.0
    high: float = 2.0
    reject_level: Level | None = None
    reject_low: float = 0.0
    reject_high: float = math.inf
    veto_below: float | None = None
    batch_mean_one: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high or not 0 <= self.reject_low <= self.reject_high:
            raise ConfigError(
                f"correction bounds must be 0 <= low <= high, got [{self.low}, {self.high}] "
                f"and rejection [{self.reject_low}, {self.reject_high}]"
            )


CORRECTIONS: Mapping[str, CorrectionSettings] = MappingProxyType(
    {
        "tis": CorrectionSettings(Level.TOKEN, Bound.CLIP, 0.0, 2.0),
        "icepop": CorrectionSettings(Level.TOKEN, Bound.MASK, 0.5, 5.0),
        "sequence": CorrectionSettings(Level.SEQUENCE, Bound.TRUNCATE, 0.0, 2.0),
        "geometric": CorrectionSettings(Level.GEOMETRIC, Bound.TRUNCATE, 0.0, 2.0),
        "decoupled": CorrectionSettings(Level.TOKEN, Bound.TRUNCATE, 0.0, math.inf),
    }
)
"""Every correction by its name, with its usual numbers; change them with `dataclasses.replace`.

Sources: tis: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"; icepop: Ling
team 2025, "Every Step Evolves" (arXiv 2510.18855); sequence and geometric: Liu et al. 2025, "When Speed Kills
Stability"; decoupled: Hilton et al. 2021, eq. 3 (arXiv 2110.00641), as used in AReaL 2025, eq. 5 (arXiv 2505.24298):
the policy loss's ratio is to the trainer's policy before the step (proximal), its weight `exp(lp_prox - lp_behave)`.
"""


def find_correction(name: str) -> CorrectionSettings:
    """The correction of this name; `ConfigError` where there is none."""
    if name not in CORRECTIONS:
        raise ConfigError(f"rollout_correction {name!r} is unknown; choose one of {', '.join(CORRECTIONS)}")
    return CORRECTIONS[name]


@dataclass(frozen=True, slots=True, eq=False)
class Correction:
    """`weights` multiply the policy loss; 0 where untrained or dropped. `kept` is True on trained tokens that stay."""

    weights: Float[Tensor, " T"]
    kept: Bool[Tensor, " T"]


def correct(
    old_logprobs: Float[Tensor, " T"],
    rollout_logprobs: Float[Tensor, " T"],
    sample_index: Int64[Tensor, " T"],
    settings: CorrectionSettings,
    mask: Bool[Tensor, " T"] | None = None,
    sum_over_ranks: Callable[[Tensor], Tensor] | None = None,
) -> Correction:
    """The factor of each token by these settings.

    Give it the whole batch (or its rank's share, with `sum_over_ranks`) where `batch_mean_one` is set.

    >>> zero, index = torch.zeros(2), torch.tensor([0, 0])
    >>> correct(torch.tensor([1.0, -1.0]), zero, index, CORRECTIONS["tis"]).weights
    tensor([2.0000, 0.3679])
    """
    with torch.no_grad():
        log_weights = where_trained(old_logprobs, mask) - where_trained(rollout_logprobs, mask)
        chosen = torch.ones_like(log_weights, dtype=torch.bool) if mask is None else mask
        weights = bound_weights(
            level_weights(log_weights, sample_index, settings.level, mask), settings.bound, settings.low, settings.high
        )
        weights = torch.where(chosen, weights, 0.0)
        if settings.batch_mean_one:
            sums = torch.stack((weights.sum(), chosen.sum().to(weights.dtype)))
            sums = sums if sum_over_ranks is None else sum_over_ranks(sums)
            weights = safe_divide(weights * sums[1], sums[0])
        kept = chosen & (weights > 0 if settings.bound == Bound.MASK else chosen)
        if settings.reject_level is not None:
            measure = level_weights(log_weights, sample_index, settings.reject_level, mask)
            kept = kept & (measure >= settings.reject_low) & (measure <= settings.reject_high)
        if settings.veto_below is not None:
            kept = kept & ~vetoed(log_weights, sample_index, settings.veto_below, mask)
        return Correction(torch.where(kept, weights, 0.0), kept)


def level_weights(
    log_weights: Float[Tensor, " T"],
    sample_index: Int64[Tensor, " T"],
    level: Level,
    mask: Bool[Tensor, " T"] | None = None,
) -> Float[Tensor, " T"]:
    """`w` of each token, or of its whole sample on each of its tokens."""
    if level == Level.TOKEN:
        return capped_exp(log_weights)
    count = num_samples_of(sample_index)
    if level == Level.SEQUENCE:
        return capped_exp(segment_sum(where_trained(log_weights, mask), sample_index, count)[sample_index])
    return capped_exp(sample_means(log_weights, sample_index, count, mask)[sample_index])


def bound_weights(weights: Float[Tensor, " T"], bound: Bound, low: float, high: float) -> Float[Tensor, " T"]:
    """Weights brought within their bounds.

    >>> bound_weights(torch.tensor([0.1, 1.0, 9.0]), Bound.MASK, 0.5, 5.0).tolist()
    [0.0, 1.0, 0.0]
    """
    if bound == Bound.TRUNCATE:
        return weights.clamp(max=high)
    if bound == Bound.CLIP:
        return weights.clamp(low, high)
    return torch.where((weights >= low) & (weights <= high), weights, 0.0)


def vetoed(
    log_weights: Float[Tensor, " T"],
    sample_index: Int64[Tensor, " T"],
    threshold: float = 1e-4,
    mask: Bool[Tensor, " T"] | None = None,
) -> Bool[Tensor, " T"]:
    """True on every token of a sample in which any trained token has `w` below the threshold."""
    lowest = -segment_max(-where_trained(log_weights, mask, torch.inf), sample_index, num_samples_of(sample_index))
    return capped_exp(lowest)[sample_index] < threshold


def m2po_mask(
    old_logprobs: Float[Tensor, " T"],
    rollout_logprobs: Float[Tensor, " T"],
    threshold: float = 0.04,
    mask: Bool[Tensor, " T"] | None = None,
    gather: Callable[[Tensor], Tensor] | None = None,
) -> Bool[Tensor, " T"]:
    """M2PO: True on the trained tokens that stay once the largest `(lp_old - lp_roll)²` are dropped.

    As few are dropped as bring the mean of the rest under the threshold; equal ones go together, so the order of
    the tokens does not matter. Give it all tokens of a batch, or a rank's share and a `gather` that joins the vectors of
    all ranks. The paper drops only tokens outside the trust
    region; here the size alone counts. Source: "Prosperity before Collapse" 2025 (arXiv 2510.01161).

    >>> m2po_mask(torch.tensor([0.1, 1.0, -0.1]), torch.zeros(3)).tolist()
    [True, False, True]
    """
    if threshold <= 0:
        raise ConfigError(f"the m2po threshold must be above 0, got {threshold}")
    with torch.no_grad():
        squares = (where_trained(old_logprobs, mask) - where_trained(rollout_logprobs, mask)).square().to(torch.float64)
        chosen = torch.ones_like(squares, dtype=torch.bool) if mask is None else mask
        candidates = squares[chosen]
        ordered = (candidates if gather is None else gather(candidates)).sort().values
        means = ordered.cumsum(0) / torch.arange(1, ordered.numel() + 1, device=ordered.device)
        num_kept = int((means < threshold).sum())
        if num_kept == ordered.numel():
            return chosen.clone()
        return chosen & (squares < ordered[num_kept])
