"""The layout of named weights in one byte buffer, and how it is split into buckets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from treadle.weights.base import WeightSpec

ALIGNMENT = 64  # bytes: a cache line, and a multiple of every dtype's size


@dataclass(frozen=True)
class Layout:
    """Byte offset of each weight, and the size of all of them with their gaps."""

    specs: Mapping[str, WeightSpec]
    offsets: Mapping[str, int]
    num_bytes: int

    @classmethod
    def of(cls, specs: Mapping[str, WeightSpec]) -> Layout:
        """Return the layout in which each weight starts at a multiple of `ALIGNMENT`, in the order of the names."""
        return cls._placed(specs, list(specs), ALIGNMENT)

    @classmethod
    def dense(cls, specs: Mapping[str, WeightSpec]) -> Layout:
        """Return the layout without gaps, which safetensors needs. The widest dtypes come first, so each is aligned."""
        return cls._placed(specs, sorted(specs, key=lambda name: -specs[name].dtype.itemsize), 1)

    @classmethod
    def _placed(cls, specs: Mapping[str, WeightSpec], names: list[str], alignment: int) -> Layout:
        ends = accumulate((-(-specs[name].num_bytes // alignment) * alignment for name in names), initial=0)
        *starts, end = ends
        return cls(specs, dict(zip(names, starts, strict=True)), end)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the weights as views of `flat`, uint8 [num_bytes]."""
        return {
            name: flat[self.offsets[name] :][: spec.num_bytes].view(spec.dtype).view(spec.shape)
            for name, spec in self.specs.items()
        }


@dataclass(frozen=True)
class Piece:
    """Elements `start … stop` of a weight, read row by row."""

    name: str
    start: int
    stop: int

    def of(self, tensor: Tensor) -> Tensor:
        return tensor.reshape(-1)[self.start : self.stop]


def buckets(specs: Mapping[str, WeightSpec], bucket_bytes: int) -> Iterator[Sequence[Piece]]:
    """Cut the weights, in order, into buckets of at most `bucket_bytes`; large weights are split, small ones joined."""
    if bucket_bytes < ALIGNMENT:
        raise ValueError(f"a bucket of {bucket_bytes} bytes is too small, at least {ALIGNMENT}")
    bucket: list[Piece] = []
    room = bucket_bytes
    for name, spec in specs.items():
        at = 0
        while at < spec.num_elements:
            count = min(spec.num_elements - at, room // ALIGNMENT * ALIGNMENT // spec.dtype.itemsize)
            if count == 0:
                yield bucket
                bucket, room = [], bucket_bytes
                continue
            bucket.append(Piece(name, at, at + count))
            at += count
            room -= -(-count * spec.dtype.itemsize // ALIGNMENT) * ALIGNMENT
    if bucket:
        yield bucket


def bucket_views(pieces: Sequence[Piece], specs: Mapping[str, WeightSpec], buffer: Tensor) -> list[Tensor]:
    """Return a flat view of a uint8 buffer for each piece, in the layout that both ends use."""
    parts = {str(i): WeightSpec((p.stop - p.start,), specs[p.name].dtype) for i, p in enumerate(pieces)}
    return list(Layout.of(parts).views(buffer).values())


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous CPU tensor as uint8 [bytes]."""
    return tensor.reshape(-1).view(torch.uint8)
