"""Whole tiny runs over Ray workers: the same numbers as in one process, many engines, lost workers, resume.

A lost worker is a real process that is killed or stopped, at every phase of the loop; what is counted are prompts, by the
samples of each rollout, and what is compared are the weights in the end. The first tests cover most and are quick; the
others are `long`.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from treadle.config import load_config
from treadle.errors import WorkerLostError
from treadle.run.start import train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
long = pytest.mark.long

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
TWO_TRAIN = ("--actor-num-gpus-per-node", "2", "--rollout-num-gpus", "1", "--save-interval", "1")

Find = Callable[..., list[int]]
Meanwhile = Callable[[threading.Event], None]


@pytest.fixture
def run_ray(ray_here: Any, toy_flags: list[str], tmp_path: Path) -> Callable[..., Path]:
    """`run_ray("name", *flags, meanwhile=None)`: a run over workers in this process; returns its folder.

    `meanwhile` is called in a thread, with an event that is set when the run is over.
    """

    def run(name: str, *flags: str, meanwhile: Meanwhile | None = None) -> Path:
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


@pytest.fixture(scope="module")
def local_run(toy_task: Sequence[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the same run in one process, undisturbed. Read only."""
    folder = tmp_path_factory.mktemp("local") / "run"
    words = ["--num-rollout", str(NUM_ROLLOUT), "--run-dir", str(folder), "--save-interval", "1"]
    train(load_config(None, [*toy_task, *STEPS, *words]), "toy")
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


def assert_every_prompt_once(folder: Path) -> None:
    """Each rollout has the groups of its own turn, in order, and none else."""
    files = sorted((folder / "samples").glob("rollout_*.jsonl"))
    drawn = []
    for file in files:
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        drawn.append(list(dict.fromkeys(row["group_id"] for row in rows if "group_id" in row)))
    assert drawn == [list(range(4 * i, 4 * i + 4)) for i in range(NUM_ROLLOUT)]


@dataclass(frozen=True)
class Blow:
    """A signal to a worker that runs a method (to any, where none is named) once so many rollouts are saved; `during`
    is what another worker does at that time."""

    actor: str
    method: str = ""
    saved: int = 0
    signum: int = signal.SIGKILL
    during: tuple[str, str] | None = None


def strikes(find: Find, folder: Path, *blows: Blow) -> Meanwhile:
    """Deal the blows one after the other, each to the last process found: to the last rank, where there are several."""

    def is_saved(count: int) -> bool:
        return count == 0 or (folder / "checkpoints" / f"rollout_{count:06d}" / "manifest.json").is_file()

    def targets(blow: Blow) -> set[int]:
        if not is_saved(blow.saved) or (blow.during is not None and not find(*blow.during)):
            return set()
        return set(find(blow.actor, blow.method))

    def strike(over: threading.Event) -> None:
        hit: set[int] = set()
        for blow in blows:
            while not (found := targets(blow) - hit):
                assert not over.is_set(), f"the run ended before {blow}"
                time.sleep(0.001)
            os.kill(max(found), blow.signum)
            hit.add(max(found))

    return strike


def test_a_killed_engine_costs_nothing_and_all_is_as_in_one_process(
    run_ray: Callable[..., Path], local_run: Path, find_workers: Find, read_rows: Callable[[Path], list[dict]], tmp_path
) -> None:
    kill = strikes(find_workers, tmp_path / "ray", Blow("EngineActor", "generate"))
    folder = run_ray("ray", "--rollout-num-gpus", "2", "--save-interval", "1", meanwhile=kill)
    local, ray = read_rows(local_run), read_rows(folder)
    assert [[row[name] for name in EXACT] for row in ray] == [[row[name] for name in EXACT] for row in local]
    assert weights(folder) == weights(local_run)
    assert_every_prompt_once(local_run)
    assert_every_prompt_once(folder)
    assert [row["rollout/weight_lag_max"] for row in ray] == [0] * NUM_ROLLOUT


