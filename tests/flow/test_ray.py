"""Whole tiny runs over Ray workers: the same numbers as in one process, many engines, lost workers, resume.

A lost worker is a real process that is killed, at every phase of the loop; what is counted are prompts, by the
samples of each rollout, and what is compared are the weights in the end.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from treadle.config import load_config
from treadle.errors import WorkerLostError
from treadle.run.start import train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RUN_SECONDS = 300.0
NUM_ROLLOUT = 4
STEPS = ["--rollout-max-response-len", "24", "--num-steps-per-rollout", "4"]  # long enough to be killed in
EXACT = (
    "rollout/reward_mean",
    "rollout/response_length_mean",
    "train/loss",
    "train/entropy",
    "train/grad_norm",
    "train/lr",
)
"""Not the engines' logprobs: prompts reach a remote engine one by one, so other rows share a matmul (1e-7 apart)."""


@pytest.fixture
def run_ray(ray_here: Any, toy_flags: list[str], tmp_path: Path) -> Callable[..., Path]:
    """`run_ray("name", *flags, meanwhile=None)`: a run over workers in this process; returns its folder.

    `meanwhile` is called in a thread, with an event that is set when the run is over.
    """

    def run(name: str, *flags: str, meanwhile: Callable[[threading.Event], None] | None = None) -> Path:
        folder = tmp_path / name
        words = [*toy_flags, "--runtime", "ray", "--num-rollout", str(NUM_ROLLOUT), "--run-dir", str(folder)]
        words += STEPS
        words += ["--health-check-interval-seconds", "0.5", "--health-check-timeout-seconds", "5", *flags]
        errors: list[BaseException] = []
        over = threading.Event()

        def guarded() -> None:
            assert meanwhile is not None
            try:
                meanwhile(over)
            except BaseException as error:
                errors.append(error)

        thread = None if meanwhile is None else threading.Thread(target=guarded)
        if thread is not None:
            thread.start()
        try:
            train(load_config(None, words), "toy")
        finally:
            over.set()
            if thread is not None:
                thread.join(RUN_SECONDS)
        assert not errors, errors
        return folder

    return run


@pytest.fixture
def local_run(toy_flags: list[str], tmp_path: Path) -> Path:
    """Folder of the same run in one process, undisturbed."""
    folder = tmp_path / "local"
    train(
        load_config(
            None,
            [*toy_flags, *STEPS, "--num-rollout", str(NUM_ROLLOUT), "--run-dir", str(folder), "--save-interval", "1"],
        ),
        "toy",
    )
    return folder


def weights(folder: Path) -> bytes:
    return (folder / "checkpoints" / f"rollout_{NUM_ROLLOUT:06d}" / "model" / "model.safetensors").read_bytes()


def assert_close_weights(folder: Path, other: Path) -> None:
    """Ranks add gradients in another order, and may write several files."""

    def read(run: Path) -> dict[str, torch.Tensor]:
        files = (run / "checkpoints" / f"rollout_{NUM_ROLLOUT:06d}" / "model").glob("*.safetensors")
        return {name: tensor for file in files for name, tensor in load_file(file).items()}

    one, two = read(folder), read(other)
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, two[name], rtol=0, atol=2e-5, msg=name)


def drawn(folder: Path) -> list[list[int]]:
    """Group ids of each rollout's samples, in order."""
    files = sorted((folder / "samples").glob("rollout_*.jsonl"))
    assert len(files) == NUM_ROLLOUT
    out = []
    for file in files:
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        out.append(list(dict.fromkeys(row["group_id"] for row in rows if "group_id" in row)))
    return out


def every_prompt_once() -> list[list[int]]:
    return [list(range(4 * i, 4 * i + 4)) for i in range(NUM_ROLLOUT)]


def kill_when(find: Callable[[], list[Any]], signum: int = signal.SIGKILL) -> Callable[[threading.Event], None]:
    """Send the signal to the first process that `find` gives, as soon as it gives one."""

    def wait_and_kill(over: threading.Event) -> None:
        while not over.is_set():
            found = find()
            if found:
                os.kill(found[0].pid, signum)
                return
            time.sleep(0.002)
        raise AssertionError("nothing was found to kill")

    return wait_and_kill


def test_one_worker_and_one_engine_do_what_one_process_does(
    run_ray: Callable[..., Path], local_run: Path, read_rows: Callable[[Path], list[dict]]
) -> None:
    folder = run_ray("ray", "--save-interval", "1")
    local, ray = read_rows(local_run), read_rows(folder)
    assert [[row[name] for name in EXACT] for row in ray] == [[row[name] for name in EXACT] for row in local]
    assert weights(folder) == weights(local_run)
    assert drawn(folder) == drawn(local_run) == every_prompt_once()
    assert [row["rollout/weight_lag_max"] for row in ray] == [0] * NUM_ROLLOUT


@pytest.mark.parametrize("transport", ["shm", "disk", "disk-delta", "broadcast"])
def test_several_engines_by_every_transport(run_ray: Callable[..., Path], local_run: Path, transport: str) -> None:
    flags = ("--rollout-num-gpus", "2", "--weight-transport", transport, "--save-interval", "4")
    assert weights(run_ray(transport, *flags)) == weights(local_run)


