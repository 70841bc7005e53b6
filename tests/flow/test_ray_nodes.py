"""Ray's side of a run: where workers go, what can't be placed, health checks, and signals to a run of its own process."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from treadle.config import Config
from treadle.errors import ConfigError, DeadlineError, EngineError, TreadleError, WorkerLostError
from treadle.run.ray import placement
from treadle.run.ray.train_workers import RankActor
from treadle.run.ray.worker import HEALTH_CHECKS, BusyWorker, Call, while_alive
from treadle.storage.private_folder import cache_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

RUN_SECONDS = 300.0
MakeConfig = Callable[..., Config]


def place(config: Config, notes: list[str], *, can_grow: bool) -> placement.Places:
    return asyncio.run(placement.place(config, notes.append, can_grow=can_grow))


def test_workers_get_bundles_in_order_and_give_them_back(ray_here: Any, make_config: MakeConfig) -> None:
    before = ray_here.available_resources()["CPU"]
    config = make_config(runtime="ray", rollout_num_gpus=2, num_cpus_per_worker=2)
    places = place(config, [], can_grow=False)
    assert (len(places.train), len(places.engines)) == (1, 2)
    assert len({bundle.index for bundle in (*places.train, *places.engines)}) == 3
    assert places.on_one_node
    assert not places.uses_gpus
    placement.release(places)
    asyncio.run(placement.until_gone(places, 20.0))
    deadline = time.monotonic() + 20
    while ray_here.available_resources().get("CPU", 0) < before:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_taking_turns_is_in_the_same_bundles(ray_here: Any, make_config: MakeConfig) -> None:
    places = place(make_config(runtime="ray", colocate=True), [], can_grow=False)
    assert places.train == places.engines
    placement.release(places)


def test_more_than_there_is_and_will_be_is_refused_at_once(ray_here: Any, make_config: MakeConfig) -> None:
    config = make_config(runtime="ray", rollout_num_gpus=99)
    with pytest.raises(
        ConfigError, match=r"wants 100 workers with 1 CPU each, this Ray has .* of 9 CPU free on 2 nodes;"
    ):
        place(config, [], can_grow=False)


def test_while_it_waits_it_says_what_is_wanted_and_what_is_free(
    ray_here: Any, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "SAY_EVERY_SECONDS", 0.5)
    notes: list[str] = []
    config = make_config(runtime="ray", rollout_num_gpus=99, placement_timeout_seconds=2.2)
    with pytest.raises(DeadlineError, match=r"waited 2.2 s for 100 workers with 1 CPU each; .* --rollout-num-gpus"):
        place(config, notes, can_grow=True)
    assert len(notes) >= 3
    assert "waiting for 100 workers with 1 CPU each; the cluster has" in notes[0]


class Refuses:
    """A worker that does not start, or fails when asked."""

    def __init__(self, *, starts: bool):
        if not starts:
            raise ConfigError("the run's folder is not here")

    def ask(self, how: str) -> str:
        if how == "ours":
            raise EngineError("too long a prompt")
        if how == "theirs":
            raise KeyError("weight")
        time.sleep(5)
        return "late"


@pytest.mark.parametrize(
    ("starts", "how", "kind", "text"),
    [
        (False, "ours", TreadleError, "the question: its worker did not start: .*the run's folder is not here"),
        (True, "ours", EngineError, "^too long a prompt$"),
        (True, "theirs", TreadleError, "the question failed: KeyError: 'weight'"),
        (True, "late", DeadlineError, "^waited 0.5 s for the question$"),
    ],
)
def test_what_a_call_of_a_worker_can_end_in(ray_here: Any, starts: bool, how: str, kind: type, text: str) -> None:
    worker = ray_here.remote(Refuses).options(num_cpus=0).remote(starts=starts)
    with pytest.raises(kind, match=text):
        asyncio.run(Call("the question", worker.ask.remote(how)).value(0.5 if how == "late" else 60.0))
    ray_here.kill(worker)


class Sleeper(RankActor):
    """A rank without a model."""

    def __init__(self) -> None:
        pass

    def pid(self) -> int:
        return os.getpid()

    def thread(self) -> int:
        return threading.get_ident()

    def sleep_for(self, seconds: float) -> str:
        time.sleep(seconds)
        return "slept"


@pytest.fixture
def sleeper(ray_here: Any) -> Iterator[Any]:
    actor = ray_here.remote(concurrency_groups=HEALTH_CHECKS)(Sleeper).options(num_cpus=0).remote()
    ray_here.get(actor.pid.remote(), timeout=60)  # it has started
    yield actor
    ray_here.kill(actor)


def watch(actor: Any, work: Coroutine[Any, Any, Any], silence_seconds: float = 60.0) -> Any:
    return asyncio.run(while_alive(work, [BusyWorker("the rank", actor)], 0.1, silence_seconds))


def test_a_worker_gives_signs_of_life_while_it_works(sleeper: Any) -> None:
    work = Call("a nap", sleeper.sleep_for.remote(3.0)).value(60.0)
    assert watch(sleeper, work, 1.5) == "slept"


def test_what_a_rank_computes_is_done_by_one_thread(ray_here: Any, sleeper: Any) -> None:
    """A GPU is chosen for a thread, and OpenMP has a team for each."""
    (group,) = HEALTH_CHECKS
    own = [sleeper.thread.remote() for _ in range(3)]
    other = sleeper.thread.options(concurrency_group=group).remote()
    assert len({*ray_here.get(own, timeout=60)}) == 1
    assert ray_here.get(other, timeout=60) not in ray_here.get(own, timeout=60)


def test_a_worker_that_nobody_waits_for_is_missed_when_it_dies(ray_here: Any, sleeper: Any) -> None:
    os.kill(ray_here.get(sleeper.pid.remote(), timeout=60), signal.SIGKILL)
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("cancelled")

    with pytest.raises(WorkerLostError, match=r"^the rank: a health check: its worker died \(pid \d+"):
        watch(sleeper, work())
    assert ended == ["cancelled"]


def test_a_worker_that_is_stopped_is_lost(ray_here: Any, sleeper: Any) -> None:
    pid = ray_here.get(sleeper.pid.remote(), timeout=60)
    work = Call("a nap", sleeper.sleep_for.remote(0.5)).value(60.0)
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(WorkerLostError, match=r"^the rank has not answered a health check for 2 s: it hangs"):
            watch(sleeper, work, 2.0)
    finally:
        os.kill(pid, signal.SIGKILL)


def start(flags: list[str], folder: Path, *more: str, **variables: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "treadle", "train", *flags, "--run-dir", str(folder), "--runtime", "ray", *more]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
    )


def rows_of(folder: Path) -> list[dict]:
    file = folder / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def addresses(processes: Sequence[psutil.Process]) -> set[str]:
    """What they listen on."""
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= {c.laddr.ip for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    return found


def open_to_others(temporary: Path, home: Path) -> list[str]:
    """What another user of the machine could enter or read of a Ray's sessions and its token."""
    sessions = list(temporary.glob("treadle-ray-*"))
    assert [list(folder.glob("ray/session_*/sockets/raylet*")) for folder in sessions] != []
    assert not (temporary / "ray").exists()
    token = home / ".ray" / "auth_token"
    return [str(path) for path in (*sessions, token, token.parent) if path.stat().st_mode & 0o077]


