"""Gradients of linear layers' weights, on CPUs with AMX tiles in a compiled call.

torch's matmul takes 1.5 to 2 times as long if its left side is a transpose; matmul.cpp transposes while it packs.
torch's matmul is the fallback; tests compare the two.

Axis letters: `N` tokens, `O` outputs, `D` inputs.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from treadle.models.cpu.library import load

SOURCE = Path(__file__).with_suffix(".cpp")
WORTH_A_CALL = 1 << 24
"""Number of products from which a compiled call pays."""


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Return gradᵀ x [O, D] of grad [N, O] and x [N, D], summed in float32 if both are bfloat16."""
    outputs, inputs = grad.shape[1], x.shape[1]
    is_here = all(y.dtype == torch.bfloat16 and y.device.type == "cpu" and y.stride(1) == 1 for y in (grad, x))
    library = matmul_library() if is_here and len(x) * outputs * inputs > WORTH_A_CALL else None
    if library is None:
        return grad.T @ x
    out = x.new_empty(outputs, inputs)
    pointers = (y.data_ptr() for y in (out, grad, x))
    library.weight_gradient(*pointers, grad.stride(0), x.stride(0), len(x), outputs, inputs)
    return out


@functools.cache
def matmul_library() -> ctypes.CDLL | None:
    """Return matmul.cpp if the processor has tiles."""
    return load(SOURCE, needs="tiles")