@pytest.mark.parametrize(
    ("method", "transport"), [("generate", "auto"), ("receive", "auto"), ("", "auto"), ("generate", "broadcast")]
)
def test_an_engine_that_is_killed_costs_nothing(
    run_ray: Callable[..., Path], local_run: Path, find_workers: Callable[..., list[Any]], method: str, transport: str
) -> None:
    """By `broadcast`, which no new engine can read the weights of, it waits until they are sent again."""
    kill = kill_when(lambda: find_workers("EngineActor", method))
    flags = ("--rollout-num-gpus", "2", "--save-interval", "4", "--weight-transport", transport)
    folder = run_ray("killed", *flags, meanwhile=kill)
    assert drawn(folder) == every_prompt_once()
    assert weights(folder) == weights(local_run)


@pytest.mark.parametrize("method", ["train", "save", "offer"])
def test_a_train_worker_that_is_killed_is_resumed_from_the_last_checkpoint(
    run_ray: Callable[..., Path],
    local_run: Path,
    find_workers: Callable[..., list[Any]],
    read_rows: Callable[[Path], list[dict]],
    tmp_path: Path,
    method: str,
) -> None:
    def find() -> list[Any]:
        metrics = tmp_path / "killed" / "metrics.jsonl"
        begun = metrics.is_file() and metrics.read_bytes().count(b"\n") >= 2
        return find_workers("TrainActor", method) if begun else []

    folder = run_ray("killed", "--save-interval", "1", meanwhile=kill_when(find))
    assert drawn(folder) == every_prompt_once()
    assert [row["rollout_id"] for row in read_rows(folder)] == list(range(NUM_ROLLOUT))
    assert weights(folder) == weights(local_run)


def test_without_restarts_a_lost_train_worker_ends_the_run_with_one_clear_error_and_resumes_by_hand(
    run_ray: Callable[..., Path], local_run: Path, find_workers: Callable[..., list[Any]], tmp_path: Path
) -> None:
    def find() -> list[Any]:
        saved = tmp_path / "killed" / "checkpoints" / "rollout_000002" / "manifest.json"
        return find_workers("TrainActor", "train") if saved.is_file() else []

    with pytest.raises(WorkerLostError, match=r"train worker: training of rollout \d: its worker died \(pid \d+"):
        run_ray("killed", "--save-interval", "1", "--max-restarts", "0", meanwhile=kill_when(find))
    folder = run_ray("killed", "--save-interval", "1", "--load", str(tmp_path / "killed"))
    assert drawn(folder) == every_prompt_once()
    assert weights(folder) == weights(local_run)


def test_a_rollout_worker_that_is_killed_is_resumed_too(
    run_ray: Callable[..., Path], local_run: Path, find_workers: Callable[..., list[Any]], tmp_path: Path
) -> None:
    def find() -> list[Any]:
        saved = tmp_path / "killed" / "checkpoints" / "rollout_000002" / "manifest.json"
        return find_workers("RolloutActor") if saved.is_file() else []

    folder = run_ray("killed", "--save-interval", "1", meanwhile=kill_when(find))
    assert drawn(folder) == every_prompt_once()
    assert weights(folder) == weights(local_run)


def test_an_engine_that_hangs_is_replaced(
    run_ray: Callable[..., Path], local_run: Path, find_workers: Callable[..., list[Any]]
) -> None:
    stop = kill_when(lambda: find_workers("EngineActor", "generate"), signal.SIGSTOP)
    folder = run_ray("hangs", "--health-check-timeout-seconds", "1", "--save-interval", "4", meanwhile=stop)
    assert drawn(folder) == every_prompt_once()
    assert weights(folder) == weights(local_run)


@pytest.mark.parametrize("on_publish", ["wait", "pause", "abort"])
def test_one_step_off(run_ray: Callable[..., Path], read_rows: Callable[[Path], list[dict]], on_publish: str) -> None:
    flags = ("--max-lag", "1", "--on-publish", on_publish, "--rollout-correction", "tis")
    folder = run_ray("ahead", *flags, "--rollout-max-response-len", "40")
    assert drawn(folder) == every_prompt_once()
    rows = read_rows(folder)
    assert [row["rollout/num_samples"] for row in rows] == [32] * NUM_ROLLOUT
    assert all(row["rollout/weight_lag_max"] <= 1 for row in rows)
    if on_publish == "wait":
        assert [row["rollout/weight_lag_max"] for row in rows] == [0, *[1] * (NUM_ROLLOUT - 1)]


def test_two_train_workers_end_where_one_does_and_one_that_is_killed_is_resumed(
    run_ray: Callable[..., Path], local_run: Path, find_workers: Callable[..., list[Any]], tmp_path: Path
) -> None:
    def find() -> list[Any]:
        saved = tmp_path / "two" / "checkpoints" / "rollout_000002" / "manifest.json"
        return find_workers("TrainActor", "train") if saved.is_file() else []

    two = ("--actor-num-gpus-per-node", "2", "--rollout-num-gpus", "1", "--save-interval", "1")
    folder = run_ray("two", *two, meanwhile=kill_when(find))
    assert drawn(folder) == every_prompt_once()
    assert_close_weights(folder, local_run)


def test_taking_turns_on_the_same_devices(run_ray: Callable[..., Path], local_run: Path) -> None:
    assert weights(run_ray("turns", "--colocate", "--save-interval", "4")) == weights(local_run)
