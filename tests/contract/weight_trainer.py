"""A trainer in a process of its own, for tests of weight transports: one JSON message in, one back.

`start` names the transport and the file of weights, `load` takes other weights, `offer` and `deliver` are the
sender's, `die_at` kills the process, without a word, when the sender next reads that weight.
"""

from __future__ import annotations

import json
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from treadle.errors import TreadleError
from treadle.weights import SentWeights, WeightSender
from treadle.weights.broadcast import open_broadcast
from treadle.weights.cuda_ipc import CudaIpcSender
from treadle.weights.disk import DiskSender
from treadle.weights.disk_delta import DeltaSender
from treadle.weights.sglang_group import open_sglang_group
from treadle.weights.shm import ShmSender


def make_sender(kind: str, weights: SentWeights, folder: Path) -> WeightSender:
    """A sender with numbers so small that the tiny model has several shards, buckets and snapshots."""
    match kind:
        case "shm":
            return ShmSender(weights, folder)
        case "disk":
            return DiskSender(weights, folder / "disk", max_shard_bytes=30_000)
        case "disk-delta":
            return DeltaSender(weights, folder / "delta", max_shard_bytes=30_000, full_every=6)
        case "broadcast":
            return open_broadcast(weights, 1, bucket_bytes=5_000, timeout_seconds=20.0)
        case "sglang-group":
            return open_sglang_group(weights, 1, bucket_bytes=5_000, timeout_seconds=20.0)
        case "nccl":
            device = torch.device("cuda:1")
            return open_broadcast(weights, 1, backend="nccl", bucket_bytes=1 << 20, timeout_seconds=20.0, device=device)
        case "cuda_ipc":
            return CudaIpcSender(weights)
    raise ValueError(kind)


class Weights(dict[str, torch.Tensor]):
    """Named weights, one of which may be deadly to read."""

    deadly: str | None = None

    def __getitem__(self, name: str) -> torch.Tensor:
        if name == self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(name)


def serve(channel: Connection) -> None:
    """Answer requests until the other side hangs up."""
    torch.set_num_threads(1)
    sender: WeightSender | None = None
    weights = Weights()
    while True:
        try:
            request: dict[str, Any] = json.loads(channel.recv_bytes())
        except EOFError:
            return
        answer: Any = None
        try:
            match request.pop("do"):
                case "start":
                    loaded = load_file(request["weights"], device=request["device"])
                    weights = Weights(loaded)
                    dtype = request["dtype"] and getattr(torch, request["dtype"])
                    sender = make_sender(request["kind"], SentWeights(weights, dtype), Path(request["folder"]))
                case "load":
                    for name, tensor in load_file(request["weights"]).items():
                        weights[name].copy_(tensor)
                case "die_at":
                    weights.deadly = request["name"]
                case "offer":
                    assert sender is not None
                    answer = sender.offer(request["version"]).to_json()
                case "deliver":
                    assert sender is not None
                    sender.deliver()
                case "close":
                    assert sender is not None
                    sender.close()
        except TreadleError as error:
            answer = {"error": str(error)}
        channel.send_bytes(json.dumps(answer).encode())
