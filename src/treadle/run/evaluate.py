"""Evaluation sets: how they are sampled, and their metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from treadle.config import Config, EvalOverride
from treadle.metrics import Metric, metric
from treadle.rollout.rewards import RewardScorer
from treadle.types import Group, Prompt, SamplingParams, Status


@dataclass(frozen=True, eq=False)
class EvalSet:
    """One named set with its own sampling settings and its own rewards."""

    name: str
    prompts: Sequence[Prompt]
    sampling: SamplingParams
    n: int
    scorer: RewardScorer


def eval_sampling(config: Config, override: EvalOverride | None) -> tuple[SamplingParams, int]:
    """Return how a set is sampled and how many answers each prompt gets: its own settings, or else the evaluation's."""
    section = config.eval
    own = override or EvalOverride()

    def pick(mine: Any, common: Any) -> Any:
        return common if mine is None else mine

    length = pick(own.eval_max_response_len, section.eval_max_response_len or config.rollout.rollout_max_response_len)
    sampling = SamplingParams(
        max_new_tokens=length,
        temperature=pick(own.eval_temperature, section.eval_temperature),
        top_p=pick(own.eval_top_p, section.eval_top_p),
        top_k=pick(own.eval_top_k, section.eval_top_k),
        stop=config.rollout.rollout_stop,
        stop_token_ids=config.rollout.rollout_stop_token_ids,
    )
    return sampling, pick(own.n_samples_per_eval_prompt, section.n_samples_per_eval_prompt)


def eval_metrics(name: str, groups: Sequence[Group]) -> list[Metric]:
    """Return the metrics of one evaluated set. A failed answer counts as reward 0, and is counted separately."""
    samples = [sample for group in groups for sample in group.trajectories]
    rewards = [sample.reward if sample.reward is not None else 0.0 for sample in samples]
    count = len(samples)
    out = [
        metric(f"eval/{name}/accuracy", float(np.mean(rewards)), count),
        metric(f"eval/{name}/response_length_mean", float(np.mean([s.response_length for s in samples])), count),
        metric(
            f"eval/{name}/truncated_fraction", float(np.mean([s.status is Status.TRUNCATED for s in samples])), count
        ),
        metric(f"eval/{name}/failed_count", sum(s.status is Status.FAILED for s in samples)),
        metric(f"eval/{name}/num_samples", count),
    ]
    right = [sum((sample.reward or 0.0) >= 1.0 for sample in group.samples) for group in groups]
    k, smallest = 2, min(len(group.samples) for group in groups)
    while k <= smallest:
        chances = [pass_at_k(len(group.samples), count, k) for group, count in zip(groups, right, strict=True)]
        out.append(metric(f"eval/{name}/pass_at_{k}", float(np.mean(chances)), len(groups)))
        k *= 2
    return out


def pass_at_k(n: int, right: int, k: int) -> float:
    """Return the chance that k of n answers hold a right one: 1 − C(n−right, k)/C(n, k) (Chen et al. 2021, eq. 1).

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)
