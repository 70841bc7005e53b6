"""The weight transport seam: what the trainer's end and the engine's end of every transport do.

An `Offer` of plain JSON goes from one end to the other on the channel that the run already has (a Ray call, HTTP):

    offer = sender.offer(version)          trainer: the current weights are ready under this version
    receiver.receive(offer)                every engine, while it is paused between two tokens
    sender.deliver()                       trainer, meanwhile: returns when its part is done

Both ends compare names, shapes and dtypes before the first byte moves. An update is complete, or the engine keeps its
old weights, or it refuses to serve until a complete one succeeds; it never generates with a mixture.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from treadle.errors import EngineError

if TYPE_CHECKING:
    from treadle.weights.served_weights import ServedWeights

SAFETENSORS_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
}
"""The dtypes that can be offered, with their names in safetensors files."""
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in SAFETENSORS_NAMES}


@dataclass(frozen=True)
class WeightSpec:
    """Shape and dtype of one named weight."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> WeightSpec:
        return cls(tuple(tensor.shape), tensor.dtype)

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize


@dataclass(frozen=True)
class Offer:
    """A sender's message to all receivers: version, names, shapes and dtypes of the weights, and where they are."""

    transport: str
    version: int
    specs: Mapping[str, WeightSpec]  # in the order in which they are sent
    where: Mapping[str, Any]  # JSON values, each transport's own

    def to_json(self) -> dict[str, Any]:
        weights = [[name, list(s.shape), str(s.dtype).removeprefix("torch.")] for name, s in self.specs.items()]
        return {"transport": self.transport, "version": self.version, "weights": weights, "where": dict(self.where)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Offer:
        """Read what `to_json` wrote; raises `EngineError` if it is anything else."""
        try:
            specs = {
                str(name): WeightSpec(tuple(int(n) for n in shape), DTYPES[dtype])
                for name, shape, dtype in data["weights"]
            }
            return cls(str(data["transport"]), int(data["version"]), specs, dict(data["where"]))
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"this is no offer of weights ({error!r}): {str(data)[:200]}") from error


class WeightSender(Protocol):
    """The trainer's end of a transport."""

    def offer(self, version: int) -> Offer:
        """Offer the current weights as `version`. The same version may be offered again, an older one may not.

        The trainer may change its weights once `deliver` has returned.
        """
        ...

    def deliver(self) -> None:
        """Do the sender's part while the receivers receive; return at once if the offer holds everything.

        Raises `EngineError` if an engine refused or died; the next offer starts over.
        """
        ...

    def close(self) -> None:
        """Free everything and remove all files. Receivers that still read are not disturbed."""
        ...


class WeightReceiver(Protocol):
    """The engine's end of a transport."""

    @property
    def served(self) -> ServedWeights:
        """The engine's weights, which outlive the receiver."""
        ...

    def receive(self, offer: Offer) -> None:
        """Bring the engine's weights to the offered version. Nothing may generate meanwhile.

        Raises `EngineError`; `ServedWeights.torn` then says whether the old weights are still complete.
        """
        ...

    def close(self) -> None:
        """Free what the receiver holds; the engine's weights stay."""
        ...


def check_specs(sent: Mapping[str, WeightSpec], held: Mapping[str, WeightSpec]) -> None:
    """Raise `EngineError` naming the first weight on which the two sides differ."""
    for name in sorted(sent.keys() | held.keys()):
        if name not in held:
            raise EngineError(f"weight {name!r} is sent, but the engine has no such weight; is it another model?")
        if name not in sent:
            raise EngineError(f"the engine's weight {name!r} is not sent; is it another model?")
        if sent[name] != held[name]:
            raise EngineError(f"weight {name!r}: {sent[name]} is sent, the engine has {held[name]}")
