"""Evaluation sets: generate, score, and say how good the policy is."""

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
    """How a set is sampled, and how many answers each prompt gets: its own settings over the evaluation's."""
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
    """Metrics of one evaluated set. A failed answer counts as reward 0 and is counted apart."""
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
    smallest = min(len(group.samples) for group in groups)
    k = 2
    while k <= smallest:
        out.append(metric(f"eval/{name}/pass_at_{k}", float(np.mean([_pass_at_k(g, k) for g in groups])), len(groups)))
        k *= 2
    return out


def _pass_at_k(group: Group, k: int) -> float:
    right = sum(sample.reward is not None and sample.reward >= 1.0 for sample in group.samples)
    return pass_at_k(len(group.samples), right, k)


def pass_at_k(n: int, right: int, k: int) -> float:
    """Chance that k of n answers hold a right one: 1 − C(n−right, k)/C(n, k) (Chen et al. 2021, eq. 1).

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)
