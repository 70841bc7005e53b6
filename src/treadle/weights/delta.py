"""What changed between two versions of a weight, exactly and small.

A step of training moves few bfloat16 weights, and those by one or two units in the last place. So a weight is read as
integers and cut into blocks; of each block are stored

    gaps     how many unchanged elements lie before each changed one (left out where most have changed)
    values   new minus old, wrapping, zigzag: -1, 1, -2 … become 1, 2, 3 …

each split into byte planes (all low bytes, then all high bytes …) and compressed by zstd at level 1. The high planes
are nearly all zero. Decoding adds the differences again: the result is the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from treadle.errors import EngineError

BLOCK_ELEMENTS = 1 << 22
DENSE_FROM = 0.5  # changed part of a block from which its gaps are not worth their bytes
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Block:
    """Changes in elements `start … start + count` of a weight; `planes` are the compressed sizes of its byte planes."""

    start: int
    count: int
    num_changed: int
    gap_bytes: int  # 0: every element has a value
    planes: tuple[int, ...]


def encode(old: Tensor, new: Tensor) -> Iterator[tuple[Block, bytes]]:
    """The blocks of a weight in which anything changed, each with its bytes. Both tensors contiguous, on the CPU."""
    before, after = _integers(old), _integers(new)
    for start in range(0, before.numel(), BLOCK_ELEMENTS):
        one, other = before[start : start + BLOCK_ELEMENTS], after[start : start + BLOCK_ELEMENTS]
        changed = torch.nonzero(one != other).view(-1)
        if not len(changed):
            continue
        difference = other - one
        gaps = None
        if len(changed) < DENSE_FROM * len(one):
            difference = difference[changed]
            gaps = torch.diff(changed, prepend=changed.new_full((1,), -1)) - 1
        width, planes = 0, []
        if gaps is not None:
            largest = int(gaps.max())
            width = 1 if largest < 1 << 8 else 2 if largest < 1 << 16 else 4
            planes += _planes(gaps.view(torch.uint8).view(-1, 8)[:, :width])
        size = difference.element_size()
        planes += _planes(_zigzag(difference).view(torch.uint8).view(-1, size))
        block = Block(start, len(one), len(changed), width, tuple(len(plane) for plane in planes))
        yield block, b"".join(planes)


def apply(block: Block, data: bytes | memoryview, weight: Tensor) -> None:
    """Bring a weight, contiguous and on any device, from old to new in this block."""
    integers = _integers(weight)
    size = integers.element_size()
    num_values = block.num_changed if block.gap_bytes else block.count
    if len(data) != sum(block.planes) or len(block.planes) != block.gap_bytes + size:
        raise EngineError("a delta does not fit the weight it is for; it is damaged or of another model")
    split = sum(block.planes[: block.gap_bytes])
    values = _joined(data[split:], block.planes[block.gap_bytes :], num_values, size).view(-1).view(integers.dtype)
    difference = _unzigzag(values).to(weight.device)
    target = integers[block.start : block.start + block.count]
    if not block.gap_bytes:
        target += difference
        return
    gaps = _joined(data[:split], block.planes[: block.gap_bytes], num_values, 8).view(-1).view(torch.int64)
    at = (torch.cumsum(gaps + 1, 0) - 1).to(weight.device)
    if len(target) != block.count or int(at[-1]) >= block.count:
        raise EngineError("a delta reaches beyond the end of its weight; it is damaged or of another model")
    target[at] += difference


def _integers(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(INTEGERS[tensor.element_size()])


def _zigzag(x: Tensor) -> Tensor:
    return (x << 1) ^ (x >> (8 * x.element_size() - 1))


def _unzigzag(z: Tensor) -> Tensor:
    mask = torch.iinfo(z.dtype).max  # a logical shift: the sign bit must not come along
    return ((z >> 1) & mask) ^ -(z & 1)


def _planes(rows: Tensor) -> list[bytes]:
    """Compressed columns of a uint8 [elements, bytes] tensor."""
    import pyarrow

    codec = pyarrow.Codec("zstd", compression_level=1)
    columns = rows.t().contiguous().numpy()
    return [codec.compress(pyarrow.py_buffer(column), asbytes=True) for column in columns]


def _joined(data: bytes | memoryview, sizes: tuple[int, ...], length: int, width: int) -> Tensor:
    """uint8 [length, width] from compressed columns; columns beyond those given are zero."""
    import pyarrow

    codec = pyarrow.Codec("zstd")
    rows = np.zeros((length, width), dtype=np.uint8)
    at = 0
    for column, size in enumerate(sizes):
        try:
            plane = codec.decompress(pyarrow.py_buffer(data[at : at + size]), decompressed_size=length)
        except (pyarrow.ArrowException, OSError) as error:
            raise EngineError(f"a delta is damaged: {error}") from error
        rows[:, column] = np.frombuffer(plane, dtype=np.uint8)
        at += size
    return torch.from_numpy(rows)
