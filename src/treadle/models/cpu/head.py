"""The head of a model without its logits in two compiled calls, on CPUs with AMX tiles.

head.cpp makes scores, takes them in and makes their gradients block by block, in cache: `logprobs_and_entropy`
(algorithms/logprobs.py) asks for it where it fits, and computes the same tile by tile with torch's operations where it does not;
tests hold one against the other.

Axis letters: `N` rows, `D` hidden size, `V` vocabulary.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from treadle.models.cpu.library import load

SOURCE = Path(__file__).with_suffix(".cpp")
EXACT_TARGETS = 1 << 24
"""Tokens that a float32 tells apart."""


class _Head(ctypes.Structure):
    """`Head` of head.cpp."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("hidden", "weight", "known", "sums", "slopes", "of_hidden", "of_weight")
        ),
        *((name, ctypes.c_int64) for name in ("rows", "size", "vocab")),
    )


class CpuHead:
    """The compiled functions; see `HeadKernel` of algorithms/logprobs.py, whose contract this is."""

    def fits(self, hidden: Tensor, weight: Tensor) -> bool:
        is_here = all(x.dtype == torch.bfloat16 and x.device.type == "cpu" for x in (hidden, weight))
        is_whole = len(hidden) > 0 and len(weight) <= EXACT_TARGETS and not isinstance(weight, DTensor)
        return is_here and is_whole and head_library() is not None

    def sums(self, hidden: Tensor, weight: Tensor, known: Tensor) -> Tensor:
        hidden, weight, known = (x.contiguous() for x in (hidden, weight, known))
        sums = known.new_empty(len(hidden), 3)
        head = _head(hidden, weight, known)
        head.sums = sums.data_ptr()
        _asked().head_sums(ctypes.byref(head))
        return sums

    def gradients(
        self, hidden: Tensor, weight: Tensor, known: Tensor, slopes: Tensor, asked: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        given = hidden, weight = hidden.contiguous(), weight.contiguous()
        known, slopes = known.contiguous(), slopes.contiguous()
        of_hidden, of_weight = (
            x.new_empty(x.shape) if wanted else None for x, wanted in zip(given, asked, strict=True)
        )
        head = _head(hidden, weight, known)
        head.slopes = slopes.data_ptr()
        head.of_hidden = None if of_hidden is None else of_hidden.data_ptr()
        head.of_weight = None if of_weight is None else of_weight.data_ptr()
        _asked().head_gradients(ctypes.byref(head))
        return of_hidden, of_weight


def _head(hidden: Tensor, weight: Tensor, known: Tensor) -> _Head:
    pointers = (x.data_ptr() for x in (hidden, weight, known))
    return _Head(*pointers, rows=len(hidden), size=hidden.shape[1], vocab=len(weight))


@functools.cache
def head_library() -> ctypes.CDLL | None:
    """Return head.cpp if the processor has tiles: with dot products alone torch's matmuls are faster."""
    return load(SOURCE, {"head_sums": "p", "head_gradients": "p"}, needs="tiles")


def _asked() -> ctypes.CDLL:
    library = head_library()
    assert library is not None, "`fits` comes first"
    return library
