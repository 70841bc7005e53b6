"""Sums and extremes over the tokens of a sample or the samples of a group, found by id.

Axes: `N` entries, `K` segments. Ids may come in any order and any number; a segment without entries is allowed.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor


def segment_sum(values: Float[Tensor, " N"], index: Int64[Tensor, " N"], num_segments: int) -> Float[Tensor, " K"]:
    """Return the sum of the values of each segment, [K]; 0 for an empty one.

    >>> segment_sum(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 0, 2]), 3).tolist()
    [3.0, 0.0, 4.0]
    """
    return values.new_zeros(num_segments).index_add(0, index, values)


def segment_max(values: Float[Tensor, " N"], index: Int64[Tensor, " N"], num_segments: int) -> Float[Tensor, " K"]:
    """Return the largest value of each segment, [K]; -inf for an empty one."""
    return values.new_full((num_segments,), -torch.inf).scatter_reduce(0, index, values, "amax")


def dense_ids(ids: Int64[Tensor, " N"]) -> tuple[Int64[Tensor, " N"], int]:
    """Renumber ids as 0, 1, 2… and return them, [N], with the number of different ones.

    >>> index, count = dense_ids(torch.tensor([70, 5, 70]))
    >>> index.tolist(), count
    ([1, 0, 1], 2)
    """
    unique, index = torch.unique(ids, return_inverse=True)
    return index, unique.numel()


def safe_divide(numerator: Tensor, denominator: Tensor | float) -> Tensor:
    """Return `numerator / denominator`; 0, with gradient 0, if the denominator is 0."""
    denominator = torch.as_tensor(denominator, dtype=numerator.dtype, device=numerator.device)
    empty = denominator == 0
    return torch.where(empty, 0.0, numerator / torch.where(empty, 1.0, denominator))


def num_samples_of(sample_index: Int64[Tensor, " T"]) -> int:
    """Return how many samples a packed vector spans, given its ascending sample index; 0 without tokens."""
    return int(sample_index[-1]) + 1 if sample_index.numel() else 0


def where_trained(values: Tensor, mask: Bool[Tensor, " T"] | None, other: float = 0.0) -> Tensor:
    """Return the values with `other` in place of every untrained token, which then gets no gradient."""
    return values if mask is None else torch.where(mask, values, other)


def trained(mask: Bool[Tensor, " T"] | None, like: Tensor) -> Tensor:
    """Return the mask as 1.0 and 0.0 in the dtype of `like`; all ones if there is no mask."""
    return torch.ones_like(like) if mask is None else mask.to(like.dtype)


def capped_exp(exponent: Tensor) -> Tensor:
    """Return `exp`, continued as a straight line where it would overflow: finite, with a finite gradient of the right sign.

    The line begins at 60 in float32 and 600 in float64; below, this is `exp` itself.
    """
    limit = 600.0 if exponent.dtype == torch.float64 else 60.0
    return exponent.clamp(max=limit).exp() * (1.0 + (exponent - limit).clamp(min=0.0))
