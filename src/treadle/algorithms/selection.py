"""Which tokens are trained on, beyond the mask: the ones where the policy was undecided."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from treadle.errors import ConfigError


def top_entropy_mask(
    entropy: Float[Tensor, " T"],
    fraction: float,
    mask: Bool[Tensor, " T"] | None = None,
    gather: Callable[[Tensor], Tensor] | None = None,
) -> Bool[Tensor, " T"]:
    """True on the trained tokens with the highest entropy: this fraction of them, at least one.

    Give it the tokens of a whole step (or a rank's share and a `gather` that joins the vectors of all ranks), so that
    the threshold does not depend on how it is split. Tokens as high as the
    last one kept are kept too, so their order does not matter. The loss's denominator is left alone.
    Source: Wang et al. 2025, "Beyond the 80/20 Rule", section 4 (arXiv 2506.01939); they keep 20 %.

    >>> top_entropy_mask(torch.tensor([0.1, 2.0, 0.5, 1.0]), 0.5).tolist()
    [False, True, False, True]
    """
    if not 0 < fraction <= 1:
        raise ConfigError(f"top_entropy_fraction must be above 0 and at most 1, got {fraction}")
    chosen = torch.ones_like(entropy, dtype=torch.bool) if mask is None else mask
    candidates = entropy[chosen] if gather is None else gather(entropy[chosen])
    if candidates.numel() == 0:
        return chosen.clone()
    count = max(1, round(fraction * candidates.numel()))
    threshold = candidates.topk(count).values[-1]
    return chosen & (entropy >= threshold)
