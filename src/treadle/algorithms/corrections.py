"""Factors on the policy loss that correct for tokens another policy drew than the one that is trained.

The engine's logprobs differ a little from the trainer's for the same weights, and more for older weights. All of it
works on `w = exp(old_logprobs - rollout_logprobs)` (trainer before the step, engine), and none of it gets a
gradient. A dropped token has factor 0 and still counts in the loss's denominator.

Axis: `T` tokens of many samples one after the other; whole samples, for everything but the token level.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from treadle import catalog
from treadle.algorithms.reduce import sample_means
from treadle.algorithms.segments import capped_exp, num_samples_of, safe_divide, segment_max, segment_sum, where_trained
from treadle.catalog import Bound, CorrectionSettings, Level
from treadle.errors import ConfigError

CORRECTIONS = {name: record.settings for name, record in catalog.CORRECTIONS.items()}
"""The usual numbers of every correction by its name; change them with `dataclasses.replace`."""


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
