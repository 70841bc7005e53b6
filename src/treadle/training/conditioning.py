"""What is done to the rewards of a rollout before advantages are made of them; logs keep the raw ones."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from treadle.algorithms.shaping import RunningMoments, clip_rewards, normalize_running, update_moments
from treadle.config import RewardSection


def condition_rewards(
    rewards: Float[Tensor, " S"], section: RewardSection, moments: RunningMoments
) -> tuple[Float[Tensor, " S"], RunningMoments]:
    """`clip(scale · r + bias, low, high)`, then normalised by the moments of all such rewards so far, these included.

    Returns the rewards and the new moments (the old ones where nothing is normalised).
    """
    scaled = rewards * section.reward_scale + section.reward_bias
    clipped = clip_rewards(scaled, section.reward_clip_low, section.reward_clip_high)
    if not section.normalize_rewards_running:
        return clipped, moments
    moments = update_moments(moments, clipped)
    return normalize_running(clipped, moments), moments
