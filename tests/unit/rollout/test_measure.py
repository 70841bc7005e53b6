"""The metrics of a rollout, by hand."""

import math

import numpy as np
import pytest

from treadle.metrics import reduce_metrics
from treadle.rollout.measure import reward_metrics, rollout_metrics
from treadle.types import NO_VERSION, Group, Prompt, Sample, Status


def make_sample(
    index, sampled, *, reward=None, status=Status.COMPLETED, versions=None, logprobs=None, parts=None, prompt=2
):
    size = prompt + sampled
    mask = np.arange(size) >= prompt
    values = np.zeros(size, dtype=np.float32)
    values[mask] = -0.5 if logprobs is None else logprobs
    ages = np.full(size, NO_VERSION, dtype=np.int32)
    ages[mask] = 5 if versions is None else versions
    return Sample(
        group_id=0,
        index=index,
        token_ids=np.arange(size, dtype=np.int32),
        loss_mask=mask,
        rollout_logprobs=values,
        weight_versions=ages,
        temperature=1.0,
        status=status,
        reward=reward,
        reward_parts=parts or {},
    )


def make_group(samples, prompt=2):
    return Group(Prompt(0, tuple(range(prompt)), ""), tuple(samples))


GROUPS = [
    make_group(
        [
            make_sample(0, 3, reward=1.0, parts={"math": 1.0, "length": 0.5}),
            make_sample(1, 5, reward=0.0, status=Status.TRUNCATED, parts={"math": 0.0, "length": 0.1}),
        ]
    ),
    make_group([make_sample(0, 4, reward=0.5), make_sample(1, 2, reward=0.5, status=Status.ABORTED)], prompt=6),
    make_group([make_sample(0, 1, status=Status.FAILED), make_sample(1, 0, reward=2.0, status=Status.ABORTED)]),
]


def test_by_hand():
    values = reduce_metrics(rollout_metrics(GROUPS, seconds=2.0, version=5))
    rewards = np.array([1.0, 0.0, 0.5, 0.5, 2.0])
    assert values == pytest.approx(
        {
            "rollout/num_samples": 6,
            "rollout/num_tokens": 3 + 5 + 4 + 2 + 1,
            "rollout/failed_count": 1,
            "rollout/prompt_length_mean": (2 + 6 + 2) / 3,
            "rollout/response_length_mean": 15 / 6,
            "rollout/response_length_max": 5,
            "rollout/truncated_fraction": 1 / 6,
            "rollout/aborted_fraction": 2 / 6,
            "rollout/zero_signal_group_fraction": 2 / 3,  # the second, and the third with one scored sample
            "rollout/seconds": 2.0,
            "rollout/tokens_per_second": 7.5,
            "rollout/reward_mean": 0.8,
            "rollout/reward_std": math.sqrt(((rewards - 0.8) ** 2).mean()),
            "rollout/reward_min": 0.0,
            "rollout/reward_max": 2.0,
            "rollout/reward/math": 0.5,
            "rollout/reward/length": 0.3,
            "rollout/logprob_mean": -0.5,
            "rollout/weight_lag_max": 0,
        }
    )


def test_weight_lag_is_that_of_the_oldest_token_and_logprobs_are_of_sampled_tokens_only():
    groups = [
        make_group([make_sample(0, 3, versions=[4, 4, 6], logprobs=[-1, -2, -3]), make_sample(1, 1, versions=[7])])
    ]
    values = reduce_metrics(rollout_metrics(groups, seconds=1.0, version=7))
    assert values["rollout/weight_lag_max"] == 3
    assert values["rollout/logprob_mean"] == pytest.approx((-1 - 2 - 3 - 0.5) / 4)


def test_means_join_by_their_weights():
    halves = [m for group in GROUPS for m in rollout_metrics([group], seconds=1.0, version=5)]
    whole = reduce_metrics(rollout_metrics(GROUPS, seconds=3.0, version=5))
    joined = reduce_metrics(halves)
    not_linear = {"rollout/reward_std", "rollout/tokens_per_second"}
    for name in whole.keys() - not_linear:
        assert joined[name] == pytest.approx(whole[name]), name


def test_nothing_was_scored_or_sampled():
    groups = [make_group([make_sample(0, 0, status=Status.FAILED)])]
    values = reduce_metrics(rollout_metrics(groups, seconds=0.0, version=1))
    assert values["rollout/num_samples"] == values["rollout/failed_count"] == 1
    assert values["rollout/tokens_per_second"] == 0.0
    assert not {name for name in values if "reward" in name or "logprob" in name or "lag" in name}


def test_parts_that_only_some_samples_have():
    samples = [
        make_sample(0, 1, reward=1.0, parts={"a": 1.0}),
        make_sample(1, 1, reward=0.0, parts={"a": 0.0, "b": 4.0}),
    ]
    parts = {m.name: (m.value, m.weight) for m in reward_metrics(samples) if m.name.startswith("rollout/reward/")}
    assert parts == {"rollout/reward/a": (0.5, 2), "rollout/reward/b": (4.0, 1)}
