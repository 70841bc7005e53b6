"""Weights to an engine on a GPU from a trainer that is another process on a GPU."""

from __future__ import annotations

import importlib
import json
import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from treadle.weights import Offer, ServedWeights
from treadle.weights.broadcast import BroadcastReceiver
from treadle.weights.cuda_ipc import CudaIpcReceiver
from treadle.weights.shm import ShmReceiver

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")]


@pytest.fixture
def tell_trainer(monkeypatch) -> Iterator[Callable[..., Any]]:
    """`tell_trainer(wait, do, **fields)`: ask the trainer process; without `wait` its answer is left for the next call."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "contract")
    context = multiprocessing.get_context("spawn")
    channel, theirs = context.Pipe()
    process = context.Process(target=importlib.import_module("weight_trainer").serve, args=(theirs,))
    process.start()

    def hear() -> Any:
        assert channel.poll(60), "no answer"
        answer = json.loads(channel.recv_bytes())
        assert "error" not in (answer or {}), answer
        return answer

    def tell(wait: bool, do: str, **fields: Any) -> Any:
        channel.send_bytes(json.dumps({"do": do, **fields}).encode())
        return hear() if wait else hear

    yield tell
    process.kill()
    process.join(20)
    channel.close()


@pytest.mark.parametrize("kind", ["cuda_ipc", "shm", "nccl"])
def test_a_push_between_processes_on_the_gpu(kind, tell_trainer, tmp_path):
    if kind == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs a GPU for each rank")
    there = "cuda:1" if kind == "nccl" else "cuda:0"
    receiver_of = {"cuda_ipc": CudaIpcReceiver, "shm": ShmReceiver, "nccl": BroadcastReceiver}[kind]
    weights = {"a": torch.randn(500, 300), "b": torch.randn(7), "none": torch.empty(0, 3)}
    held = {name: torch.zeros(w.shape, dtype=torch.bfloat16, device="cuda:0") for name, w in weights.items()}
    served = ServedWeights(held, lambda version: None)
    receiver = receiver_of(served)
    file = tmp_path / "weights.safetensors"
    save_file(weights, file)
    folder = tmp_path / "shared"
    folder.mkdir()
    tell_trainer(True, "start", kind=kind, folder=str(folder), weights=str(file), dtype="bfloat16", device=there)
    for version in (1, 2, 3):
        for weight in weights.values():
            weight.add_(1)
        save_file(weights, file)
        tell_trainer(True, "load", weights=str(file))
        offer = Offer.from_json(tell_trainer(True, "offer", version=version))
        if kind == "cuda_ipc":
            receiver.receive(offer)
            tell_trainer(True, "deliver")
        else:
            delivered = tell_trainer(False, "deliver")
            receiver.receive(offer)
            delivered()
        for name, weight in weights.items():
            assert torch.equal(held[name].cpu(), weight.bfloat16()), name
    receiver.close()
    tell_trainer(True, "close")
    assert list(folder.iterdir()) == []
