"""A whole tiny run: a task, a reward and a recipe for the tiny random Llama."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fork_server import Child, ForkServer
from treadle.run.ray.connection import NO_IDLE_WORKERS

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


@pytest.fixture(scope="session")
def start_program() -> Iterator[Callable[..., Child]]:
    """`start_program("train", *flags)`: a command in a process of its own, forked from one that has imported what takes long."""
    with ForkServer() as server:
        yield lambda *words: server.start(words, cwd=Path.cwd())


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
