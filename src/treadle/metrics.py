"""Metrics that carry their own reduction, and the table that describes every one of them.

Low layers return `Metric`s; `reduce_metrics` joins those of many micro-batches or ranks into one number per name.
`METRICS` is the only place a metric is described: the docs page is generated from it, and a name that is not in
it can't be made.

    >>> reduce_metrics([metric("train/entropy", 1.0, weight=3), metric("train/entropy", 2.0, weight=1)])
    {'train/entropy': 1.25}
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

Reduction = Literal["mean", "sum", "max", "min", "last"]


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One row of the table. A `<word>` in the name stands for any text without a slash."""

    name: str
    reduction: Reduction
    description: str
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Metric:
    """One measured number; `weight` is the number of items it is the mean of."""

    name: str
    value: float
    weight: float = 1.0


_m = MetricSpec
# fmt: off
METRICS: tuple[MetricSpec, ...] = (
    _m("rollout/reward_mean", "mean", "Mean reward of the scored samples, before any shaping."),
    _m("rollout/reward_std", "mean", "Standard deviation of the reward over the scored samples of the rollout."),
    _m("rollout/reward_min", "min", "Smallest reward of the rollout."),
    _m("rollout/reward_max", "max", "Largest reward of the rollout."),
    _m("rollout/reward/<part>", "mean", "Mean of one named part of the reward, before its weight."),
    _m("rollout/response_length_mean", "mean", "Mean number of sampled tokens in a sample.", "tokens"),
    _m("rollout/response_length_max", "max", "Longest sample.", "tokens"),
    _m("rollout/prompt_length_mean", "mean", "Mean length of the prompts.", "tokens"),
    _m("rollout/truncated_fraction", "mean", "Samples that ran into the length limit."),
    _m("rollout/aborted_fraction", "mean", "Samples the engine was told to stop."),
    _m("rollout/failed_count", "sum",
       "Samples whose reward or environment raised or ran out of time; not trained.", "samples"),
    _m("rollout/zero_signal_group_fraction", "mean", "Groups whose rewards are all equal, which give no gradient."),
    _m("rollout/num_samples", "sum", "Samples in the rollout.", "samples"),
    _m("rollout/num_tokens", "sum", "Tokens sampled in the rollout.", "tokens"),
    _m("rollout/logprob_mean", "mean", "Mean logprob of the sampled tokens, as the engine reported it.", "nats"),
    _m("rollout/weight_lag_max", "max",
       "Most versions that the weights of any sampled token were behind the trainer.", "versions"),
    _m("rollout/seconds", "sum", "Wall time of generation and scoring.", "s"),
    _m("rollout/tokens_per_second", "mean", "Sampled tokens per second of the rollout's wall time.", "tokens/s"),
    _m("rollout/epoch", "last", "Epoch of the data the next prompt comes from."),
    _m("rollout/dropped/<reason>", "sum", "Samples left out of training, by reason.", "samples"),
    _m("train/loss", "mean",
       "The whole loss: policy loss, minus entropy bonus, plus KL loss; mean over the optimizer steps of the rollout."),
    _m("train/policy_loss", "mean", "The policy part of the loss."),
    _m("train/kl", "mean",
       "KL estimate per token (k3) to the reference model, or to the rollout policy if there is none.", "nats"),
    _m("train/kl_coef", "last", "Weight of KL in this rollout, if kl_target is set."),
    _m("train/teacher_kl", "mean",
       "Distillation: mean of student's minus teacher's logprob of the trained tokens, before the step.", "nats"),
    _m("train/kl_loss", "mean", "The KL part of the loss, before its coefficient."),
    _m("train/entropy", "mean",
       "Exact entropy of the policy over the whole vocabulary, mean over trained tokens.", "nats"),
    _m("train/clip_fraction", "mean", "Trained tokens whose ratio was clipped in the direction of the update."),
    _m("train/ratio_mean", "mean", "Mean of the probability ratio new / old; 1 at the first step of a rollout."),
    _m("train/ratio_max", "max", "Largest probability ratio new / old."),
    _m("train/advantage_mean", "mean", "Mean advantage over trained tokens."),
    _m("train/advantage_abs_mean", "mean", "Mean absolute advantage over trained tokens."),
    _m("train/grad_norm", "last", "Global norm of the gradient before clipping."),
    _m("train/lr", "last", "Learning rate of the step."),
    _m("train/rollout_logprob_abs_diff", "mean",
       "Mean gap between the trainer's and the engine's logprob of the same token.", "nats"),
    _m("train/rollout_logprob_abs_diff_max", "max",
       "Largest gap between the trainer's and the engine's logprob of the same token.", "nats"),
    _m("train/rollout_kl", "mean", "KL estimate per token (k3) between the trainer's and the engine's policy.", "nats"),
    _m("train/correction_mean", "mean", "Mean factor of correction and token selection on the policy loss."),
    _m("train/correction_dropped_fraction", "mean", "Trained tokens that correction or selection dropped (factor 0)."),
    _m("train/num_tokens", "sum", "Trained tokens of the rollout.", "tokens"),
    _m("train/num_samples", "sum", "Samples the loss was taken over.", "samples"),
    _m("train/num_skipped_samples", "sum",
       "Samples without advantage that were left out of forward and backward, and of the train metrics.", "samples"),
    _m("train/num_steps", "sum", "Optimizer steps, including skipped ones."),
    _m("train/num_micro_batches", "sum", "Forward and backward passes."),
    _m("train/skipped_steps", "sum", "Optimizer steps skipped because the loss or a gradient was not finite."),
    _m("train/seconds", "sum", "Wall time of training on the rollout.", "s"),
    _m("train/tokens_per_second", "mean",
       "Tokens of all sequences per second of training; a prompt counts with each of its samples.", "tokens/s"),
    _m("critic/loss", "mean", "Value loss (ppo only); mean over the optimizer steps of the rollout."),
    _m("critic/value_mean", "mean", "Mean value that the critic gave the states of trained tokens before the step."),
    _m("critic/return_mean", "mean", "Mean return of the same states, which the critic learns to predict."),
    _m("critic/error_squared", "mean", "Mean squared difference between value and return."),
    _m("critic/clip_fraction", "mean", "Trained tokens whose value loss was clipped."),
    _m("critic/grad_norm", "last", "Global norm of the critic's gradient before clipping."),
    _m("critic/lr", "last", "Learning rate of the critic's step."),
    _m("critic/skipped_steps", "sum", "Critic steps skipped because the loss or a gradient was not finite."),
    _m("perf/step_seconds", "last", "Wall time from one rollout to the next, without evaluation and saving.", "s"),
    _m("perf/publish_seconds", "sum", "Wall time of handing the weights to the engine.", "s"),
    _m("perf/save_seconds", "sum", "Wall time of writing the checkpoint before this rollout.", "s"),
    _m("perf/eval_seconds", "sum", "Wall time of evaluation.", "s"),
    _m("perf/memory_gib", "last", "Resident memory of the process (device memory on a GPU).", "GiB"),
    _m("perf/peak_memory_gib", "max", "Highest memory of the process so far (device memory on a GPU).", "GiB"),
    _m("perf/train_awake_gib", "max", "Peak memory of a train worker in its previous turn (with colocate).", "GiB"),
    _m("perf/train_asleep_gib", "max", "Peak memory of a train worker while it slept (with colocate).", "GiB"),
    _m("perf/engine_awake_gib", "max", "Peak memory of an engine in its turn (with colocate).", "GiB"),
    _m("perf/engine_asleep_gib", "max", "Peak memory of an engine while it slept (with colocate).", "GiB"),
    _m("eval/<set>/accuracy", "mean", "Mean reward of the evaluation set."),
    _m("eval/<set>/pass_at_<k>", "mean",
       "Chance that at least one of k samples has reward 1 (unbiased estimate, Chen et al. 2021)."),
    _m("eval/<set>/response_length_mean", "mean", "Mean length of the answers.", "tokens"),
    _m("eval/<set>/truncated_fraction", "mean", "Answers that ran into the length limit."),
    _m("eval/<set>/failed_count", "sum", "Answers whose reward raised or ran out of time.", "samples"),
    _m("eval/<set>/num_samples", "sum", "Answers scored.", "samples"),
)
# fmt: on


