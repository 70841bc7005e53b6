"""Weights inside one process: the engine's module is the trainer's own, or a copy of it.

If both modules hold the same tensors nothing is copied, and a publish only changes the version number.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from weakref import WeakValueDictionary

from treadle.errors import EngineError
from treadle.weights.base import Offer, check_specs
from treadle.weights.publisher import LocalSource, Publisher
from treadle.weights.served_weights import SentWeights, ServedWeights
from treadle.weights.transport import Transport

NAME = "inproc"


def publish_in_process(
    weights: SentWeights, receive: Callable[[Offer], Awaitable[None]], warn: Callable[[str], None]
) -> Publisher:
    """Return what brings an engine of this process to the trainer's weights."""
    return Publisher(LocalSource(InProcessSender(weights)), receive, warn)


_SENDERS: WeakValueDictionary[str, InProcessSender] = WeakValueDictionary()


class InProcessSender:
    """The trainer's end: receivers of this process read its tensors."""

    def __init__(self, weights: SentWeights):
        self.weights = weights
        self._id = uuid.uuid4().hex
        _SENDERS[self._id] = self

    def offer(self, version: int) -> Offer:
        self.weights.take(version)
        return Offer(NAME, version, self.weights.specs, {"sender": self._id})

    def deliver(self) -> None:
        """Do nothing: the tensors are in this process."""

    def close(self) -> None:
        _SENDERS.pop(self._id, None)


class InProcessReceiver:
    """The engine's end: copies each weight that is not the trainer's own tensor."""

    def __init__(self, served: ServedWeights):
        self.served = served

    def receive(self, offer: Offer) -> None:
        sender = _SENDERS.get(str(offer.where.get("sender")))
        if sender is None:
            raise EngineError(
                f"version {offer.version} was offered in another process, or its sender is closed; use shm"
            )
        self.served.check_version(offer.version)
        check_specs(offer.specs, self.served.specs)
        self.served.copy_from({name: sender.weights[name] for name in offer.specs}, offer.version)

    def close(self) -> None:
        """Do nothing: the engine's weights stay."""


TRANSPORT = Transport(NAME, lambda weights, plan: InProcessSender(weights), InProcessReceiver, needs_one_node=True)
