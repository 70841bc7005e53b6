"""Rewards: score samples, with a user's function kept from taking the run down. Start at `build_scorer`."""

from treadle.rollout.rewards.builtin import BUILTIN_REWARDS
from treadle.rollout.rewards.inputs import RewardInput, RewardScore
from treadle.rollout.rewards.scorer import GroupScoring, RewardScorer, build_scorer

__all__ = ["BUILTIN_REWARDS", "GroupScoring", "RewardInput", "RewardScore", "RewardScorer", "build_scorer"]
