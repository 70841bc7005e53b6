from __future__ import annotations

import math
import sys
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from treadle.errors import DataError
from treadle.observe.curve import EVAL_COLOURS, REWARD, draw_curve, smoothed, with_gaps
from treadle.observe.metric_lines import metric_line


def write(path: Path, rows: list[tuple[int, dict[str, float]]]) -> Path:
    path.write_bytes(b"".join(metric_line(rollout_id, values) for rollout_id, values in rows))
    return path


def num_pixels(picture: Path, colour: str) -> int:
    """How many pixels have exactly this colour."""
    pixels = (matplotlib.image.imread(picture)[..., :3] * 255).round().astype(int)
    wanted = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    return int(np.all(pixels == wanted, axis=-1).sum())


def test_a_run_is_drawn_with_its_rewards_and_evaluations(tmp_path: Path) -> None:
    rows = [
        (i, {"rollout/reward_mean": i / 20, "train/entropy": 1.0, "rollout/response_length_mean": 9.0})
        for i in range(20)
    ]
    rows += [(0, {"eval/a$b/accuracy": 0.2}), (20, {"eval/a$b/accuracy": 0.7})]
    out = tmp_path / "curve.png"
    assert draw_curve(write(tmp_path / "m.jsonl", rows), out) == out
    assert num_pixels(out, REWARD) > 500
    assert num_pixels(out, EVAL_COLOURS[0]) > 100
    assert num_pixels(out, EVAL_COLOURS[1]) == 0
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    "rows",
    [
        [(0, {"rollout/reward_mean": 0.5})],
        [(5, {"rollout/reward_mean": -3.0}), (9, {"rollout/reward_mean": 12.0})],
        [(i, {"rollout/reward_mean": float("nan") if 3 < i < 7 else 0.1 * i}) for i in range(12)],
    ],
    ids=["one point", "below zero, with a gap", "not finite"],
)
def test_few_points_and_gaps_are_drawn(tmp_path: Path, rows: list[tuple[int, dict[str, float]]]) -> None:
    out = tmp_path / "curve.png"
    assert draw_curve(write(tmp_path / "m.jsonl", rows), out) == out
    assert num_pixels(out, REWARD) > 10


def test_evaluations_alone_are_drawn(tmp_path: Path) -> None:
    out = tmp_path / "curve.png"
    assert draw_curve(write(tmp_path / "m.jsonl", [(0, {"eval/a/accuracy": 0.5})]), out) == out
    assert num_pixels(out, EVAL_COLOURS[0]) > 10
    assert num_pixels(out, REWARD) == 0


def test_nothing_to_draw_writes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "curve.png"
    assert draw_curve(tmp_path / "missing.jsonl", out) is None
    assert (
        draw_curve(write(tmp_path / "m.jsonl", [(0, {"train/loss": 1.0, "rollout/reward_mean": math.nan})]), out)
        is None
    )
    assert not out.exists()


def test_a_malformed_metrics_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match=r"m\.jsonl:1"):
        draw_curve(tmp_path / "m.jsonl", tmp_path / "curve.png")


def test_no_global_state_of_pyplot_is_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    draw_curve(write(tmp_path / "m.jsonl", [(0, {"rollout/reward_mean": 0.5})]), tmp_path / "curve.png")
    assert "matplotlib.pyplot" not in sys.modules


def test_smoothing_keeps_a_line_in_the_middle_and_never_leaves_the_range() -> None:
    assert smoothed([0.0, 1.0, 2.0, 3.0, 4.0], 5)[2] == 2.0
    assert smoothed([2.0], 5) == [2.0]
    assert smoothed([], 5) == []
    values = [0.0, 1.0, 0.0, 1.0, 1.0, 0.0]
    assert all(0 <= v <= 1 for v in smoothed(values, 3))


def test_a_line_breaks_where_rollouts_are_missing() -> None:
    xs, ys = with_gaps([(3, 1.0), (4, 1.5), (6, 2.0)])
    assert xs == [3.0, 4.0, 5.0, 6.0]
    assert [y for y in ys if not math.isnan(y)] == [1.0, 1.5, 2.0]
    assert math.isnan(ys[2])
