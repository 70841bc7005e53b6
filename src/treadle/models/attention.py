"""Attention over packed rows, inside any Hugging Face model.

One function of ours is registered with transformers. A model loaded with it passes every layer's queries, keys and
values to the `AttentionPlan` that came with the call. Training packs sequences (`PackedAttention`); the embedded
engine reads and writes its own key/value store (`rollout/engines/torch_engine`). Neither transformers' cache nor an
attention mask is used.

`PackedAttention` has three implementations. On CPUs that multiply bfloat16 one compiled call reads the row as it lies
(cpu/packed_attention.py). `batched` lays sequences of similar length side by side and uses a few large matmuls
(cpu/block_attention.py), which is fast for short sequences on a CPU. `sdpa` calls torch's fused attention once per
sequence. Memory is linear in length. Tests compare all three.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from treadle.errors import ModelError
from treadle.models.cpu.block_attention import BlockAttention, Grid, grid_of
from treadle.models.cpu.packed_attention import RowAttention
from treadle.models.layout import PackedLayout

ATTENTION_NAME = "treadle"
PLAN_KEY = "treadle_plan"
MAX_PADDING = 3.0

Backend = Literal["auto", "batched", "sdpa"]
Pair = Sequence[Tensor]


@dataclass(frozen=True)
class LayerAttention:
    """What a layer declares about its attention besides queries, keys and values."""

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None


class AttentionPlan(Protocol):
    """How the tokens of one forward pass attend."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: LayerAttention) -> Tensor:
        """Attend from query [N, H, D] to key and value [N, K, D], H a multiple of K; return [N, H, D]."""
        ...


@dataclass(frozen=True)
class RecordedCall:
    """One call of the attention function: what the layer declares, and the heads it passes."""

    layer: LayerAttention
    kv_heads: int
    head_dim: int  # the larger of a key's and a value's


class LayerRecorder:
    """A plan that computes nothing and keeps the calls, in their order."""

    def __init__(self) -> None:
        self.calls: list[RecordedCall] = []

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: LayerAttention) -> Tensor:
        self.calls.append(RecordedCall(layer, key.shape[1], max(key.shape[2], value.shape[2])))
        return query.new_zeros(*query.shape[:2], value.shape[2])


def treadle_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as the plan among the keyword arguments says; the function that is registered with transformers.

    Dropout is ignored, because the policy that is trained must be the one that generates.

    Args:
        query: [1, H, N, D].
        key: [1, K, N, D], and `value` alike.
    Returns:
        [1, N, H, D], and None for the attention weights.
    """
    plan, name = kwargs.get(PLAN_KEY), type(module).__name__
    if plan is None:
        raise ModelError(
            f"{name} did not pass Treadle's attention plan on; this architecture can't be trained by Treadle yet"
        )
    if kwargs.get("s_aux") is not None:
        raise ModelError(f"{name} uses attention sinks, which Treadle does not know yet")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = LayerAttention(scaling, kwargs.get("sliding_window"), kwargs.get("softcap"))
    return plan.attend(*(x[0].transpose(0, 1) for x in (query, key, value)), layer).unsqueeze(0), None


def register_attention() -> str:
    """Register Treadle's attention function with transformers; return the name to load models with."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, treadle_attention)
    return ATTENTION_NAME


class PackedAttention:
    """The plan of a packed row: each suffix attends to its prefix and to itself, causally."""

    def __init__(self, layout: PackedLayout, backend: Backend = "auto"):
        self.layout, self.backend = layout, backend
        self._grids: dict[tuple[int, int, int | None, torch.dtype], Grid] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: LayerAttention) -> Tensor:
        if key.shape[2] != value.shape[2]:  # zeros change neither scores nor sums, and kernels have one head size
            size = max(key.shape[2], value.shape[2])
            wide = self.attend(widened(query, size), widened(key, size), widened(value, size), layer)
            return wide[..., : value.shape[2]]
        if self.backend == "auto" and layer.softcap is None:
            out = self._row.attend(query, key, value, layer.scaling, layer.sliding_window)
            if out is not None:
                return out
        if not self._is_batched:
            return self._per_sequence(query, key, value, layer)
        options = query.shape[1], key.shape[1], layer.sliding_window, query.dtype
        if options not in self._grids:
            self._grids[options] = grid_of(self.layout, *options)
        return BlockAttention.apply(query, key, value, self._grids[options], layer.scaling, layer.softcap)

    @cached_property
    def _row(self) -> RowAttention:
        return RowAttention(self.layout)

    @cached_property
    def _is_batched(self) -> bool:
        families, most, prefix, suffix = self.layout.shape
        fits = families * (prefix + most * suffix) <= MAX_PADDING * self.layout.num_tokens
        return self.backend == "batched" or (self.backend == "auto" and fits and self.layout.device.type == "cpu")

    def _per_sequence(self, query: Tensor, key: Tensor, value: Tensor, layer: LayerAttention) -> Tensor:
        outs = []
        for _, _, before, own in self.layout.runs:
            if own.stop > own.start:
                has_prefix = before.stop > before.start
                keys, values = (torch.cat([x[before], x[own]]) if has_prefix else x[own] for x in (key, value))
                outs.append(causal_attention(query[own], keys, values, layer))
        return torch.cat(outs) if outs else query


def widened(x: Tensor, size: int) -> Tensor:
    """Return heads [N, H, E] with zeros up to `size`."""
    return x if x.shape[2] == size else F.pad(x, (0, size - x.shape[2]))


def capped_scores(scores: Tensor, softcap: float | None) -> Tensor:
    """Return `softcap · tanh(scores / softcap)`, or the scores if there is no cap."""
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


def causal_attention(query: Tensor, key: Tensor, value: Tensor, layer: LayerAttention) -> Tensor:
    """Attend from the last `T` tokens of one sequence: query [T, H, D], key and value [L, K, D], L ≥ T → [T, H, D]."""
    new, total, window = query.shape[0], key.shape[0], layer.sliding_window
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    mask = None
    if new != total or layer.softcap is not None or (window is not None and window < total):
        rows = torch.arange(total - new, total, device=query.device)[:, None]
        columns = torch.arange(total, device=query.device)[None, :]
        mask = columns <= rows if window is None else (columns <= rows) & (rows - columns < window)
    if mask is None or layer.softcap is None:
        causal = mask is None
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=layer.scaling, enable_gqa=True
        )
    else:
        k, v = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (k, v))
        scores = capped_scores(q @ k.transpose(2, 3) * layer.scaling, layer.softcap)
        out = torch.softmax(scores.masked_fill(~mask, float("-inf")), dim=-1) @ v
    return out[0].transpose(0, 1)
