"""Copy many weights in threads of Treadle's own, and compute their digests meanwhile.

torch splits each copy among its OpenMP threads and waits for all of them before the next copy. Beside another busy
program that costs a scheduler quantum for every weight. Here each thread copies whole pieces, and threads wait for each
other only at the end. A piece is small enough that its digest is computed while it is still in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch
import xxhash
from torch import Tensor

PIECE_BYTES = 1 << 20
SERIAL_ELEMENTS = 32_000  # torch copies up to this size in the calling thread

Item = TypeVar("Item")
Result = TypeVar("Result")


def spread(call: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Call `call` with each item, in as many threads as torch uses; return the results in the order of the items."""
    held = list(items)
    others = min(torch.get_num_threads(), len(held)) - 1
    if others < 1:
        return [call(item) for item in held]
    results: dict[int, Result] = {}
    numbers = iter(range(len(held)))  # shared: each thread takes the next item

    def work() -> None:
        for i in numbers:
            results[i] = call(held[i])

    with ThreadPoolExecutor(others, thread_name_prefix="weights") as pool:
        working = [pool.submit(work) for _ in range(others)]
        work()
        for future in working:
            future.result()
    return [results[i] for i in range(len(held))]


def copy_pairs(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy each source into its target, which has the same shape and may have another dtype or device."""
    held = list(pairs)
    if all(tensor.device.type == "cpu" and target.is_contiguous() for target, tensor in held):
        spread(_copy, _pieces(held))
    elif held:
        with torch.no_grad():
            torch._foreach_copy_([target for target, _ in held], [source for _, source in held])


def copy_and_digest(pairs: Iterable[tuple[Tensor, Tensor]]) -> str:
    """Copy each source into its target, contiguous and on the CPU; return the `digest` of the targets."""
    return _joined(spread(_copy_and_digest, _pieces(pairs)))


def digest(tensors: Iterable[Tensor]) -> str:
    """Return the xxh3-128 of the xxh3-64s of all pieces, in order. Tensors are contiguous, on the CPU."""
    return _joined(spread(_digest, (piece for piece, _ in _pieces((tensor, tensor) for tensor in tensors))))


def _pieces(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    for target, source in pairs:
        count = PIECE_BYTES // target.element_size()
        yield from zip(target.detach().view(-1).split(count), source.detach().reshape(-1).split(count), strict=True)


def _copy_and_digest(pair: tuple[Tensor, Tensor]) -> bytes:
    _copy(pair)
    return _digest(pair[0])


def _copy(pair: tuple[Tensor, Tensor]) -> None:
    target, source = pair
    if target.dtype == source.dtype and source.device.type == "cpu":
        np.copyto(target.view(torch.uint8).numpy(), source.view(torch.uint8).numpy())
    else:
        steps = zip(target.split(SERIAL_ELEMENTS), source.split(SERIAL_ELEMENTS), strict=True)
        for part, given in steps if source.device.type == "cpu" else [pair]:
            part.copy_(given)


def _digest(piece: Tensor) -> bytes:
    state = xxhash.xxh3_64()
    state.update(piece.view(torch.uint8).numpy().data)  # releases the GIL, which `xxh3_64_digest` does not
    return state.digest()


def _joined(digests: Iterable[bytes]) -> str:
    return xxhash.xxh3_128_hexdigest(b"".join(digests))
