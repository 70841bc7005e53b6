"""A whole tiny run: a task, a reward and a recipe for the tiny random Llama."""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from treadle.run.ray_process import NO_IDLE_WORKERS

REWARD = '''
def reward(sample):
    """The share of the response that is the letter the label names: easy to learn for any model."""
    text = sample.response
    return sum(c == sample.label for c in text) / max(1, len(text))
'''


@pytest.fixture(scope="session")
def toy_task(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The flags of `toy_flags`, for what is shared by tests. Read only, as the files are."""
    folder = tmp_path_factory.mktemp("toy")
    data, reward = folder / "toy.jsonl", folder / "toy_reward.py"
    data.write_text("".join(json.dumps({"input": f"say {i}", "label": "a"}) + "\n" for i in range(10)))
    reward.write_text(REWARD)
    flags = f"""--hf-checkpoint {tiny_model_dir} --prompt-data {data} --label-key label --apply-chat-template
        --rollout-shuffle --custom-rm-path {reward}:reward --rollout-batch-size 4 --n-samples-per-prompt 8
        --rollout-max-response-len 8 --dtype float32 --progress off --no-tensorboard --lr 3e-3"""
    return tuple(flags.split())


@pytest.fixture
def toy_flags(toy_task: tuple[str, ...]) -> list[str]:
    """Flags of a run on the toy task, without the number of rollouts and the run folder."""
    return list(toy_task)


@pytest.fixture
def read_rows() -> Callable[[Path], list[dict]]:
    """The rows of a run's metrics.jsonl."""

    def read(folder: Path) -> list[dict]:
        return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

    return read


class Program:
    """`treadle` with these words in a process of its own; forked from one that has imported what takes long."""

    def __init__(self, words: Sequence[str], log: Path):
        self.log = log
        code = (
            f"import os, sys; log = os.open({str(log)!r}, os.O_WRONLY | os.O_CREAT); os.dup2(log, 1); os.dup2(log, 2)\n"
        )
        code += f"from treadle.cli import main; sys.exit(main({list(words)!r}))"
        # A function of this file could not be found by the other process: tests are no package.
        self._process = multiprocessing.get_context("forkserver").Process(target=exec, args=(code,))
        self._process.start()

    @property
    def output(self) -> str:
        return self.log.read_text() if self.log.is_file() else ""

    @property
    def returncode(self) -> int | None:
        """Minus the signal's number where one ended it; None while it runs."""
        return self._process.exitcode

    def signal(self, signum: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signum)

    def wait(self, seconds: float) -> int:
        """The return code once it has ended."""
        self._process.join(seconds)
        assert self.returncode is not None, f"it still runs after {seconds} s: {self.output[-2000:]}"
        return self.returncode

    def signal_when(self, ready: Callable[[], bool], signum: int, seconds: float) -> int:
        """Send a signal once something is so, which must come before the program ends; the return code."""
        deadline = time.monotonic() + seconds
        while not ready():
            assert self.returncode is None, self.output  # it must not be done before the signal
            assert time.monotonic() < deadline, self.output
            time.sleep(0.005)
        self.signal(signum)
        return self.wait(seconds)


@pytest.fixture(scope="session")
def start_program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Program]]:
    """`start_program("train", *flags)`: a `Program`, with one thread for each matmul."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["treadle.run.start", "treadle.observe.curve", "transformers.models.llama.modeling_llama"]
    )
    logs, count = tmp_path_factory.mktemp("programs"), itertools.count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield lambda *words: Program(words, logs / f"{next(count)}.log")


@pytest.fixture(scope="session")
def ray_here() -> Iterator[Any]:
    """A small Ray of this process, on loopback; runs inside the process use it. Its first node counts 8 CPUs, where all
    goes that fits, the second one counts 1."""
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # before ray is imported: its servers listen on loopback
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray = pytest.importorskip("ray", reason="ray is not installed (pip install 'treadle[ray]')")
    from ray.cluster_utils import Cluster

    memory = {"object_store_memory": 100 * 2**20}
    head = {"num_cpus": 8, "include_dashboard": False, "_system_config": NO_IDLE_WORKERS}
    cluster = Cluster(initialize_head=True, head_node_args={**head, **memory})
    cluster.add_node(num_cpus=1, **memory)
    ray.init(address=cluster.address, log_to_driver=False)
    yield ray
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def find_workers() -> Callable[..., list[int]]:
    """`find_workers("EngineActor", "generate")`: processes below this one that run a method of a worker now, or any."""
    import psutil

    known: list[Path] = []
    looked = [0.0]

    def find(actor: str, method: str = "") -> list[int]:
        if time.monotonic() - looked[0] > 0.3:  # to look for processes takes long, and a method may be short
            known[:] = [Path(f"/proc/{child.pid}/cmdline") for child in psutil.Process().children(recursive=True)]
            looked[0] = time.monotonic()
        found = []
        for path in known:
            with contextlib.suppress(OSError):
                if path.read_text().startswith(f"ray::{actor}{'.' + method if method else ''}"):
                    found.append(int(path.parent.name))
        return found

    return find
