"""What a rollout looked like, as metrics."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from treadle.metrics import Metric, metric
from treadle.rollout.filters import zero_signal
from treadle.types import Group, Sample, Status


def rollout_metrics(groups: Sequence[Group], *, seconds: float, version: int) -> list[Metric]:
    """Return the metrics of collected groups; `version` is that of the weights that will be trained with them."""
    samples = [sample for group in groups for sample in group.samples]
    scored = [sample for group in groups for sample in group.trajectories if sample.reward is not None]
    lengths = np.array([sample.response_length for sample in samples])
    num_tokens = int(lengths.sum())
    out = [
        metric("rollout/num_samples", len(samples)),
        metric("rollout/num_tokens", num_tokens),
        metric("rollout/failed_count", sum(s.status is Status.FAILED for s in samples)),
        metric("rollout/prompt_length_mean", _mean([len(g.prompt.token_ids) for g in groups]), len(groups)),
        metric("rollout/response_length_mean", _mean(lengths), len(samples)),
        metric("rollout/response_length_max", float(lengths.max(initial=0))),
        metric("rollout/truncated_fraction", _share(samples, Status.TRUNCATED), len(samples)),
        metric("rollout/aborted_fraction", _share(samples, Status.ABORTED), len(samples)),
        metric("rollout/zero_signal_group_fraction", _mean([zero_signal(g) is not None for g in groups]), len(groups)),
        metric("rollout/seconds", seconds),
        metric("rollout/tokens_per_second", num_tokens / seconds if seconds > 0 else 0.0),
    ]
    out += reward_metrics(scored)
    trained = [(s.rollout_logprobs[s.loss_mask], s.weight_versions[s.loss_mask]) for s in samples]
    if num_tokens:
        out.append(
            metric("rollout/logprob_mean", np.concatenate([t[0] for t in trained]).mean(dtype=float), num_tokens)
        )
        out.append(metric("rollout/weight_lag_max", version - min(int(t[1].min()) for t in trained if len(t[1]))))
    return out


def same_rewards(groups: Sequence[Group], *, compares_groups: bool) -> str:
    """Say in which way the rewards of a rollout tell no sample from another; empty if some differ.

    With `compares_groups`, advantages come from comparing the samples of a group, so each group counts by itself.
    """
    rewards = {sample.reward for group in groups for sample in group.samples if sample.reward is not None}
    if len(rewards) == 1:
        return f"every sample got the reward {next(iter(rewards)):g}"
    if rewards and compares_groups and all(zero_signal(group) is not None for group in groups):
        return "all samples of a group got the same reward, in every group"
    return ""


def reward_metrics(scored: Sequence[Sample]) -> list[Metric]:
    """Return mean, spread and named parts of the rewards; nothing if no sample was scored."""
    if not scored:
        return []
    rewards = np.array([sample.reward for sample in scored], dtype=float)
    out = [
        metric("rollout/reward_mean", rewards.mean(), len(scored)),
        metric("rollout/reward_std", rewards.std(), len(scored)),
        metric("rollout/reward_min", rewards.min()),
        metric("rollout/reward_max", rewards.max()),
    ]
    parts: dict[str, list[float]] = {}
    for sample in scored:
        for name, value in sample.reward_parts.items():
            parts.setdefault(name, []).append(value)
    out += [metric(f"rollout/reward/{name}", _mean(values), len(values)) for name, values in sorted(parts.items())]
    return out


def _mean(values: Sequence[float] | np.ndarray) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def _share(samples: Sequence[Sample], status: Status) -> float:
    return _mean([sample.status is status for sample in samples])
