"""A whole tiny run: a task, a reward and a recipe for the tiny random Llama."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

REWARD = '''
def reward(sample):
    """The share of the response that is the letter the label names: easy to learn for any model."""
    text = sample.response
    return sum(c == sample.label for c in text) / max(1, len(text))
'''


@pytest.fixture
def toy_flags(tiny_model_dir: Path, tmp_path: Path) -> list[str]:
    """Flags of a run on the toy task, without the number of rollouts and the run folder."""
    data, reward = tmp_path / "toy.jsonl", tmp_path / "toy_reward.py"
    data.write_text("".join(json.dumps({"input": f"say {i}", "label": "a"}) + "\n" for i in range(10)))
    reward.write_text(REWARD)
    flags = f"""--hf-checkpoint {tiny_model_dir} --prompt-data {data} --label-key label --apply-chat-template
        --rollout-shuffle --custom-rm-path {reward}:reward --rollout-batch-size 4 --n-samples-per-prompt 8
        --rollout-max-response-len 8 --dtype float32 --progress off --no-tensorboard --lr 3e-3"""
    return flags.split()


@pytest.fixture
def read_rows() -> Callable[[Path], list[dict]]:
    """The rows of a run's metrics.jsonl."""

    def read(folder: Path) -> list[dict]:
        return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

    return read


@pytest.fixture(scope="session")
def ray_here() -> Iterator[Any]:
    """A small Ray of this process, on loopback, with 16 logical CPUs; runs inside the process use it."""
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # before ray is imported: its servers listen on loopback
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray = pytest.importorskip("ray", reason="ray is not installed (pip install 'treadle[ray]')")
    ray.init(num_cpus=16, object_store_memory=200 * 2**20, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.fixture
def find_workers() -> Callable[..., list[Any]]:
    """`find_workers("EngineActor", "generate")`: processes below this one that run a method of a worker, or any."""
    import psutil

    def find(actor: str, method: str = "") -> list[Any]:
        found = []
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, IndexError):
                if process.cmdline()[0].startswith(f"ray::{actor}{'.' + method if method else ''}"):
                    found.append(process)
        return found

    return find
