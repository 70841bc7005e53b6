"""A run in one process that is told to stop: it saves, says how it ended, and goes on as if it had not been stopped."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

RUN_SECONDS = 240.0
Rows = Callable[[Path], list[dict]]


def stop_after(process: Any, folder: Path, lines: int, signum: int) -> int:
    """Send the signal once so many rollouts are written; the exit code."""
    metrics = folder / "metrics.jsonl"

    def written() -> bool:
        return metrics.is_file() and metrics.read_bytes().count(b"\n") >= lines

    return process.signal_when(written, signum, RUN_SECONDS)


def weights(folder: Path, done: int) -> bytes:
    return (folder / "checkpoints" / f"rollout_{done:06d}" / "model" / "model.safetensors").read_bytes()


def test_sigterm_saves_even_where_no_checkpoint_was_asked_for_and_the_run_goes_on(
    start_program: Callable[..., Any], toy_flags: list[str], tmp_path: Path, read_rows: Rows
) -> None:
    folder, whole = tmp_path / "stopped", tmp_path / "whole"
    words = ["train", *toy_flags, "--run-dir"]
    assert stop_after(start_program(*words, str(folder), "--num-rollout", "1000"), folder, 3, signal.SIGTERM) == 143
    done = len(read_rows(folder))
    assert (folder / "checkpoints" / "latest").read_text().strip() == f"rollout_{done:06d}"
    assert (folder / "summary.json").is_file()
    end = str(done + 2)
    for run, more in ((folder, ["--load", str(folder)]), (whole, [])):
        program = start_program(*words, str(run), "--num-rollout", end, "--save-interval", end, *more)
        assert program.wait(RUN_SECONDS) == 0, program.output
    assert [row["rollout_id"] for row in read_rows(folder)] == list(range(done + 2))
    assert weights(folder, done + 2) == weights(whole, done + 2)


def test_ctrl_c_writes_no_checkpoint_that_nobody_asked_for(
    start_program: Callable[..., Any], toy_flags: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    program = start_program("train", *toy_flags, "--run-dir", str(folder), "--num-rollout", "1000")
    assert stop_after(program, folder, 1, signal.SIGINT) == 130
    assert not (folder / "checkpoints").exists()
    assert (folder / "summary.json").is_file()
