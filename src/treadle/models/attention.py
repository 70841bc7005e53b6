"""Attention over packed rows, inside any Hugging Face model.

One function of ours is registered with transformers; a model loaded with it hands every layer's queries, keys and
values to the `AttentionPlan` that came with the call. Training packs sequences (`PackedAttention`), the embedded
engine reads and writes its own key/value store (`rollout/engines/torch_engine`). No transformers cache and no
attention mask is involved.

`PackedAttention` has three ways to compute the same thing: on CPUs that multiply bfloat16 one compiled call looks at the
row as it lies (cpu_attention.py); `batched` lays sequences of similar length side by side and uses a few large matmuls
(fast for short sequences, on CPU above all); `sdpa` calls torch's fused attention once per sequence. Memory is linear in
length. Tests hold one against the other.
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
    """What a layer says about its attention besides queries, keys and values."""

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None


class AttentionPlan(Protocol):
    """How the tokens of one forward pass attend."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: LayerAttention) -> Tensor:
        """query [N, H, D], key and value [N, K, D] with H a multiple of K → [N, H, D]."""
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
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function registered with transformers: query [1, H, N, D] → output [1, N, H, D].

    Dropout is ignored: the policy that is trained must be the one that generates.
    """
    plan = kwargs.get(PLAN_KEY)
    if plan is None:
        raise ModelError(
            f"{type(module).__name__} did not pass Treadle's attention plan on; this architecture can't be trained by Treadle yet"
        )
    if kwargs.get("s_aux") is not None:
        raise ModelError(f"{type(module).__name__} uses attention sinks, which Treadle does not know yet")
    layer = LayerAttention(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=kwargs.get("sliding_window"),
        softcap=kwargs.get("softcap"),
    )
    out = plan.attend(query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), layer)
    return out.unsqueeze(0), None


def register_attention() -> str:
    """Make transformers know our attention function; returns the name to load models with."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, treadle_attention)
    return ATTENTION_NAME


class PackedAttention:
    """The plan of a packed row: each suffix sees its prefix and itself, causally."""

    def __init__(self, layout: PackedLayout, backend: Backend = "auto"):
        self.layout = layout
        self.backend = backend
        self._grids: dict[tuple[int, int, int | None, torch.dtype], Grid] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: LayerAttention) -> Tensor:
        if key.shape[2] != value.shape[2]:  # zeros change neither scores nor sums; what computes has one head size
            size = max(key.shape[2], value.shape[2])
            wide = self.attend(widened(query, size), widened(key, size), widened(value, size), layer)
            return wide[..., : value.shape[2]]
        if self.backend == "auto" and layer.softcap is None:
            out = self._row.attend(query, key, value, layer.scaling, layer.sliding_window)
            if out is not None:
                return out
        if self._choose() == "batched":
            grid = self._grid(query.shape[1], key.shape[1], layer.sliding_window, query.dtype)
            return BlockAttention.apply(query, key, value, grid, layer.scaling, layer.softcap)
        return self._per_sequence(query, key, value, layer)

    @cached_property
    def _row(self) -> RowAttention:
        return RowAttention(self.layout)

    def _choose(self) -> str:
        if self.backend != "auto":
            return self.backend
        families, most, prefix, suffix = self.layout.shape
        fits = families * (prefix + most * suffix) <= MAX_PADDING * self.layout.num_tokens
        return "batched" if fits and self.layout.device.type == "cpu" else "sdpa"

    def _grid(self, heads: int, kv_heads: int, window: int | None, dtype: torch.dtype) -> Grid:
        key = (heads, kv_heads, window, dtype)
        if key not in self._grids:
            self._grids[key] = grid_of(self.layout, heads, kv_heads, window, dtype)
        return self._grids[key]

    def _per_sequence(self, query: Tensor, key: Tensor, value: Tensor, layer: LayerAttention) -> Tensor:
        spans = [
            (slice(0, 0), slice(start, start + family.prefix))
            for start, family in zip(self.layout.starts, self.layout.families, strict=True)
            if family.prefix
        ]
        spans += [span for span in self.layout.sequences if span[1].stop > span[1].start]
        spans.sort(key=lambda span: span[1].start)
        outs = []
        for before, own in spans:
            keys = torch.cat([key[before], key[own]]) if before.stop > before.start else key[own]
            values = torch.cat([value[before], value[own]]) if before.stop > before.start else value[own]
            outs.append(causal_attention(query[own], keys, values, layer))
        return torch.cat(outs) if outs else query


def widened(x: Tensor, size: int) -> Tensor:
    """Return heads [N, H, E] with zeros up to `size`."""
    return x if x.shape[2] == size else F.pad(x, (0, size - x.shape[2]))


def capped_scores(scores: Tensor, softcap: float | None) -> Tensor:
    """`softcap · tanh(scores / softcap)`, or the scores where there is no cap."""
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


def causal_attention(query: Tensor, key: Tensor, value: Tensor, layer: LayerAttention) -> Tensor:
    """Attention of the last `T` tokens of one sequence: query [T, H, D], key and value [L, K, D], L ≥ T → [T, H, D]."""
    new, total = query.shape[0], key.shape[0]
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    plain = new == total and layer.softcap is None and (layer.sliding_window is None or layer.sliding_window >= total)
    if plain:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=layer.scaling, enable_gqa=True)
        return out[0].transpose(0, 1)
    rows = torch.arange(total - new, total, device=query.device)[:, None]
    columns = torch.arange(total, device=query.device)[None, :]
    visible = columns <= rows
    if layer.sliding_window is not None:
        visible = visible & (rows - columns < layer.sliding_window)
    if layer.softcap is None:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=layer.scaling, enable_gqa=True)
        return out[0].transpose(0, 1)
    repeat = query.shape[1] // key.shape[1]
    scores = capped_scores(q @ k.repeat_interleave(repeat, 1).transpose(2, 3) * layer.scaling, layer.softcap)
    probs = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1)
    return (probs @ v.repeat_interleave(repeat, 1))[0].transpose(0, 1)
