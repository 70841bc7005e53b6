"""Weight transports by name or path: the properties that each declares, and the choice of one for a run.

A transport is one file. It implements `WeightSender` and `WeightReceiver` and ends with a `Transport` record:

    TRANSPORT = Transport("mine", lambda weights, plan: MySender(weights, plan.folder), MyReceiver, needs_one_node=True)

A built-in transport is known by its name, a user's own by its path: `--weight-transport file.py:TRANSPORT`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.catalog import TRANSPORTS, TransportRecord
from treadle.errors import ConfigError
from treadle.registry import resolve

if TYPE_CHECKING:
    from treadle.weights.base import Offer, WeightReceiver, WeightSender
    from treadle.weights.served_weights import SentWeights, ServedWeights

_INTERNAL = {
    "inproc": TransportRecord("inproc", "in one process", function="in_process"),
    "sglang-group": TransportRecord("sglang-group", "broadcast to SGLang servers", function="sglang_group"),
}
"""Transports that a run chooses by itself."""


@dataclass(frozen=True)
class TransportPlan:
    """What the sender of a run must know.

    `num_receivers` counts processes: a server that divides its model among GPUs has one for each of them. `folder` is
    for transports that write files. `host` is the trainer's address as the engines reach it. `backend` is that of
    broadcasts, gloo or nccl, and `timeout_seconds` bounds each of their steps.
    """

    name: str
    num_receivers: int
    folder: Path
    host: str = "127.0.0.1"
    backend: str = "gloo"
    timeout_seconds: float = 120.0

    @property
    def broadcast_settings(self) -> dict[str, Any]:
        """Return the settings that concern broadcasts."""
        return {"host": self.host, "backend": self.backend, "timeout_seconds": self.timeout_seconds}


@dataclass(frozen=True)
class Transport:
    """A transport: how each end is opened, and what it needs and guarantees.

    Attributes:
        name: names it in offers and in errors.
        open_sender: opens the trainer's end.
        open_receiver: opens the engine's end.
        needs_one_node: trainer and engines must run on one machine.
        needs_gpu: the trainer's weights must be in GPU memory.
        holds_everything: an engine can receive an offer at any time after it was made, without the sender.
        delivers_after: the sender's `deliver` must be called after all engines have received, not meanwhile.
    """

    name: str
    open_sender: Callable[[SentWeights, TransportPlan], WeightSender]
    open_receiver: Callable[[ServedWeights], WeightReceiver]
    needs_one_node: bool = False
    needs_gpu: bool = False
    holds_everything: bool = False
    delivers_after: bool = False


def find_transport(name: str) -> Transport:
    """Return the transport with this name or path; raises `ConfigError` if there is none."""
    record = TRANSPORTS.get(name) or _INTERNAL.get(name)
    found: object = record.load() if record is not None else resolve("weight transport", name, {})
    if not isinstance(found, Transport):
        raise ConfigError(f"weight transport {name!r} is a {type(found).__name__}; give a treadle.weights.Transport")
    return found


def choose_transport(asked: str, *, on_one_node: bool, on_gpu: bool) -> str:
    """Return the transport of a run: the one that was asked for, or for `auto` the fastest that reaches the engines.

    Raises:
        ConfigError: if the transport needs one node or a GPU and the run does not have it.
    """
    if asked == "auto":
        return "shm" if on_one_node else "broadcast"
    transport = find_transport(asked)
    if transport.needs_one_node and not on_one_node:
        raise ConfigError(
            f"weight_transport = {asked} needs trainer and engines on one node, and this run has several; "
            "use broadcast, or disk with a shared folder"
        )
    if transport.needs_gpu and not on_gpu:
        raise ConfigError(f"weight_transport = {asked} needs weights on a GPU, and this run has none; use shm")
    return asked


def open_sender(plan: TransportPlan, weights: SentWeights) -> WeightSender:
    """Open the trainer's end of the planned transport.

    Its offers carry the plan's name, by which engines find their end.
    """
    return _NamedSender(find_transport(plan.name).open_sender(weights, plan), plan.name)


class _NamedSender:
    def __init__(self, sender: WeightSender, name: str):
        self._sender, self._name = sender, name
        self.deliver, self.close = sender.deliver, sender.close

    def offer(self, version: int) -> Offer:
        return replace(self._sender.offer(version), transport=self._name)
