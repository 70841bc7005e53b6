"""Attention of a packed row in one call, forward and backward, on CPUs that multiply bfloat16.

packed_attention.cpp looks at a row as it lies, family by family and key head by key head, on AMX tiles or with AVX-512's
dot products. Where the processor has neither, without GCC, or where a layer asks for something else, it is
block_attention.py that computes the same; tests hold one against the other.

Axis letters: `N` tokens, `H` query heads, `K` key/value heads, `E` head size.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treadle.models.cpu.library import load
from treadle.models.layout import PackedLayout

SOURCE = Path(__file__).with_suffix(".cpp")
SIDE = 32
"""Head sizes are multiples of it."""


class _Row(ctypes.Structure):
    """`Row` of packed_attention.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "out", "log_sums")),
        *((name, ctypes.c_void_p) for name in ("of_out", "of_query", "of_key", "of_value", "families", "suffixes")),
        *((name, ctypes.c_int64) for name in ("query_stride", "key_stride", "value_stride")),
        *((name, ctypes.c_int64) for name in ("num_families", "kv_heads", "window")),
        ("scale", ctypes.c_float),
    )


class RowAttention:
    """The families of a packed row, as `attend` of packed_attention.cpp takes them."""

    def __init__(self, layout: PackedLayout):
        families = [(start, f.prefix, len(f.suffixes)) for start, f in zip(layout.starts, layout.families, strict=True)]
        self.families = torch.tensor(families, dtype=torch.int64).view(-1, 3)
        self.suffixes = torch.tensor([r for f in layout.families for r in f.suffixes], dtype=torch.int64)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None) -> Tensor | None:
        """query [N, H, E], key and value [N, K, E] → [N, H, E]; None where this can't be computed here."""
        _, heads, size = query.shape
        fits = key.shape == value.shape and key.shape[2] == size and size % SIDE == 0 and heads % key.shape[1] == 0
        if not fits or query.dtype != torch.bfloat16 or query.device.type != "cpu":
            return None
        library = attention_library(heads // key.shape[1], size)
        return None if library is None else _Attend.apply(query, key, value, self, (library, scaling, window or 0))

    def row_of(self, query: Tensor, key: Tensor, value: Tensor, options: tuple[Any, float, int]) -> _Row:
        """What both directions are told; tensors are as `_in_rows` makes them."""
        return _Row(
            query=query.data_ptr(),
            key=key.data_ptr(),
            value=value.data_ptr(),
            query_stride=query.stride(0),
            key_stride=key.stride(0),
            value_stride=value.stride(0),
            families=self.families.data_ptr(),
            suffixes=self.suffixes.data_ptr(),
            num_families=len(self.families),
            kv_heads=key.shape[1],
            scale=options[1],
            window=options[2],
        )


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, families: RowAttention, options: tuple[Any, float, int]
    ) -> Tensor:
        given = _in_rows(query), _in_rows(key), _in_rows(value)
        out = query.new_empty(query.shape)
        log_sums = query.new_empty(query.shape[:2], dtype=torch.float32)
        row = families.row_of(*given, options)
        row.out, row.log_sums = out.data_ptr(), log_sums.data_ptr()
        options[0].attend(ctypes.byref(row))
        ctx.save_for_backward(*given, out, log_sums)
        ctx.families, ctx.options = families, options
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *given, out, log_sums = ctx.saved_tensors
        grad = grad.contiguous()
        found = tuple(x.new_empty(x.shape) for x in given)
        row = ctx.families.row_of(*given, ctx.options)
        row.out, row.log_sums, row.of_out = out.data_ptr(), log_sums.data_ptr(), grad.data_ptr()
        row.of_query, row.of_key, row.of_value = (x.data_ptr() for x in found)
        ctx.options[0].attend_backward(ctypes.byref(row))
        return *found, None, None


def _in_rows(x: Tensor) -> Tensor:
    """[N, heads, E] with the heads of a token side by side."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


@functools.cache
def attention_library(heads_per_kv_head: int, head_size: int) -> ctypes.CDLL | None:
    """Return packed_attention.cpp for a shape of heads; None if the processor has no instructions for it."""
    sizes: dict[str, object] = {"HEADS_PER_KV_HEAD": heads_per_kv_head, "HEAD_SIZE": head_size}
    return load(SOURCE, {"attend": "p", "attend_backward": "p"}, sizes, needs="blocks")
