"""From raw rewards to one shaped reward per sample, within groups found by id.

Groups may have any sizes and any order. With `trajectory_ids` (several samples cut from one trajectory), a trajectory
counts once in its group's statistics, however many samples it was cut into; samples of one trajectory are expected to carry
the same reward. All functions take `rewards` float [S], `group_ids` int64 [S] and `trajectory_ids` int64 [S] or None, and
return float [S].

Axes: `S` samples, `G` groups, `P` parts of a reward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from treadle.algorithms.segments import dense_ids, safe_divide, segment_max, segment_sum
from treadle.errors import ConfigError

EPSILON = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class GroupStatistics:
    """What the samples of a group are compared with.

    `centred` is reward minus group mean, exactly 0 if all rewards of a group are equal. `std` divides by n - 1 and is 0 for a
    group of one.
    """

    index: Int64[Tensor, " S"]  # dense group number of each sample
    size: Float[Tensor, " G"]  # trajectories in the group
    mean: Float[Tensor, " G"]
    std: Float[Tensor, " G"]
    centred: Float[Tensor, " S"]


def group_statistics(
    rewards: Float[Tensor, " S"], group_ids: Int64[Tensor, " S"], trajectory_ids: Int64[Tensor, " S"] | None = None
) -> GroupStatistics:
    """Return size, mean and standard deviation (n - 1) of each group, and how far each sample is from its mean."""
    index, count = dense_ids(group_ids)
    share = _shares(rewards, index, trajectory_ids)
    size = segment_sum(share, index, count)
    # Measured from the smallest reward of the group, equal rewards are exactly 0 and large offsets do not round.
    low = -segment_max(-rewards, index, count)
    above = rewards - low[index]
    mean_above = safe_divide(segment_sum(share * above, index, count), size)
    centred = above - mean_above[index]
    variance = safe_divide(segment_sum(share * centred.square(), index, count), (size - 1.0).clamp(min=0.0))
    return GroupStatistics(index, size, low + mean_above, variance.sqrt(), centred)


def unshaped_rewards(rewards: Float[Tensor, " S"]) -> Float[Tensor, " S"]:
    """Return the rewards as they are."""
    return rewards.clone()


def grpo_rewards(
    rewards: Float[Tensor, " S"],
    group_ids: Int64[Tensor, " S"],
    trajectory_ids: Int64[Tensor, " S"] | None = None,
    std_normalization: bool = True,
    eps: float = EPSILON,
) -> Float[Tensor, " S"]:
    """Return `(r - mean) / (std + eps)`, and Dr. GRPO's `r - mean` without the division.

    A group of one, or of equal rewards, gets 0.
    Source: DeepSeekMath 2024, section 4.1.2 (arXiv 2402.03300); Dr. GRPO: Liu et al. 2025 (arXiv 2503.20783).

    >>> grpo_rewards(torch.tensor([1.0, 0.0, 5.0]), torch.tensor([0, 0, 1]), std_normalization=False).tolist()
    [0.5, -0.5, 0.0]
    """
    stats = group_statistics(rewards, group_ids, trajectory_ids)
    return stats.centred / (stats.std + eps)[stats.index] if std_normalization else stats.centred


def rloo_rewards(
    rewards: Float[Tensor, " S"], group_ids: Int64[Tensor, " S"], trajectory_ids: Int64[Tensor, " S"] | None = None
) -> Float[Tensor, " S"]:
    """Return `n / (n - 1) · (r - mean)`: the reward minus the mean of the others; 0 for a group of one.

    Source: Ahmadian et al. 2024, "Back to Basics", section 3 (arXiv 2402.14740).

    >>> rloo_rewards(torch.tensor([3.0, 1.0]), torch.tensor([4, 4])).tolist()
    [2.0, -2.0]
    """
    stats = group_statistics(rewards, group_ids, trajectory_ids)
    return stats.centred * safe_divide(stats.size, (stats.size - 1.0).clamp(min=0.0))[stats.index]


def centred_rewards(
    rewards: Float[Tensor, " S"], group_ids: Int64[Tensor, " S"], trajectory_ids: Int64[Tensor, " S"] | None = None
) -> Float[Tensor, " S"]:
    """Return `r - mean`: REINFORCE++-baseline (Hu 2025, arXiv 2501.03262)."""
    return group_statistics(rewards, group_ids, trajectory_ids).centred


def maxrl_rewards(
    rewards: Float[Tensor, " S"],
    group_ids: Int64[Tensor, " S"],
    trajectory_ids: Int64[Tensor, " S"] | None = None,
    eps: float = EPSILON,
) -> Float[Tensor, " S"]:
    """Return `(r - mean) / (mean + eps)`, for rewards that are not negative; rare successes weigh more.

    Source: Tajwar et al. 2026, "Maximum Likelihood Reinforcement Learning" (arXiv 2602.02710).

    >>> [round(x, 4) for x in maxrl_rewards(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4).long()).tolist()]
    [3.0, -1.0, -1.0, -1.0]
    """
    stats = group_statistics(rewards, group_ids, trajectory_ids)
    return safe_divide(stats.centred, (stats.mean + eps)[stats.index])


def opo_rewards(
    rewards: Float[Tensor, " S"], group_ids: Int64[Tensor, " S"], lengths: Int64[Tensor, " S"]
) -> Float[Tensor, " S"]:
    """Return `r - Σ l·r / Σ l`: the baseline weights every sample by its trained tokens `l`, `lengths` int64 [S].

    Fan-out needs no ids here: the lengths of a trajectory's samples add up to its own. A group without a trained token gets 0.
    Source: Hao et al. 2025, "On-Policy RL with Optimal Reward Baseline", eq. 7 (arXiv 2505.23585).

    >>> opo_rewards(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), torch.tensor([1, 3])).tolist()
    [0.75, -0.25]
    """
    index, count = dense_ids(group_ids)
    low = -segment_max(-rewards, index, count)
    above = rewards - low[index]
    length = lengths.to(rewards.dtype)
    total = segment_sum(length, index, count)
    baseline = safe_divide(segment_sum(length * above, index, count), total)
    return torch.where(total[index] > 0, above - baseline[index], 0.0)


def gdpo_rewards(
    reward_parts: Float[Tensor, "S P"],
    part_weights: Float[Tensor, " P"],
    group_ids: Int64[Tensor, " S"],
    trajectory_ids: Int64[Tensor, " S"] | None = None,
    std_normalization: bool = True,
) -> Float[Tensor, " S"]:
    """Return the parts of the reward, each normalised in its group as in `grpo_rewards`, added by weight.

    A part with a small spread then counts as much as one with a large spread. The sum is to be whitened over the batch.

    Args:
        reward_parts: float [S, P].
        part_weights: float [P].
    Source: "GDPO: Group reward-Decoupled Normalization Policy Optimization" 2026 (arXiv 2601.05242).
    """
    columns = [
        grpo_rewards(part, group_ids, trajectory_ids, std_normalization) * weight
        for part, weight in zip(reward_parts.unbind(1), part_weights.to(reward_parts.dtype), strict=True)
    ]
    return torch.stack(columns).sum(0) if columns else reward_parts.new_zeros(reward_parts.shape[0])


def passk_rewards(
    rewards: Float[Tensor, " S"],
    group_ids: Int64[Tensor, " S"],
    trajectory_ids: Int64[Tensor, " S"] | None = None,
    std_normalization: bool = True,
    eps: float = EPSILON,
) -> Float[Tensor, " S"]:
    """Return `(r_max - r_2nd) / (std + eps)` for the best sample of the group, 0 for the others.

    A tie for the best, or a group of one, gives 0 to all. Source: Tang et al. 2025, "Optimizing Language Models for Inference
    Time Objectives using Reinforcement Learning" (arXiv 2503.19595).

    >>> passk_rewards(torch.tensor([1.0, 4.0, 2.0]), torch.zeros(3).long(), std_normalization=False).tolist()
    [0.0, 2.0, 0.0]
    """
    stats = group_statistics(rewards, group_ids, trajectory_ids)
    count = stats.size.numel()
    best = segment_max(rewards, stats.index, count)
    is_best = rewards == best[stats.index]
    second = segment_max(torch.where(is_best, -torch.inf, rewards), stats.index, count)
    num_best = segment_sum(_shares(rewards, stats.index, trajectory_ids) * is_best, stats.index, count)
    alone = (num_best < 1.5) & torch.isfinite(second)  # a trajectory's shares add up to 1, give or take rounding
    gap = torch.where(alone, best - torch.where(alone, second, 0.0), 0.0)
    if std_normalization:
        gap = gap / (stats.std + eps)
    return torch.where(is_best, gap[stats.index], 0.0)


def _shares(rewards: Tensor, group_index: Tensor, trajectory_ids: Tensor | None) -> Tensor:
    """Return what each sample counts in its group: 1 / (samples of its trajectory), [S]."""
    if trajectory_ids is None:
        return torch.ones_like(rewards)
    trajectory, count = dense_ids(trajectory_ids)
    pair, num_pairs = dense_ids(group_index * count + trajectory)
    return 1.0 / segment_sum(torch.ones_like(rewards), pair, num_pairs)[pair]


def combine_rewards(
    reward_parts: Float[Tensor, "S P"], part_weights: Float[Tensor, " P"], scale: float = 1.0, bias: float = 0.0
) -> Float[Tensor, " S"]:
    """Return several rewards as one: `scale · Σ_p weight_p · part_p + bias`.

    Args:
        reward_parts: float [S, P].
        part_weights: float [P].

    >>> combine_rewards(torch.tensor([[1.0, 0.5]]), torch.tensor([1.0, 2.0]), scale=10.0, bias=1.0).tolist()
    [21.0]
    """
    return (reward_parts * part_weights.to(reward_parts.dtype)).sum(1) * scale + bias


def clip_rewards(rewards: Float[Tensor, " S"], low: float | None, high: float | None) -> Float[Tensor, " S"]:
    """Return rewards cut to [low, high]; None leaves that side open. Raises `ConfigError` if low is above high."""
    if low is not None and high is not None and low > high:
        raise ConfigError(f"the reward clip's lower bound {low} is above its upper bound {high}; swap them")
    return rewards.clone() if low is None and high is None else rewards.clamp(low, high)


def overlong_penalty(
    lengths: Int64[Tensor, " S"], max_length: int, buffer_length: int, factor: float = 1.0
) -> Float[Tensor, " S"]:
    """Return what to add to the reward of a long sample: 0 up to `max_length - buffer_length`, `-factor` at `max_length`.

    Linear in between, and `-factor` beyond.

    Args:
        lengths: int64 [S], tokens.
    Raises:
        ConfigError: if `buffer_length` is not in 1..max_length.
    Source: DAPO 2025, eq. 13 (arXiv 2503.14476).

    >>> overlong_penalty(torch.tensor([10, 14, 16, 99]), max_length=16, buffer_length=4).tolist()
    [0.0, -0.5, -1.0, -1.0]
    """
    if not 0 < buffer_length <= max_length:
        raise ConfigError(f"the overlong buffer must be in 1..{max_length} (the maximum length), got {buffer_length}")
    over = lengths.to(torch.float32) - float(max_length - buffer_length)
    return 0.0 - factor * (over / buffer_length).clamp(0.0, 1.0)


@dataclass(frozen=True, slots=True)
class RunningMoments:
    """Count, mean and sum of squared distances of all rewards so far; plain numbers, which are saved and resumed."""

    count: int = 0
    mean: float = 0.0
    sum_squares: float = 0.0

    @property
    def std(self) -> float:
        """Standard deviation with n - 1; 0 before the second reward."""
        return (self.sum_squares / (self.count - 1)) ** 0.5 if self.count > 1 else 0.0


def update_moments(state: RunningMoments, rewards: Float[Tensor, " S"]) -> RunningMoments:
    """Return the moments with these rewards added (Chan, Golub and LeVeque 1979, pairwise update)."""
    count = rewards.numel()
    if count == 0:
        return state
    values = rewards.detach().to(torch.float64)
    mean = float(values.mean())
    total = state.count + count
    gap = mean - state.mean
    squares = float((values - mean).square().sum()) + gap * gap * state.count * count / total
    return RunningMoments(total, state.mean + gap * count / total, state.sum_squares + squares)


def normalize_running(rewards: Float[Tensor, " S"], state: RunningMoments, eps: float = EPSILON) -> Float[Tensor, " S"]:
    """Return `(r - mean) / (std + eps)` with the moments of the whole run; unchanged while fewer than two were seen."""
    return (rewards - state.mean) / (state.std + eps) if state.count > 1 else rewards.clone()
