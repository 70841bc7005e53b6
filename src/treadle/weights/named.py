"""The ends of a transport by its name, for runs whose trainer and engines are processes of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from treadle.weights import broadcast, sglang_group
from treadle.weights.base import WeightReceiver, WeightSender
from treadle.weights.broadcast import BroadcastReceiver, BroadcastSender
from treadle.weights.cuda_ipc import CudaIpcReceiver, CudaIpcSender
from treadle.weights.disk import DiskReceiver, DiskSender
from treadle.weights.disk_delta import DeltaReceiver, DeltaSender
from treadle.weights.served_weights import SentWeights, ServedWeights
from treadle.weights.sglang_group import GroupSender
from treadle.weights.shm import ShmReceiver, ShmSender

HOLDS_EVERYTHING = ("shm", "disk", "disk-delta")
"""Transports whose offer an engine can take at any time after it was made, without the sender."""
DELIVERS_AFTER = ("cuda_ipc",)
"""Transports whose sender holds on to the weights until every engine has them: it delivers when they have received."""
BROADCASTS: Mapping[str, type[BroadcastSender] | type[GroupSender]] = {
    broadcast.NAME: BroadcastSender,
    sglang_group.NAME: GroupSender,
}
"""Broadcasts by the names that offers give them: to ranks that are Treadle's own, and to those of SGLang."""


@dataclass(frozen=True)
class TransportPlan:
    """Which transport, and what its ends need: `host` is the trainer as engines reach it, `backend` of a broadcast.

    `num_receivers` counts processes: a server that divides its model among GPUs has one for each of them.
    """

    name: str
    num_receivers: int
    folder: Path
    host: str = "127.0.0.1"
    backend: str = "gloo"
    timeout_seconds: float = 120.0


def open_sender(plan: TransportPlan, weights: SentWeights) -> WeightSender:
    """The trainer's end."""
    if plan.name == "shm":
        return ShmSender(weights)
    if plan.name == "disk":
        return DiskSender(weights, plan.folder)
    if plan.name == "disk-delta":
        return DeltaSender(weights, plan.folder)
    if plan.name == "cuda_ipc":
        return CudaIpcSender(weights)
    return BROADCASTS[plan.name](
        weights, plan.num_receivers, host=plan.host, backend=plan.backend, timeout_seconds=plan.timeout_seconds
    )


def open_receiver(name: str, served: ServedWeights) -> WeightReceiver:
    """The engine's end of the transport of this name."""
    kinds: dict[str, Callable[[ServedWeights], WeightReceiver]] = {
        "shm": ShmReceiver,
        "disk": DiskReceiver,
        "disk-delta": DeltaReceiver,
        "cuda_ipc": CudaIpcReceiver,
        "broadcast": BroadcastReceiver,
    }
    return kinds[name](served)
