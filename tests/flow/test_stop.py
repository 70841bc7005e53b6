"""A run in one process that is told to stop: it saves, says how it ended, and goes on as if it had not been stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

RUN_SECONDS = 240.0
Rows = Callable[[Path], list[dict]]


def start(flags: list[str], folder: Path, *more: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "treadle", "train", *flags, "--run-dir", str(folder), *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)


def stop_after(process: subprocess.Popen, folder: Path, lines: int, signum: int) -> int:
    """Send the signal once so many rollouts are written; the exit code."""
    deadline = time.monotonic() + RUN_SECONDS
    metrics = folder / "metrics.jsonl"
    while not (metrics.is_file() and metrics.read_bytes().count(b"\n") >= lines):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.stdout.read().decode()
        time.sleep(0.005)
    process.send_signal(signum)
    process.communicate(timeout=RUN_SECONDS)
    return process.returncode


def weights(folder: Path, done: int) -> bytes:
    return (folder / "checkpoints" / f"rollout_{done:06d}" / "model" / "model.safetensors").read_bytes()


def test_sigterm_saves_even_where_no_checkpoint_was_asked_for_and_the_run_goes_on(
    toy_flags: list[str], tmp_path: Path, read_rows: Rows
) -> None:
    folder, whole = tmp_path / "stopped", tmp_path / "whole"
    assert stop_after(start(toy_flags, folder, "--num-rollout", "1000"), folder, 3, signal.SIGTERM) == 143
    done = len(read_rows(folder))
    assert (folder / "checkpoints" / "latest").read_text().strip() == f"rollout_{done:06d}"
    assert (folder / "summary.json").is_file()
    end = str(done + 2)
    for run, more in ((folder, ["--load", str(folder)]), (whole, [])):
        process = start(toy_flags, run, "--num-rollout", end, "--save-interval", end, *more)
        output, _ = process.communicate(timeout=RUN_SECONDS)
        assert process.returncode == 0, output.decode()
    assert [row["rollout_id"] for row in read_rows(folder)] == list(range(done + 2))
    assert weights(folder, done + 2) == weights(whole, done + 2)


def test_ctrl_c_writes_no_checkpoint_that_nobody_asked_for(toy_flags: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert stop_after(start(toy_flags, folder, "--num-rollout", "1000"), folder, 1, signal.SIGINT) == 130
    assert not (folder / "checkpoints").exists()
    assert (folder / "summary.json").is_file()
