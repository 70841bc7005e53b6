"""PPO whose critic has workers of its own: the weights of both end where they do when ranks are shared."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from treadle.config import load_config
from treadle.run.start import train

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]

NUM_ROLLOUT = 3
PPO = """--advantage-estimator ppo --critic-lr 3e-3 --normalize-advantages --lambd 0.95 --kl-coef 0.05
    --num-steps-per-rollout 2 --num-critic-only-steps 1 --save-interval 1 --rollout-max-response-len 24""".split()
MEASURED = (
    "rollout/reward_mean",
    "train/loss",
    "train/advantage_abs_mean",
    "critic/loss",
    "critic/value_mean",
    "critic/return_mean",
    "critic/error_squared",
    "critic/grad_norm",
    "critic/lr",
)

Run = Callable[..., Path]


def train_toy(toy_task: Sequence[str], folder: Path, *flags: str) -> Path:
    words = [*toy_task, *PPO, "--num-rollout", str(NUM_ROLLOUT), "--run-dir", str(folder), *flags]
    train(load_config(None, words), "ppo")
    return folder


@pytest.fixture
def run(toy_task: Sequence[str], tmp_path: Path) -> Run:
    """`run("name", *flags)`: a PPO run in one process, or over workers; returns its folder."""
    return lambda name, *flags: train_toy(toy_task, tmp_path / name, *flags)


@pytest.fixture(scope="module")
def shared(toy_task: Sequence[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the run in one process, where policy and critic share it. Read only."""
    return train_toy(toy_task, tmp_path_factory.mktemp("shared") / "run")


def tensors(run_folder: Path, part: str) -> dict[str, torch.Tensor]:
    files = (run_folder / "checkpoints" / f"rollout_{NUM_ROLLOUT:06d}" / part).glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def assert_same_weights(folder: Path, other: Path) -> None:
    for part in ("model", "critic"):
        one, two = tensors(folder, part), tensors(other, part)
        assert one.keys() == two.keys()
        assert any(name.startswith("exp_avg") for name in one) == (part == "critic")  # AdamW's state is beside it
        for name, tensor in one.items():
            torch.testing.assert_close(tensor, two[name], rtol=0, atol=1e-5, msg=f"{part}/{name}")


@pytest.mark.parametrize(
    ("train_workers", "critic_workers", "more"),
    [(1, 1, ()), (2, 1, ()), (1, 2, ("--colocate",))],
)
def test_a_critic_of_its_own_ends_where_a_shared_one_does(
    ray_here: Any,
    run: Run,
    shared: Path,
    read_rows: Callable[[Path], list[dict]],
    train_workers: int,
    critic_workers: int,
    more: tuple[str, ...],
) -> None:
    numbers = ("--actor-num-gpus-per-node", str(train_workers), "--critic-num-gpus-per-node", str(critic_workers))
    own = run("own", "--runtime", "ray", "--rollout-num-gpus", "1", *numbers, *more)
    assert_same_weights(own, shared)
    rows = read_rows(shared), read_rows(own)
    assert ["train/loss" in row for row in rows[0]] == [False, True, True]
    for name in MEASURED:
        one, two = ([row[name] for row in of if name in row] for of in rows)
        assert len(one) == (2 if name.startswith("train") else 3)
        assert two == pytest.approx(one, abs=1e-5, rel=1e-4), name
    assert not [path.name for path in (own / "checkpoints").iterdir() if path.name.startswith(".")]


def test_what_one_wrote_the_other_resumes(ray_here: Any, run: Run, shared: Path, tmp_path: Path) -> None:
    own = ("--runtime", "ray", "--critic-num-nodes", "1", "--rollout-num-gpus", "1")
    run("there", *own, "--num-rollout", "2")
    run("back", "--num-rollout", "2")
    assert_same_weights(run("there", "--load", str(tmp_path / "there")), shared)
    assert_same_weights(run("back", *own, "--load", str(tmp_path / "back")), shared)


def test_a_critic_worker_that_is_killed_in_any_phase_is_resumed_from_the_last_checkpoint(
    ray_here: Any, run: Run, shared: Path, find_workers: Callable[..., list[int]], tmp_path: Path, capfd: Any
) -> None:
    phases = ["values", "train", "write"]
    saves = tmp_path / "killed" / "checkpoints"

    def kill(over: threading.Event) -> None:
        hit: set[int] = set()
        while not over.is_set() and phases:
            found = set(find_workers("CriticActor", phases[0])) - hit if any(saves.glob("*/manifest.json")) else set()
            for pid in list(found)[:1]:
                os.kill(pid, signal.SIGKILL)
                hit.add(pid)
                phases.pop(0)
            time.sleep(0.001)

    over = threading.Event()
    thread = threading.Thread(target=kill, args=(over,))
    thread.start()
    try:
        own = run("killed", "--runtime", "ray", "--rollout-num-gpus", "1", "--critic-num-gpus-per-node", "1")
    finally:
        over.set()
        thread.join(60)
    assert not phases, f"no critic worker was seen in {phases[0]}"
    assert capfd.readouterr().err.count("critic worker: ") == 3
    assert_same_weights(own, shared)
