"""Weights that come over a network, made into a file in shared memory for an engine that reads files only.

The relay is a rank of the broadcast in the engine's place, in a process of Treadle on the engine's machine. All weights
have come, and have been compared with what was sent, before the engine hears of them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from treadle.weights.base import Offer, WeightSpec
from treadle.weights.broadcast import BroadcastReceiver
from treadle.weights.ends import SentWeights, ServedWeights
from treadle.weights.shm import ShmSender


class Relay:
    """Takes broadcasts of weights with these specs. It holds them twice in host memory, once as its files."""

    def __init__(self, specs: Mapping[str, WeightSpec]):
        tensors = {name: torch.zeros(spec.shape, dtype=spec.dtype) for name, spec in specs.items()}
        self._receiver = BroadcastReceiver(ServedWeights(tensors, lambda version: None))
        self._sender = ShmSender(SentWeights(tensors))

    def receive(self, offer: Offer) -> Offer:
        """Take part in the broadcast; the same weights as an offer in shared memory. Raises `EngineError`."""
        self._receiver.receive(offer)
        return self._sender.offer(offer.version)

    def close(self) -> None:
        self._receiver.close()
        self._sender.close()
