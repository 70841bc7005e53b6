"""The ends of a transport by its name, for runs whose trainer and engines are processes of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from treadle.weights.base import WeightReceiver, WeightSender
from treadle.weights.broadcast import BroadcastReceiver, BroadcastSender
from treadle.weights.disk import DiskReceiver, DiskSender
from treadle.weights.disk_delta import DeltaReceiver, DeltaSender
from treadle.weights.ends import SentWeights, ServedWeights
from treadle.weights.shm import ShmReceiver, ShmSender

HOLDS_EVERYTHING = ("shm", "disk", "disk-delta")
"""Transports whose offer an engine can take at any time after it was made, without the sender."""


@dataclass(frozen=True)
class TransportPlan:
    """Which transport, and what its ends need: `host` is the trainer as engines reach it, `backend` of a broadcast."""

    name: str
    num_engines: int
    folder: Path
    host: str = "127.0.0.1"
    backend: str = "gloo"
    timeout_seconds: float = 120.0

    @property
    def holds_everything(self) -> bool:
        return self.name in HOLDS_EVERYTHING


def open_sender(plan: TransportPlan, weights: SentWeights) -> WeightSender:
    """The trainer's end."""
    if plan.name == "shm":
        return ShmSender(weights)
    if plan.name == "disk":
        return DiskSender(weights, plan.folder)
    if plan.name == "disk-delta":
        return DeltaSender(weights, plan.folder)
    assert plan.name == "broadcast", plan.name
    return BroadcastSender(
        weights, plan.num_engines, host=plan.host, backend=plan.backend, timeout_seconds=plan.timeout_seconds
    )


def open_receiver(name: str, served: ServedWeights) -> WeightReceiver:
    """The engine's end of the transport of this name."""
    kinds: dict[str, Callable[[ServedWeights], WeightReceiver]] = {
        "shm": ShmReceiver,
        "disk": DiskReceiver,
        "disk-delta": DeltaReceiver,
        "broadcast": BroadcastReceiver,
    }
    return kinds[name](served)
