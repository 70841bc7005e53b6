"""Handing new weights from the trainer to an engine: what both sides agree on.

Inside one process a `WeightTransport` does it in one call. Between processes a transport has two ends, and an `Offer`
of plain JSON travels between them on whatever channel the run already has (a Ray call, HTTP):

    offer = sender.offer(version)          trainer: the weights of now are ready under this version
    receiver.receive(offer)                every engine, while it is paused between two tokens
    sender.deliver()                       trainer, meanwhile: returns when its part is done

Both ends check names, shapes and dtypes before the first byte moves. An update is whole, or the engine keeps its old
weights, or it refuses to serve until a whole one succeeds; it never generates with a mixture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from treadle.errors import EngineError

if TYPE_CHECKING:
    from treadle.weights.served_weights import ServedWeights

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


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
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize


@dataclass(frozen=True)
class Offer:
    """What a sender tells every receiver: a version, what its weights are called and look like, where they are."""

    transport: str
    version: int
    specs: Mapping[str, WeightSpec]  # in the order in which they are sent
    where: Mapping[str, Any]  # JSON values, each transport's own

    def to_json(self) -> dict[str, Any]:
        weights = [[name, list(s.shape), str(s.dtype).removeprefix("torch.")] for name, s in self.specs.items()]
        return {"transport": self.transport, "version": self.version, "weights": weights, "where": dict(self.where)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Offer:
        """Read what `to_json` wrote; raises `EngineError` where it is anything else."""
        try:
            specs = {
                str(name): WeightSpec(tuple(int(n) for n in shape), DTYPES[dtype])
                for name, shape, dtype in data["weights"]
            }
            return cls(str(data["transport"]), int(data["version"]), specs, dict(data["where"]))
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"this is no offer of weights ({error!r}): {str(data)[:200]}") from error


class WeightTransport(Protocol):
    """Brings an engine to a new version of the weights, both ends in one call."""

    def push(self, version: int) -> None:
        """Make the engine generate with the trainer's current weights, called `version`.

        Raises `EngineError` before anything changes where names, shapes or dtypes differ or the version is older.
        """
        ...


class WeightSender(Protocol):
    """The trainer's end of a transport between processes."""

    def offer(self, version: int) -> Offer:
        """Make the weights of now ready as `version`; the same version may be offered again, an older one may not.

        The trainer may change its weights once `deliver` has returned.
        """
        ...

    def deliver(self) -> None:
        """Take part in what was offered while the receivers receive; at once where the offer holds everything.

        Raises `EngineError` where an engine refused or was lost; the next offer starts afresh.
        """
        ...

    def close(self) -> None:
        """Free everything and leave no file behind. Receivers that still read are not disturbed."""
        ...


class WeightReceiver(Protocol):
    """The engine's end of a transport between processes."""

    @property
    def served(self) -> ServedWeights:
        """The engine's weights; they outlive the receiver."""
        ...

    def receive(self, offer: Offer) -> None:
        """Bring the engine's weights to the offered version, whole. Nothing may generate meanwhile.

        Raises `EngineError`; `ServedWeights.torn` then says whether the old weights are still whole.
        """
        ...

    def close(self) -> None:
        """Free what the receiver holds; the engine's weights stay."""
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
