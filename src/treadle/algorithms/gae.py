"""Sums that run backwards through each sample: discounted returns and generalised advantages.

Both are one linear recurrence, `y_t = x_t + c_t · y_{t+1}` with `c = 0` at the end of a sample, solved by doubling:
log2(longest sample) rounds over whole vectors instead of a loop over tokens. Nothing is divided by a power of the
discount, so it is as exact as the loop.

Axis: `T` tokens of many samples one after the other.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor


def backward_scan(
    values: Float[Tensor, " T"], carry: Float[Tensor, " T"], num_rounds: int | None = None
) -> Float[Tensor, " T"]:
    """`y_t = values_t + carry_t · y_{t+1}`, with `y` past the end 0.

    `carry` must be 0 on the last token of each sample. After k rounds a token has heard of the 2^k tokens from
    itself on; `num_rounds` may be given where the longest sample is known.

    >>> backward_scan(torch.tensor([1.0, 1.0, 1.0]), torch.tensor([0.5, 0.5, 0.0])).tolist()
    [1.75, 1.5, 1.0]
    """
    total, carry = values.clone(), carry.clone()
    rounds = max(values.numel() - 1, 0).bit_length() if num_rounds is None else num_rounds
    for step in range(rounds):
        shift = 1 << step
        if shift >= total.numel():
            break
        total = torch.cat((torch.addcmul(total[:-shift], carry[:-shift], total[shift:]), total[-shift:]))
        carry = torch.cat((carry[:-shift] * carry[shift:], torch.zeros_like(carry[-shift:])))
    return total


def last_of_sample(sample_index: Int64[Tensor, " T"]) -> Bool[Tensor, " T"]:
    """True on the last token of each sample, for an ascending sample index.

    >>> last_of_sample(torch.tensor([0, 0, 3])).tolist()
    [False, True, True]
    """
    last = torch.ones_like(sample_index, dtype=torch.bool)
    if sample_index.numel() > 1:
        last[:-1] = sample_index[1:] != sample_index[:-1]
    return last


def rounds_for(sample_index: Int64[Tensor, " T"]) -> int:
    """Doubling rounds that the longest sample needs."""
    if sample_index.numel() == 0:
        return 0
    _, counts = torch.unique_consecutive(sample_index, return_counts=True)
    return (int(counts.max()) - 1).bit_length()


def discounted_returns(
    rewards: Float[Tensor, " T"], sample_index: Int64[Tensor, " T"], gamma: float = 1.0
) -> Float[Tensor, " T"]:
    """Return `G_t = r_t + γ G_{t+1}` within each sample.

    The discount counts tokens, so it needs all tokens of a sample, the untrained ones too.

    >>> index = torch.tensor([0, 0, 1])
    >>> discounted_returns(torch.tensor([0.0, 1.0, 5.0]), index, gamma=0.5).tolist()
    [0.5, 1.0, 5.0]
    """
    carry = torch.where(last_of_sample(sample_index), 0.0, torch.full_like(rewards, gamma))
    return backward_scan(rewards, carry, rounds_for(sample_index))


def gae(
    rewards: Float[Tensor, " T"],
    values: Float[Tensor, " T"],
    sample_index: Int64[Tensor, " T"],
    mask: Bool[Tensor, " T"] | None = None,
    gamma: float = 1.0,
    lambd: float = 1.0,
) -> tuple[Float[Tensor, " T"], Float[Tensor, " T"]]:
    """Generalised advantages and returns, each [T].

    `δ_t = r_t + γ V_{t+1} - V_t`, `A_t = Σ_l (γλ)^l δ_{t+l}`, `returns = A + V`; V past the end is 0. Where the mask
    is False (tool output) a token is skipped: the next trained token's V and A pass through it unchanged, its own
    reward and value are not read, and it gets 0 for both.

    Source: Schulman et al. 2015, eq. 16 (arXiv 1506.02438).

    >>> index = torch.tensor([0, 0])
    >>> gae(torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.25]), index, gamma=1.0, lambd=0.5)
    (tensor([0.1250, 0.7500]), tensor([0.6250, 1.0000]))
    """
    if mask is not None:
        chosen = mask.nonzero().squeeze(1)
        advantages, returns = gae(rewards[chosen], values[chosen], sample_index[chosen], None, gamma, lambd)
        blank = torch.zeros_like(rewards)
        return blank.index_copy(0, chosen, advantages), blank.index_copy(0, chosen, returns)
    last = last_of_sample(sample_index)
    next_values = torch.zeros_like(values)
    next_values[:-1] = values[1:]
    next_values = torch.where(last, 0.0, next_values)
    delta = rewards + gamma * next_values - values
    carry = torch.where(last, 0.0, torch.full_like(delta, gamma * lambd))
    advantages = backward_scan(delta, carry, rounds_for(sample_index))
    return advantages, advantages + values
