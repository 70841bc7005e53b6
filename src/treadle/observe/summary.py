"""The outcome of a run in a few numbers, from its metrics."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from treadle.observe.progress_state import is_accuracy

Row = Mapping[str, Any]


def finite(row: Row, name: str) -> float | None:
    """Return a number of a metrics row; None if it is absent, null or not finite."""
    value = row.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def series(rows: Sequence[Row], name: str) -> list[tuple[int, float]]:
    """Return (rollout id, value) of one metric in order of rollout; of two values of a rollout, the later counts."""
    found = {int(row["rollout_id"]): value for row in rows if (value := finite(row, name)) is not None}
    return sorted(found.items())


def accuracies(rows: Sequence[Row]) -> dict[str, list[tuple[int, float]]]:
    """Return (rollout id, accuracy) of every evaluation by set, in the order in which they were written."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        for name in row:
            value = finite(row, name) if is_accuracy(name) else None
            if value is not None:
                found.setdefault(name.split("/")[1], []).append((int(row["rollout_id"]), value))
    return found


def summarize(rows: Sequence[Row], seconds: float) -> dict[str, Any]:
    """Return the numbers of summary.json; `rows` are those of metrics.jsonl, `seconds` the wall time of the run.

    `eval_before` and `eval_after` are the first and the last accuracy of each set; a set evaluated once has only the
    first. Rewards are means over one rollout: the first, the last, the best. Speeds are medians over rollouts. What
    was never measured is None, or 0 for a count.
    """
    evals = accuracies(rows)
    rewards = [value for _, value in series(rows, "rollout/reward_mean")]
    memory = [
        v for row in rows for key in ("perf/peak_memory_gib", "perf/memory_gib") if (v := finite(row, key)) is not None
    ]
    return {
        "eval_before": {name: points[0][1] for name, points in evals.items()},
        "eval_after": {name: points[-1][1] for name, points in evals.items() if len(points) > 1},
        "reward_first": rewards[0] if rewards else None,
        "reward_last": rewards[-1] if rewards else None,
        "reward_best": max(rewards, default=None),
        "num_rollout": len(
            {row["rollout_id"] for row in rows if any(k.startswith(("rollout/", "train/")) for k in row)}
        ),
        "seconds": float(seconds),
        "rollout_tokens_per_second": _median(rows, "rollout/tokens_per_second"),
        "train_tokens_per_second": _median(rows, "train/tokens_per_second"),
        "peak_memory_gib": max(memory, default=None),
        "turn_memory_gib": _turns(rows),
        "num_failed_samples": _count(rows, "rollout/failed_count"),
        "num_dropped_samples": sum(_count(rows, name) for name in _names(rows, "rollout/dropped/", "")),
        "num_failed_eval_answers": sum(_count(rows, name) for name in _names(rows, "eval/", "/failed_count")),
        "num_skipped_steps": _count(rows, "train/skipped_steps"),
    }


def _turns(rows: Sequence[Row]) -> dict[str, list[float]]:
    """Return the peak memory awake and asleep of each kind of worker that took turns."""
    names = {
        "train": ("perf/train_awake_gib", "perf/train_asleep_gib"),
        "engine": ("perf/engine_awake_gib", "perf/engine_asleep_gib"),
    }
    found = {kind: [series(rows, name) for name in both] for kind, both in names.items()}
    return {kind: [max(v for _, v in values) for values in both] for kind, both in found.items() if all(both)}


def _names(rows: Sequence[Row], start: str, end: str) -> set[str]:
    return {name for row in rows for name in row if name.startswith(start) and name.endswith(end)}


def _median(rows: Sequence[Row], name: str) -> float | None:
    values = [value for _, value in series(rows, name)]
    return statistics.median(values) if values else None


def _count(rows: Sequence[Row], name: str) -> int:
    return int(sum(finite(row, name) or 0.0 for row in rows))
