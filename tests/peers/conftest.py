"""A random rollout in both layouts: rows padded to one length (theirs) and one vector of tokens (ours)."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor


@dataclass(frozen=True)
class Rollout:
    """Ten samples of three prompts, in mixed order, at most eight tokens long; float64.

    `present` is True on tokens, `mask` on trained ones: sample 1 has tool output in its middle, sample 4 at its end.
    """

    group_ids: Tensor  # [S]
    rewards: Tensor  # [S]
    present: Tensor  # [S, L]
    mask: Tensor  # [S, L]

    def random(self, seed: int, scale: float = 1.0) -> Tensor:
        """Normal noise on tokens, junk beside them, [S, L]."""
        noise = torch.randn(self.mask.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * scale
        return torch.where(self.present, noise, 7.0)

    def logprobs(self, seed: int) -> Tensor:
        return -self.random(seed).abs() - 0.1

    def pack(self, rows: Tensor) -> Tensor:
        """[S, L] → [T]."""
        return rows[self.present]

    def unpack(self, tokens: Tensor) -> Tensor:
        """[T] → [S, L], 0 beside the tokens."""
        return torch.zeros(self.mask.shape, dtype=tokens.dtype).masked_scatter(self.present, tokens)

    @property
    def sample_index(self) -> Tensor:
        return self.pack(torch.arange(len(self.mask))[:, None].expand(self.mask.shape))

    @property
    def trained(self) -> Tensor:
        return self.pack(self.mask)

    @property
    def at_last_trained(self) -> Tensor:
        """The reward of each sample on its last trained token, [S, L]."""
        last = self.mask & (self.mask.flip(1).cumsum(1).flip(1) == 1)
        return last * self.rewards[:, None]


@pytest.fixture
def rollout() -> Rollout:
    lengths = torch.tensor([3, 8, 1, 5, 6, 2, 4, 7, 3, 5])
    present = torch.arange(8) < lengths[:, None]
    mask = present.clone()
    mask[1, 2:5] = False
    mask[4, 4:] = False
    rewards = torch.tensor([1.0, 0.0, 0.5, -0.3, 0.9, 0.2, 0.7, -1.0, 0.4, 0.1], dtype=torch.float64)
    return Rollout(torch.tensor([5, 2, 5, 9, 2, 5, 9, 9, 5, 2]), rewards, present, mask)