@lru_cache(maxsize=1)
def _patterns() -> list[tuple[re.Pattern[str], MetricSpec]]:
    return [(re.compile(re.sub("<.*?>", "[^/]+", re.escape(row.name))), row) for row in METRICS]


@lru_cache(maxsize=4096)
def spec_of(name: str) -> MetricSpec:
    """Return the row of the table to which a metric name belongs; raises `KeyError` if there is none."""
    for pattern, row in _patterns():
        if pattern.fullmatch(name):
            return row
    raise KeyError(f"metric {name!r} is not described in treadle.metrics.METRICS; add a row there")


def metric(name: str, value: float, weight: float = 1.0) -> Metric:
    """Make a metric, checked against the table."""
    spec_of(name)
    return Metric(name, float(value), float(weight))


_REDUCE: Mapping[str, Callable[[list[float]], float]] = {
    "sum": math.fsum,
    "max": max,
    "min": min,
    "last": lambda values: values[-1],
}


def reduce_metrics(metrics: Iterable[Metric]) -> dict[str, float]:
    """Join metrics of the same name by their reduction; a mean over weight 0 is left out."""
    by_name: dict[str, list[Metric]] = {}
    for item in metrics:
        by_name.setdefault(item.name, []).append(item)
    out: dict[str, float] = {}
    for name, items in by_name.items():
        kind, values = spec_of(name).reduction, [item.value for item in items]
        if kind != "mean":
            out[name] = _REDUCE[kind](values)
        elif (total := math.fsum(item.weight for item in items)) > 0:
            out[name] = math.fsum(item.value * item.weight for item in items) / total
    return out
