"""Attention of a packed row in one call, forward and backward, on CPUs that multiply bfloat16.

packed_attention.cpp reads a row as it lies, family by family and key head by key head, on AMX tiles or with AVX-512's
dot products. block_attention.py is the fallback: for other processors, without GCC, and for layers that need something
else. Tests compare the two.

Axis letters: `N` tokens, `H` query heads, `K` key/value heads, `E` head size.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treadle.models.cpu.library import addresses, load, structure
from treadle.models.layout import PackedLayout

SOURCE = Path(__file__).with_suffix(".cpp")
SIDE = 32
"""Head sizes are multiples of it."""
_Row = structure(SOURCE, "Row")


class RowAttention:
    """The families of a packed row, as `attend` of packed_attention.cpp takes them."""

    def __init__(self, layout: PackedLayout):
        families = [(start, f.prefix, len(f.suffixes)) for start, f in zip(layout.starts, layout.families, strict=True)]
        self.families = torch.tensor(families, dtype=torch.int64).view(-1, 3)
        self.suffixes = torch.tensor([r for f in layout.families for r in f.suffixes], dtype=torch.int64)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None) -> Tensor | None:
        """Attend from query [N, H, E] to key and value [N, K, E]; return [N, H, E], or None if the kernel can't."""
        _, heads, size = query.shape
        fits = key.shape == value.shape and key.shape[2] == size and size % SIDE == 0 and heads % key.shape[1] == 0
        if not fits or query.dtype != torch.bfloat16 or query.device.type != "cpu":
            return None
        library = attention_library(heads // key.shape[1], size)
        return None if library is None else _Attend.apply(query, key, value, self, (library, scaling, window or 0))

    def row(self, options: tuple[Any, float, int], query: Tensor, key: Tensor, value: Tensor, **others: Tensor) -> Any:
        """Return the argument of both directions; `others` are tensors of `Row` by name."""
        return _Row(
            **addresses(query=query, key=key, value=value, families=self.families, suffixes=self.suffixes, **others),
            **{f"{name}_stride": x.stride(0) for name, x in (("query", query), ("key", key), ("value", value))},
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
        # The heads of a token lie side by side.
        given = [x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous() for x in (query, key, value)]
        out, log_sums = query.new_empty(query.shape), query.new_empty(query.shape[:2], dtype=torch.float32)
        options[0].attend(ctypes.byref(families.row(options, *given, out=out, log_sums=log_sums)))
        ctx.save_for_backward(*given, out, log_sums)
        ctx.families, ctx.options = families, options
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *given, out, log_sums = ctx.saved_tensors
        grad = grad.contiguous()
        found = [x.new_empty(x.shape) for x in given]
        gradients = dict(zip(("of_query", "of_key", "of_value"), found, strict=True))
        row = ctx.families.row(ctx.options, *given, out=out, log_sums=log_sums, of_out=grad, **gradients)
        ctx.options[0].attend_backward(ctypes.byref(row))
        return *found, None, None


@functools.cache
def attention_library(heads_per_kv_head: int, head_size: int) -> ctypes.CDLL | None:
    """Return packed_attention.cpp for a shape of heads; None if the processor has no instructions for it."""
    return load(SOURCE, {"HEADS_PER_KV_HEAD": heads_per_kv_head, "HEAD_SIZE": head_size}, needs="blocks")