def test_two_train_workers_end_where_one_does_and_one_that_is_killed_is_resumed(
    run_ray: Callable[..., Path], local_run: Path, find_workers: Find, tmp_path: Path, capfd: Any
) -> None:
    kill = strikes(find_workers, tmp_path / "two", Blow("TrainActor", "train", saved=2))
    folder = run_ray("two", *TWO_TRAIN, meanwhile=kill)
    assert "training of rollout 2: its worker died (pid " in (said := capfd.readouterr().err)
    assert "restart 1 of 3, from rollout 2" in said
    assert_every_prompt_once(folder)
    assert_close_weights(folder, local_run)


def test_trainer_and_engine_on_two_nodes(
    ray_here: Any, run_ray: Callable[..., Path], local_run: Path, find_workers: Find
) -> None:
    """One CPU is left on each node; weights are broadcast."""
    from ray.util import placement_group, remove_placement_group

    rest = placement_group([{"CPU": 7, "node:__internal_head__": 0.001}])
    ray_here.get(rest.ready(), timeout=60)
    nodes: set[str] = set()

    def look(over: threading.Event) -> None:
        """The nodes of train worker and engine, by the raylet that is their parent."""
        import psutil

        while not over.wait(0.1):
            for pid in (*find_workers("TrainActor"), *find_workers("EngineActor")):
                nodes.add(str(psutil.Process(pid).ppid()))

    try:
        folder = run_ray("nodes", "--save-interval", "4", meanwhile=look)
    finally:
        remove_placement_group(rest)
    assert len(nodes) == 2
    assert_every_prompt_once(folder)
    assert weights(folder) == weights(local_run)


# What a quick look can leave out


@long
@pytest.mark.parametrize("transport", ["shm", "disk", "disk-delta", "broadcast"])
def test_several_engines_by_every_transport(run_ray: Callable[..., Path], local_run: Path, transport: str) -> None:
    flags = ("--rollout-num-gpus", "2", "--weight-transport", transport, "--save-interval", "4")
    assert weights(run_ray(transport, *flags)) == weights(local_run)


OWN_TRANSPORT = """
from treadle.weights import Transport
from treadle.weights.disk import DiskReceiver, DiskSender

class Receiver(DiskReceiver):
    def receive(self, offer):
        super().receive(offer.__class__("disk", offer.version, offer.specs, offer.where))

TRANSPORT = Transport("mine", lambda weights, plan: DiskSender(weights, plan.folder / "mine"), Receiver)
"""


def test_a_transport_of_the_user_s_own(run_ray: Callable[..., Path], local_run: Path, tmp_path: Path) -> None:
    file = tmp_path / "own_transport.py"
    file.write_text(OWN_TRANSPORT)
    flags = ("--weight-transport", f"{file}:TRANSPORT", "--weight-folder", str(tmp_path), "--save-interval", "4")
    assert weights(run_ray("own", *flags)) == weights(local_run)
    assert not (tmp_path / "mine").exists(), "a sender removes its files"


@long
@pytest.mark.parametrize(
    ("blow", "transport"),
    [
        (Blow("EngineActor", "receive"), "auto"),
        (Blow("EngineActor"), "auto"),
        (Blow("EngineActor", "generate", 0, signal.SIGSTOP), "auto"),
        (Blow("EngineActor", "generate"), "broadcast"),  # no new engine can read its weights: they are sent again
    ],
)
def test_an_engine_that_is_lost_at_another_time_costs_nothing(
    run_ray: Callable[..., Path], local_run: Path, find_workers: Find, tmp_path: Path, blow: Blow, transport: str
) -> None:
    flags = ("--rollout-num-gpus", "2", "--health-check-timeout-seconds", "1", "--save-interval", "4")
    folder = run_ray(
        "lost", *flags, "--weight-transport", transport, meanwhile=strikes(find_workers, tmp_path / "lost", blow)
    )
    assert_every_prompt_once(folder)
    assert weights(folder) == weights(local_run)


PHASES = (
    Blow("TrainActor", "build"),
    Blow("TrainActor", "train", saved=1),
    Blow("TrainActor", "save", saved=2),
    Blow("TrainActor", "offer", saved=2),
    Blow("TrainActor", saved=3, during=("EngineActor", "generate")),  # nobody waits for it then
)


