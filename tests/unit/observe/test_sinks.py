from __future__ import annotations

import importlib.util
import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from treadle.config.sections import ObserveSection
from treadle.errors import ConfigError, DataError, TreadleError
from treadle.observe.metric_lines import read_metrics
from treadle.observe.run_folder import RunFolder
from treadle.observe.sinks import JsonlSink, MetricSink, OptionalSink, TensorBoardSink, open_sinks


def test_a_line_is_on_disk_before_write_returns(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "m.jsonl")
    sink.write(4, {"train/loss": 0.1})
    assert (tmp_path / "m.jsonl").read_bytes() == b'{"rollout_id": 4, "train/loss": 0.1}\n'
    sink.close()


def test_a_full_disk_is_one_clear_line_and_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    sink = JsonlSink(path)
    sink.write(0, {"train/loss": 0.5})
    size = path.stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, hard))  # the next line is cut short after 10 bytes
    try:
        with pytest.raises(
            TreadleError, match=r"metrics of rollout 1 can't be written to .*m\.jsonl .*--load"
        ) as caught:
            sink.write(1, {"train/loss": 0.25})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(caught.value)
    assert read_metrics(path) == [{"rollout_id": 0, "train/loss": 0.5}]
    assert path.stat().st_size == size
    sink.write(1, {"train/loss": 0.25})  # space was freed
    sink.close()
    assert [row["rollout_id"] for row in read_metrics(path)] == [0, 1]


def test_a_line_cut_short_by_a_kill_does_not_swallow_the_next(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"rollout_id": 0, "a": 1}\n{"rollout_id": 1, "a"')
    assert read_metrics(path) == [{"rollout_id": 0, "a": 1}]
    sink = JsonlSink(path)
    sink.write(1, {"a": 2.0})
    sink.close()
    assert read_metrics(path) == [{"rollout_id": 0, "a": 1}, {"rollout_id": 1, "a": 2.0}]


@pytest.mark.parametrize("bad", [b"not json\n", b"[1]\n", b'{"a": 1}\n', b'{"rollout_id": null}\n'])
def test_a_malformed_line_names_file_and_line(tmp_path: Path, bad: bytes) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"rollout_id": 0}\n' + bad + b'{"rollout_id": 1}\n')
    with pytest.raises(DataError, match=r"m\.jsonl:2: not a line of metrics"):
        read_metrics(path)


def test_write_after_close_is_refused(tmp_path: Path) -> None:
    for sink in (JsonlSink(tmp_path / "m.jsonl"), TensorBoardSink(tmp_path / "tb")):
        sink.close()
        with pytest.raises(TreadleError, match="rollout 5 came too late"):
            sink.write(5, {"a": 1.0})


class Failing:
    """A sink that fails at its second write."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.num_closed = 0

    def write(self, rollout_id: int, values: object) -> None:
        self.seen.append(rollout_id)
        if len(self.seen) == 2:
            raise OSError("No space left on device\nsecond line")

    def close(self) -> None:
        self.num_closed += 1


def test_a_failing_optional_sink_is_warned_about_once_and_switched_off() -> None:
    warnings: list[str] = []
    inner = Failing()
    sink = OptionalSink("TensorBoard", lambda: inner, warnings.append)
    for rollout_id in range(4):
        sink.write(rollout_id, {})
    sink.close()
    assert inner.seen == [0, 1]
    assert inner.num_closed == 1
    assert warnings == [
        "TensorBoard is switched off for the rest of the run: No space left on device; "
        "metrics.jsonl still has everything"
    ]


def test_an_optional_sink_that_can_not_be_made_is_off(tmp_path: Path) -> None:
    (tmp_path / "tb").write_text("a file where the folder should be")
    warnings: list[str] = []
    sink = OptionalSink("TensorBoard", lambda: TensorBoardSink(tmp_path / "tb"), warnings.append)
    sink.write(0, {"a": 1.0})
    sink.close()
    assert len(warnings) == 1
    assert "File exists" in warnings[0]


def test_an_optional_sink_that_fails_to_close_only_warns() -> None:
    class BadClose(Failing):
        def close(self) -> None:
            raise RuntimeError("upload failed")

    warnings: list[str] = []
    sink = OptionalSink("wandb", BadClose, warnings.append)
    sink.close()
    sink.close()
    assert warnings == ["wandb could not be closed: upload failed; metrics.jsonl has everything"]


def test_tensorboard_forgets_what_a_resumed_run_does_anew(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = TensorBoardSink(tmp_path)
    for step in range(5):
        first.write(step, {"train/loss": float(step)})
    first.close()
    second = TensorBoardSink(tmp_path, start_rollout_id=3)
    second.write(3, {"train/loss": 30.0})
    second.close()
    events = EventAccumulator(str(tmp_path), purge_orphaned_data=True)
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 30.0)]


def test_importing_observe_stays_light_and_tensorboard_needs_no_tensorflow(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
import treadle.observe.sinks, treadle.observe.progress, treadle.observe.curve, treadle.observe.summary
heavy = {{"matplotlib", "tensorboard", "torch", "transformers", "wandb", "rich.live"}} & set(sys.modules)
assert not heavy, heavy
sink = treadle.observe.sinks.TensorBoardSink(Path({str(tmp_path)!r}))
sink.write(0, {{"a": 1.0}})
assert not {{"tensorflow", "torch"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def failing_warn(text: str) -> None:
    raise AssertionError(text)


def test_open_sinks_makes_what_the_section_asks_for(tmp_path: Path) -> None:
    folder = RunFolder.make(tmp_path / "run").open()
    sink: MetricSink = open_sinks(folder, ObserveSection(tensorboard=False), failing_warn)
    sink.write(0, {"train/loss": 1.0})
    sink.close()
    assert not folder.tensorboard.exists()
    sink = open_sinks(folder, ObserveSection(), failing_warn)
    sink.write(1, {"train/loss": 2.0})
    sink.close()
    assert len(list(folder.tensorboard.glob("events.out.tfevents.*"))) == 1
    assert [json.loads(line)["rollout_id"] for line in folder.metrics.read_text().splitlines()] == [0, 1]


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_wandb_that_is_not_installed_is_one_clear_error(tmp_path: Path) -> None:
    folder = RunFolder.make(tmp_path / "run").open()
    with pytest.raises(ConfigError, match=r"wandb, which is not installed: run `pip install 'treadle\[wandb\]'`"):
        open_sinks(folder, ObserveSection(wandb_project="p"), failing_warn)
