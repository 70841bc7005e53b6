"""The output layer of a model without its logits in two compiled calls, on CPUs with AMX tiles.

head.cpp computes scores, their sums and their gradients block by block, in cache. `logprobs_and_entropy`
(algorithms/logprobs.py) uses it if it fits, else torch's operations tile by tile; tests compare the two.

Axis letters: `N` rows, `D` hidden size, `V` vocabulary.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from treadle.models.cpu.library import addresses, load, structure

SOURCE = Path(__file__).with_suffix(".cpp")
EXACT_TARGETS = 1 << 24
"""Tokens that a float32 tells apart."""
_Head = structure(SOURCE, "Head")


class CpuHead:
    """The compiled functions; see `HeadKernel` of algorithms/logprobs.py, whose contract this is."""

    def fits(self, hidden: Tensor, weight: Tensor) -> bool:
        is_here = all(x.dtype == torch.bfloat16 and x.device.type == "cpu" for x in (hidden, weight))
        is_whole = len(hidden) > 0 and len(weight) <= EXACT_TARGETS and not isinstance(weight, DTensor)
        return is_here and is_whole and head_library() is not None

    def sums(self, hidden: Tensor, weight: Tensor, known: Tensor) -> Tensor:
        sums = known.new_empty(len(hidden), 3)
        _call("head_sums", hidden.contiguous(), weight.contiguous(), known=known.contiguous(), sums=sums)
        return sums

    def gradients(
        self, hidden: Tensor, weight: Tensor, known: Tensor, slopes: Tensor, asked: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        hidden, weight = hidden.contiguous(), weight.contiguous()
        of_hidden = torch.empty_like(hidden) if asked[0] else None
        of_weight = torch.empty_like(weight) if asked[1] else None
        others = {"known": known.contiguous(), "slopes": slopes.contiguous()}
        _call("head_gradients", hidden, weight, **others, of_hidden=of_hidden, of_weight=of_weight)
        return of_hidden, of_weight


def _call(name: str, hidden: Tensor, weight: Tensor, **others: Tensor | None) -> None:
    """Call a function of head.cpp; `others` are tensors of `Head` by name."""
    sizes = {"rows": len(hidden), "size": hidden.shape[1], "vocab": len(weight)}
    library = head_library()
    assert library is not None, "`fits` comes first"
    getattr(library, name)(ctypes.byref(_Head(**addresses(hidden=hidden, weight=weight, **others), **sizes)))


@functools.cache
def head_library() -> ctypes.CDLL | None:
    """Return head.cpp if the processor has tiles: with dot products alone torch's matmuls are faster."""
    return load(SOURCE, needs="tiles")
