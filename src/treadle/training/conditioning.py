"""Scale, clip and normalise the rewards of a rollout before advantages are computed; logs keep the raw rewards."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from treadle.algorithms.shaping import RunningMoments, clip_rewards, normalize_running, update_moments
from treadle.config import RewardSection


def condition_rewards(
    rewards: Float[Tensor, " S"],
    section: RewardSection,
    moments: RunningMoments,
    trajectory_ids: Int64[Tensor, " S"] | None = None,
) -> tuple[Float[Tensor, " S"], RunningMoments]:
    """Return `clip(scale · r + bias, low, high)`, normalised by the moments of all such rewards so far, if configured.

    Samples of one trajectory carry the same reward, which counts once in the moments. Returns the rewards and the new
    moments (the old ones if nothing is normalised).
    """
    scaled = rewards * section.reward_scale + section.reward_bias
    clipped = clip_rewards(scaled, section.reward_clip_low, section.reward_clip_high)
    if not section.normalize_rewards_running:
        return clipped, moments
    moments = update_moments(moments, clipped if trajectory_ids is None else clipped[_firsts(trajectory_ids)])
    return normalize_running(clipped, moments), moments


def _firsts(ids: Int64[Tensor, " S"]) -> Bool[Tensor, " S"]:
    """Return True at the first sample of each trajectory.

    >>> _firsts(torch.tensor([7, 3, 7])).tolist()
    [True, True, False]
    """
    unique, index = torch.unique(ids, return_inverse=True)
    places = torch.arange(ids.numel(), device=ids.device)
    first = torch.full_like(unique, ids.numel()).scatter_reduce(0, index, places, "amin")
    return first[index] == places
