"""The difference between two versions of a weight, lossless and compressed.

A training step changes few bfloat16 weights, and those by one or two units in the last place. A weight is therefore
read as integers and split into blocks. For each block that changed, two arrays are stored:

    gaps     number of unchanged elements before each changed one (omitted if most elements changed)
    values   new minus old, with wrap-around and zigzag: -1, 1, -2 … become 1, 2, 3 …

Each array is split into byte planes (all low bytes, then all high bytes …), which zstd compresses at level 1. The high
planes are nearly all zero. Decoding adds the differences to the old weight and restores the new one bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from treadle.errors import EngineError
from treadle.weights.parallel_copy import spread

BLOCK_ELEMENTS = 1 << 18
DENSE_FROM = 0.5  # changed fraction of a block from which gaps take more bytes than they save
Array = npt.NDArray[Any]
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Block:
    """Changes in elements `start … start + count` of a weight; `planes` has the compressed size of each byte plane."""

    start: int
    count: int
    num_changed: int
    gap_bytes: int  # bytes of each gap; 0 if every element has a value
    planes: tuple[int, ...]


def encode(old: Tensor, new: Tensor) -> list[tuple[Block, bytes]]:
    """Return the blocks of a weight in which anything changed, each with its compressed bytes.

    Args:
        old: the previous version, contiguous, on the CPU.
        new: the same shape and dtype, contiguous, on the CPU.
    """
    before, after = _integers(old).numpy(), _integers(new).numpy()
    found = spread(partial(_encode_block, before, after), range(0, len(before), BLOCK_ELEMENTS))
    return [block for block in found if block is not None]


def _encode_block(before: Array, after: Array, start: int) -> tuple[Block, bytes] | None:
    old, new = before[start : start + BLOCK_ELEMENTS], after[start : start + BLOCK_ELEMENTS]
    changed = np.flatnonzero(old != new)
    if not len(changed):
        return None
    if len(changed) < DENSE_FROM * len(old):
        gaps = np.diff(changed, prepend=-1) - 1
        width = next(n for n in (1, 2, 4) if gaps.max() < 1 << 8 * n)
        difference = new[changed] - old[changed]
        planes = _compressed(gaps, width)
    else:
        width, difference, planes = 0, new - old, []
    planes += _compressed(_zigzag(difference), difference.itemsize)
    return Block(start, len(old), len(changed), width, tuple(len(plane) for plane in planes)), b"".join(planes)


def apply(block: Block, data: bytes | memoryview, weight: Tensor) -> None:
    """Apply a block's changes to a weight in place.

    Args:
        block: one that `encode` returned.
        data: its compressed bytes.
        weight: the previous version, contiguous, on any device.
    Raises:
        EngineError: if the block does not fit the weight or its bytes are damaged.
    """
    integers = _integers(weight)
    size = integers.element_size()
    num_values = block.num_changed if block.gap_bytes else block.count
    if len(data) != sum(block.planes) or len(block.planes) != block.gap_bytes + size:
        raise EngineError("a delta does not fit the weight it is for; it is damaged or of another model")
    if block.start + block.count > len(integers):
        raise EngineError("a delta reaches beyond the end of its weight; it is damaged or of another model")
    split = sum(block.planes[: block.gap_bytes])
    values = _joined(data[split:], block.planes[block.gap_bytes :], num_values, size)
    difference = _unzigzag(values)
    target = integers[block.start : block.start + block.count]
    if not block.gap_bytes:
        _add(target, slice(None), difference)
        return
    gaps = _joined(data[:split], block.planes[: block.gap_bytes], num_values, 8)
    at = np.cumsum(gaps + 1) - 1
    if not len(at) or at[-1] >= block.count:
        raise EngineError("a delta reaches beyond the end of its weight; it is damaged or of another model")
    _add(target, at, difference)


def _add(target: Tensor, at: Array | slice, difference: Array) -> None:
    if target.device.type == "cpu":  # numpy stays in this thread; other threads apply other blocks
        target.numpy()[at] += difference
    else:
        places = at if isinstance(at, slice) else torch.from_numpy(at).to(target.device)
        target[places] = target[places] + torch.from_numpy(difference).to(target.device)


def _integers(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(INTEGERS[tensor.element_size()])


def _zigzag(x: Array) -> Array:
    return (x << 1) ^ (x >> (8 * x.itemsize - 1))


def _unzigzag(z: Array) -> Array:
    mask = np.iinfo(z.dtype).max  # makes the shift logical, without the sign bit
    return ((z >> 1) & mask) ^ -(z & 1)


def _compressed(integers: Array, width: int) -> list[bytes]:
    """Return the `width` low byte planes of an integer array, compressed."""
    import pyarrow

    codec = pyarrow.Codec("zstd", compression_level=1)
    rows = integers.view(np.uint8).reshape(-1, integers.itemsize)
    return [codec.compress(pyarrow.py_buffer(np.ascontiguousarray(rows[:, k])), asbytes=True) for k in range(width)]


def _joined(data: bytes | memoryview, sizes: tuple[int, ...], length: int, itemsize: int) -> Array:
    """Return `length` integers from their compressed low byte planes; the bytes above are zero."""
    import pyarrow

    codec = pyarrow.Codec("zstd")
    rows = np.zeros((length, itemsize), dtype=np.uint8)
    at = 0
    for column, size in enumerate(sizes):
        try:
            plane = codec.decompress(pyarrow.py_buffer(data[at : at + size]), decompressed_size=length)
        except (pyarrow.ArrowException, OSError) as error:
            raise EngineError(f"a delta is damaged: {error}") from error
        rows[:, column] = np.frombuffer(plane, dtype=np.uint8)
        at += size
    return rows.reshape(-1).view(f"i{itemsize}")
