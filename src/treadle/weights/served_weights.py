"""The weights at the two ends of every transport: the trainer's, and the engine's with their version."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from treadle.errors import EngineError
from treadle.weights.base import Offer, WeightSpec, check_specs
from treadle.weights.parallel_copy import copy_and_digest, copy_pairs


class SentWeights:
    """The trainer's weights in the dtype that the engine needs.

    Floating-point weights are converted to `dtype` while they are copied out (round to nearest even), so that float32
    masters feed a bfloat16 engine. None sends every weight in its own dtype.
    """

    def __init__(self, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None):
        self._tensors = tensors
        self.last_version: int | None = None
        self.specs = {
            name: WeightSpec(tuple(t.shape), dtype if dtype is not None and t.is_floating_point() else t.dtype)
            for name, t in tensors.items()
        }

    @property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.specs.values())

    def take(self, version: int) -> None:
        """Record that this version is sent now; raises `EngineError` if a newer one was sent before."""
        if self.last_version is not None and version < self.last_version:
            raise EngineError(f"version {version} can't be sent after version {self.last_version}; versions only rise")
        self.last_version = version

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name].detach()

    def copy_to(self, targets: Mapping[str, Tensor]) -> str:
        """Copy every weight into the target of its name, which is contiguous on the CPU; return the targets' digest."""
        return copy_and_digest((targets[name], self[name]) for name in self.specs)


class ServedWeights:
    """The engine's weights: named tensors that are written in place, their version, and whether an update broke off.

    `set_version` is called after each update. `version` is None until the first update. `torn` says which update broke
    off half-way, and is None if the weights are complete. One object outlives receivers and senders.
    """

    def __init__(self, tensors: Mapping[str, Tensor], set_version: Callable[[int], None], version: int | None = None):
        self.tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        self.specs = {name: WeightSpec.of(tensor) for name, tensor in tensors.items()}
        self.version = version
        self.torn: str | None = None
        self._set_version = set_version

    def check(self, offer: Offer, transport: str | None = None) -> None:
        """Raise `EngineError` if the offer is of another transport (unless None), another model or an older version."""
        if transport is not None and offer.transport != transport:
            raise EngineError(f"weights are offered by {offer.transport!r}, this engine receives by {transport!r}")
        self.check_version(offer.version)
        check_specs(offer.specs, self.specs)
        strided = next((name for name, tensor in self.tensors.items() if not tensor.is_contiguous()), None)
        if strided is not None:
            raise EngineError(
                f"the engine's weight {strided!r} is not contiguous in memory and can't be written in place"
            )

    def check_version(self, version: int) -> None:
        if self.version is not None and version < self.version:
            raise EngineError(f"version {version} is offered, the engine already has {self.version}; restart it")

    @contextmanager
    def writing(self, version: int) -> Iterator[None]:
        """Write weights inside: an error leaves the engine torn, success makes its weights `version`."""
        self.torn = f"the update to version {version} broke off half-way; push a whole version"
        try:
            with torch.no_grad():
                yield
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(f"the update to version {version} broke off: {' '.join(str(error).split())}") from error
        self.torn = None
        self.version = version
        self._set_version(version)

    def copy_from(self, sources: Mapping[str, Tensor], version: int) -> None:
        """Copy every weight from the source of its name, as one update."""
        with self.writing(version):
            self.copy(sources)

    def copy(self, sources: Mapping[str, Tensor]) -> None:
        """Copy as part of an update; nothing is copied if the two are the same memory."""
        copy_pairs((t, sources[name]) for name, t in self.tensors.items() if t.data_ptr() != sources[name].data_ptr())