def is_loopback(address: str) -> bool:
    """True for 127.0.0.1, ::1, and the first written as the last is."""
    ip = ipaddress.ip_address(address)
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return (mapped or ip).is_loopback


@pytest.mark.parametrize("signum", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_a_signal_saves_and_leaves_no_process(
    ray_here: Any, toy_flags: list[str], tmp_path: Path, signum: signal.Signals
) -> None:
    """Two train workers, one engine and a Ray of their own: they listen on loopback only, their files are private."""
    folder = tmp_path / "run"
    temporary, home = Path(tempfile.mkdtemp(dir="/tmp")), tmp_path / "home"  # short, as a socket's path must be
    home.mkdir()
    places = {"TMPDIR": str(temporary), "HOME": str(home), "TREADLE_CACHE": str(cache_folder())}
    numbers = ("--ray-num-cpus", "4", "--actor-num-gpus-per-node", "2", "--rollout-num-gpus", "1")
    process = start(toy_flags, folder, "--num-rollout", "1000", "--save-interval", "1000", *numbers, **places)
    deadline = time.monotonic() + RUN_SECONDS
    while len(rows_of(folder)) < 2:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.stdout.read().decode()
        time.sleep(0.05)
    below = psutil.Process(process.pid).children(recursive=True)
    try:
        assert addresses(below)
        assert all(is_loopback(address) for address in addresses(below)), addresses(below)
        assert open_to_others(temporary, home) == []
        process.send_signal(signum)
        output, _ = process.communicate(timeout=RUN_SECONDS)
    finally:
        process.kill()
    assert process.returncode == (143 if signum == signal.SIGTERM else 130), output.decode()
    done = len(rows_of(folder))
    assert (folder / "checkpoints" / "latest").read_text().strip() == f"rollout_{done:06d}"
    _, alive = psutil.wait_procs(below, timeout=30)
    assert not alive
    assert list(temporary.glob("treadle-ray-*")) == []
    shutil.rmtree(temporary)
