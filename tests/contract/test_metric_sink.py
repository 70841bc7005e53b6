"""What every metric sink does.

To test your own, add an entry to SINKS: how it is made, and how its numbers are read back.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from treadle.observe.sinks import FanOut, JsonlSink, MetricSink, OptionalSink, TensorBoardSink
from treadle.observe.wandb_sink import WandbSink

Point = tuple[int, str, float | None]


@dataclass(frozen=True)
class SinkCase:
    make: Callable[[Path], MetricSink]
    read: Callable[[Path], list[Point]] | None


def read_jsonl(folder: Path) -> list[Point]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not strict JSON")

    rows = [json.loads(line, parse_constant=refuse) for line in (folder / "m.jsonl").read_text().splitlines()]
    assert all(next(iter(row)) == "rollout_id" for row in rows)
    return [(row["rollout_id"], name, value) for row in rows for name, value in row.items() if name != "rollout_id"]


def read_tensorboard(folder: Path) -> list[Point]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tb"), size_guidance={"scalars": 0})
    events.Reload()
    return [
        (point.step, name, None if not math.isfinite(point.value) else point.value)
        for name in events.Tags()["scalars"]
        for point in events.Scalars(name)
    ]


def nothing_to_warn_of(text: str) -> None:
    raise AssertionError(text)


SINKS = {
    "jsonl": SinkCase(lambda folder: JsonlSink(folder / "m.jsonl"), read_jsonl),
    "tensorboard": SinkCase(lambda folder: TensorBoardSink(folder / "tb"), read_tensorboard),
    "optional": SinkCase(
        lambda folder: OptionalSink("TensorBoard", lambda: TensorBoardSink(folder / "tb"), nothing_to_warn_of),
        read_tensorboard,
    ),
    "fan_out": SinkCase(
        lambda folder: FanOut([TensorBoardSink(folder / "tb"), JsonlSink(folder / "m.jsonl")]), read_jsonl
    ),
    "wandb": SinkCase(lambda folder: WandbSink("contract", "run", folder), None),
}


@pytest.fixture(params=SINKS)
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SinkCase:
    if request.param == "wandb":
        if importlib.util.find_spec("wandb") is None:
            pytest.skip("wandb is not installed")
        monkeypatch.setenv("WANDB_MODE", "offline")
    return SINKS[request.param]


def stored(case: SinkCase, folder: Path) -> list[Point]:
    if case.read is None:
        pytest.skip("its files have no public reader")
    return sorted(case.read(folder), key=lambda point: point[:2])


def test_everything_written_is_stored_after_close(case: SinkCase, tmp_path: Path) -> None:
    sink = case.make(tmp_path)
    sink.write(0, {"train/loss": 0.5, "train/entropy": 1.25})
    sink.write(0, {"eval/a/accuracy": 0.75})
    sink.write(7, {"train/loss": -2.0})
    sink.close()
    assert stored(case, tmp_path) == [
        (0, "eval/a/accuracy", 0.75),
        (0, "train/entropy", 1.25),
        (0, "train/loss", 0.5),
        (7, "train/loss", -2.0),
    ]


def test_values_that_are_not_finite_are_taken(case: SinkCase, tmp_path: Path) -> None:
    sink = case.make(tmp_path)
    values = {"a": float("nan"), "b": float("inf"), "c": -math.inf, "d": 1.0}
    sink.write(3, values)
    sink.close()
    assert stored(case, tmp_path) == [(3, "a", None), (3, "b", None), (3, "c", None), (3, "d", 1.0)]


def test_numpy_numbers_and_no_numbers_are_taken(case: SinkCase, tmp_path: Path) -> None:
    sink = case.make(tmp_path)
    sink.write(int(np.int64(1)), {"a": np.float32(0.5), "b": np.int64(4)})  # type: ignore[dict-item]
    sink.write(2, {})
    sink.close()
    assert stored(case, tmp_path) == [(1, "a", 0.5), (1, "b", 4.0)]


def test_write_leaves_the_values_alone(case: SinkCase, tmp_path: Path) -> None:
    values = {"a": 1.0, "b": float("inf")}
    sink = case.make(tmp_path)
    sink.write(0, values)
    sink.close()
    assert values == {"a": 1.0, "b": float("inf")}


def test_close_may_be_called_twice(case: SinkCase, tmp_path: Path) -> None:
    sink = case.make(tmp_path)
    sink.write(0, {"a": 1.0})
    sink.close()
    sink.close()
    assert stored(case, tmp_path) == [(0, "a", 1.0)]


def test_a_second_sink_on_the_same_place_adds_to_it(case: SinkCase, tmp_path: Path) -> None:
    for rollout_id in range(2):
        sink = case.make(tmp_path)
        sink.write(rollout_id, {"a": float(rollout_id)})
        sink.close()
    assert stored(case, tmp_path) == [(0, "a", 0.0), (1, "a", 1.0)]
