"""The one reduction from per-token losses to a loss: every token has a weight, and the loss is a weighted sum.

    loss = Σ_t x_t · w_t

The denominators inside the weights are those of the whole optimizer step (all micro-batches, all ranks) and are
passed in. The sum of the micro-batches' losses, and of their gradients, is therefore the same however the step is
split, ordered, packed or spread over ranks.

Axes: `S` samples, `T` tokens of many samples one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from treadle.algorithms.segments import dense_ids, safe_divide, segment_sum, trained


class Mode(StrEnum):
    """What has the same weight in the loss."""

    PER_SAMPLE = "per_sample"  # every trajectory: 1 / (its trained tokens · global batch size)
    PER_TOKEN = "per_token"  # every token: 1 / (trained tokens of the step); DAPO
    CONSTANT = "constant"  # every token: 1 / (global batch size · a fixed length); Dr. GRPO


@dataclass(frozen=True, slots=True)
class Denominators:
    """The numbers of a whole optimizer step that its weights are divided by; only those that the mode uses are read.

    `batch_size` counts trajectories (samples, unless several come from one trajectory), `total_tokens` counts trained
    tokens, and `max_length` is the constant divisor.
    """

    mode: Mode = Mode.PER_SAMPLE
    batch_size: float = 0.0
    total_tokens: float = 0.0
    max_length: float = 0.0


def trained_tokens(
    sample_index: Int64[Tensor, " T"], num_samples: int, mask: Bool[Tensor, " T"] | None = None
) -> Int64[Tensor, " S"]:
    """Count the trained tokens of each sample.

    Args:
        sample_index: int64 [T], ascending.
        num_samples: S.
        mask: bool [T], True on trained tokens; None trains all.
    Returns:
        int64 [S].
    """
    ones = torch.ones_like(sample_index) if mask is None else mask.to(torch.int64)
    return torch.zeros(num_samples, dtype=torch.int64, device=sample_index.device).index_add(0, sample_index, ones)


def trajectory_tokens(
    lengths: Int64[Tensor, " S"], trajectory_ids: Int64[Tensor, " S"] | None = None
) -> Int64[Tensor, " S"]:
    """Return the trained tokens of the whole trajectory of each sample: its length in the per-sample mean.

    Pass all samples of the step, then cut the result into micro-batches.

    Args:
        lengths: int64 [S], trained tokens of each sample.
        trajectory_ids: int64 [S]; without them every sample is its own trajectory.
    Returns:
        int64 [S].

    >>> trajectory_tokens(torch.tensor([3, 5, 2]), torch.tensor([7, 9, 7])).tolist()
    [5, 5, 5]
    """
    if trajectory_ids is None:
        return lengths.clone()
    index, count = dense_ids(trajectory_ids)
    return torch.zeros(count, dtype=lengths.dtype, device=lengths.device).index_add(0, index, lengths)[index]


def token_weights(
    sample_index: Int64[Tensor, " T"],
    sample_tokens: Int64[Tensor, " S"],
    denominators: Denominators,
    mask: Bool[Tensor, " T"] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, " T"]:
    """Return the weight of each token in the loss; 0 on untrained tokens. A denominator of 0 gives weight 0, never NaN.

    Args:
        sample_index: int64 [T], ascending.
        sample_tokens: int64 [S], `trajectory_tokens` of this micro-batch's samples; read in the per-sample mode only.
        denominators: the numbers of the whole optimizer step.
        mask: bool [T], True on trained tokens; None trains all.
    Returns:
        [T] in `dtype`.
    Source: the per-sample mean is GRPO's (DeepSeekMath 2024, eq. 3), the token mean DAPO's (2025, eq. 8), the constant
    Dr. GRPO's (Liu et al. 2025, section 3.2).

    >>> index = torch.tensor([0, 0, 1])
    >>> token_weights(index, torch.tensor([2, 1]), Denominators(batch_size=4)).tolist()
    [0.125, 0.125, 0.25]
    """
    ones = trained(mask, torch.empty_like(sample_index, dtype=dtype))
    if denominators.mode == Mode.PER_SAMPLE:
        return safe_divide(ones, sample_tokens.to(dtype)[sample_index] * denominators.batch_size)
    if denominators.mode == Mode.PER_TOKEN:
        return safe_divide(ones, denominators.total_tokens)
    return safe_divide(ones, denominators.batch_size * denominators.max_length)


def weighted_sum(values: Float[Tensor, " T"], weights: Float[Tensor, " T"]) -> Float[Tensor, ""]:
    """Return Σ x_t · w_t, differentiable in x. A value whose weight is 0 has no effect, even if it is NaN."""
    return (torch.where(weights != 0, values, 0.0) * weights).sum()


def sample_means(
    values: Float[Tensor, " T"],
    sample_index: Int64[Tensor, " T"],
    num_samples: int,
    mask: Bool[Tensor, " T"] | None = None,
) -> Float[Tensor, " S"]:
    """Return the mean of the values over each sample's trained tokens, [S]; 0 for a sample without any."""
    ones = trained(mask, values)
    total = segment_sum(torch.where(ones != 0, values, 0.0), sample_index, num_samples)
    return safe_divide(total, segment_sum(ones, sample_index, num_samples))