@long
@pytest.mark.parametrize("workers", [1, 2])
def test_a_train_worker_that_is_killed_in_any_phase_is_resumed_from_the_last_checkpoint(
    run_ray: Callable[..., Path],
    local_run: Path,
    find_workers: Find,
    read_rows: Callable[[Path], list[dict]],
    tmp_path: Path,
    workers: int,
    capfd: Any,
) -> None:
    flags = (*TWO_TRAIN, "--actor-num-gpus-per-node", str(workers), "--max-restarts", "5")
    folder = run_ray("killed", *flags, meanwhile=strikes(find_workers, tmp_path / "killed", *PHASES))
    said = capfd.readouterr().err
    assert said.count("; restart ") == 5
    assert_every_prompt_once(folder)
    assert [row["rollout_id"] for row in read_rows(folder)] == list(range(NUM_ROLLOUT))
    if workers == 1:
        assert weights(folder) == weights(local_run)
    else:
        assert_close_weights(folder, local_run)


@long
def test_a_train_worker_that_hangs_is_lost_and_the_run_resumes(
    run_ray: Callable[..., Path], local_run: Path, find_workers: Find, tmp_path: Path, capfd: Any
) -> None:
    stop = strikes(find_workers, tmp_path / "hangs", Blow("TrainActor", "train", 2, signal.SIGSTOP))
    folder = run_ray("hangs", *TWO_TRAIN, "--worker-silence-seconds", "8", meanwhile=stop)
    assert "has not answered a health check for 8 s" in capfd.readouterr().err
    assert_every_prompt_once(folder)
    assert_close_weights(folder, local_run)


@long
def test_without_restarts_a_lost_train_worker_ends_the_run_with_one_clear_error_and_resumes_by_hand(
    run_ray: Callable[..., Path], local_run: Path, find_workers: Find, tmp_path: Path
) -> None:
    kill = strikes(find_workers, tmp_path / "killed", Blow("TrainActor", "train", saved=2))
    with pytest.raises(WorkerLostError, match=r"train worker: training of rollout \d: its worker died \(pid \d+"):
        run_ray("killed", "--save-interval", "1", "--max-restarts", "0", meanwhile=kill)
    folder = run_ray("killed", "--save-interval", "1", "--load", str(tmp_path / "killed"))
    assert_every_prompt_once(folder)
    assert weights(folder) == weights(local_run)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    run_ray("killed", "--save-interval", "1", "--load", str(tmp_path / "killed"))  # finished: nothing is done
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@long
def test_a_rollout_worker_that_is_killed_is_resumed_too(
    run_ray: Callable[..., Path], local_run: Path, find_workers: Find, tmp_path: Path
) -> None:
    kill = strikes(find_workers, tmp_path / "killed", Blow("RolloutActor", saved=2))
    folder = run_ray("killed", "--save-interval", "1", meanwhile=kill)
    assert_every_prompt_once(folder)
    assert weights(folder) == weights(local_run)


@long
@pytest.mark.parametrize("on_publish", ["wait", "pause", "abort"])
def test_one_step_off(run_ray: Callable[..., Path], read_rows: Callable[[Path], list[dict]], on_publish: str) -> None:
    flags = ("--max-lag", "1", "--on-publish", on_publish, "--rollout-correction", "tis")
    folder = run_ray("ahead", *flags, "--rollout-max-response-len", "40")
    assert_every_prompt_once(folder)
    rows = read_rows(folder)
    assert [row["rollout/num_samples"] for row in rows] == [32] * NUM_ROLLOUT
    assert all(row["rollout/weight_lag_max"] <= 1 for row in rows)
    if on_publish == "wait":
        assert [row["rollout/weight_lag_max"] for row in rows] == [0, *[1] * (NUM_ROLLOUT - 1)]


@long
def test_taking_turns_on_the_same_devices(run_ray: Callable[..., Path], local_run: Path) -> None:
    folder = run_ray("turns", "--colocate", "--save-interval", "4")
    assert weights(folder) == weights(local_run)
    turns = json.loads((folder / "summary.json").read_text())["turn_memory_gib"]
    assert turns.keys() == {"train", "engine"}
    assert all(0.1 < gib < 10 for both in turns.values() for gib in both)  # on a CPU: of the whole process
