"""Weights inside one process: the engine's module is the trainer's own, or a copy of it.

Where both modules hold the same tensors nothing is copied and a push is a change of the version number.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from treadle.weights.base import check_specs
from treadle.weights.served_weights import SentWeights, ServedWeights


class InprocTransport:
    """Both ends: copy the trainer's parameters into the engine's where they are not the same memory."""

    def __init__(self, trained: nn.Module, served: nn.Module, set_version: Callable[[int], None]):
        self._sent = SentWeights(dict(trained.named_parameters()))
        self._served = ServedWeights(dict(served.named_parameters()), set_version)
        check_specs(self._sent.specs, self._served.specs)

    def push(self, version: int) -> None:
        self._served.check_version(version)
        self._served.copy_from({name: self._sent[name] for name in self._sent.specs}, version)
