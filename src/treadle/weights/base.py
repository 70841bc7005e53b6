"""Handing new weights from the trainer to an engine.

A transport has two ends: the trainer's side names what it will send, the engine's side checks that against what it
has before the first byte moves. An update is whole or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from treadle.errors import EngineError


@dataclass(frozen=True)
class WeightSpec:
    """Shape and dtype of one named weight."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> WeightSpec:
        return cls(tuple(tensor.shape), tensor.dtype)


class WeightTransport(Protocol):
    """Brings an engine to a new version of the weights."""

    def push(self, version: int) -> None:
        """Make the engine generate with the trainer's current weights, called `version`.

        Raises `EngineError` before anything changes where names, shapes or dtypes differ.
        """
        ...


def check_specs(sent: Mapping[str, WeightSpec], held: Mapping[str, WeightSpec]) -> None:
    """Raise `EngineError` naming the first weight that the two sides do not agree on."""
    for name in sorted(sent.keys() | held.keys()):
        if name not in held:
            raise EngineError(f"weight {name!r} is sent, but the engine has no such weight; is it another model?")
        if name not in sent:
            raise EngineError(f"the engine's weight {name!r} is not sent; is it another model?")
        if sent[name] != held[name]:
            raise EngineError(f"weight {name!r}: {sent[name]} is sent, the engine has {held[name]}")
