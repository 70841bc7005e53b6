"""Weights inside one process: the engine's module is the trainer's own, or a copy of it.

Where both modules hold the same tensors nothing is copied and a push is a change of the version number.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from treadle.weights.base import WeightSpec, check_specs


class InprocTransport:
    """Both ends: copy the trainer's parameters into the engine's where they are not the same memory."""

    def __init__(self, trained: nn.Module, served: nn.Module, set_version: Callable[[int], None]):
        self._source = dict(trained.named_parameters())
        self._target = dict(served.named_parameters())
        self._set_version = set_version
        check_specs(
            {name: WeightSpec.of(p) for name, p in self._source.items()},
            {name: WeightSpec.of(p) for name, p in self._target.items()},
        )
        self._apart = [n for n, p in self._source.items() if p.data_ptr() != self._target[n].data_ptr()]

    @torch.no_grad()
    def push(self, version: int) -> None:
        if self._apart:
            torch._foreach_copy_([self._target[n] for n in self._apart], [self._source[n] for n in self._apart])
        self._set_version(version)
