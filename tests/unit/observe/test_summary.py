from __future__ import annotations

import json

from treadle.observe.summary import accuracies, series, summarize

ROWS = [
    {"rollout_id": 0, "eval/sums/accuracy": 0.25, "eval/other/accuracy": 0.5, "eval/sums/failed_count": 1.0},
    {"rollout_id": 0, "rollout/reward_mean": 0.125, "rollout/tokens_per_second": 100.0, "train/tokens_per_second": 10.0,
     "rollout/failed_count": 2.0, "perf/peak_memory_gib": 3.0, "perf/memory_gib": 2.5, "perf/train_asleep_gib": 0.5,
     "perf/engine_awake_gib": 1.0},
    {"rollout_id": 1, "rollout/reward_mean": 0.75, "rollout/tokens_per_second": 300.0, "train/tokens_per_second": None,
     "rollout/dropped/too_long": 3.0, "rollout/dropped/stale": 1.0, "perf/peak_memory_gib": 4.0, "perf/train_awake_gib": 4.0,
     "perf/train_asleep_gib": 0.25},
    {"rollout_id": 2, "rollout/reward_mean": 0.5, "rollout/tokens_per_second": 110.0, "train/skipped_steps": 1.0,
     "rollout/failed_count": 1.0, "eval/sums/accuracy": 0.625},
]  # fmt: skip


def test_the_numbers_of_a_run() -> None:
    assert summarize(ROWS, 61) == {
        "eval_before": {"sums": 0.25, "other": 0.5},
        "eval_after": {"sums": 0.625},
        "reward_first": 0.125,
        "reward_last": 0.5,
        "reward_best": 0.75,
        "num_rollout": 3,
        "seconds": 61.0,
        "rollout_tokens_per_second": 110.0,
        "train_tokens_per_second": 10.0,
        "peak_memory_gib": 4.0,
        "turn_memory_gib": {"train": [4.0, 0.5]},
        "num_failed_samples": 3,
        "num_dropped_samples": 4,
        "num_failed_eval_answers": 1,
        "num_skipped_steps": 1,
    }


def test_a_run_without_anything_has_a_summary_too() -> None:
    found = summarize([], 0.5)
    assert found["reward_first"] is found["peak_memory_gib"] is None
    assert found["eval_before"] == found["eval_after"] == {}
    assert found["num_rollout"] == found["num_failed_samples"] == 0
    json.dumps(found, allow_nan=False)


def test_numbers_that_are_not_finite_are_left_out() -> None:
    rows = [
        {"rollout_id": i, "rollout/reward_mean": value}
        for i, value in enumerate([float("nan"), 0.5, None, float("inf")])
    ]
    found = summarize(rows, 1.0)
    assert (found["reward_first"], found["reward_last"], found["reward_best"], found["num_rollout"]) == (
        0.5,
        0.5,
        0.5,
        4,
    )


def test_a_series_is_in_order_of_rollout_and_the_later_value_counts() -> None:
    rows = [{"rollout_id": 3, "a": 1.0}, {"rollout_id": 1, "a": 2.0}, {"rollout_id": 3, "a": 4.0}]
    assert series(rows, "a") == [(1, 2.0), (3, 4.0)]


def test_evaluations_keep_the_order_they_were_made_in() -> None:
    rows = [{"rollout_id": 0, "eval/a/accuracy": 0.1}, {"rollout_id": 0, "eval/a/accuracy": 0.2}]
    assert accuracies(rows) == {"a": [(0, 0.1), (0, 0.2)]}
