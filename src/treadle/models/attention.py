"""Attention over packed rows, inside any Hugging Face model.

One function of ours is registered with transformers; a model loaded with it hands every layer's queries, keys and
values to the `AttentionPlan` that came with the call. Training packs sequences (`PackedAttention`), the embedded
engine reads and writes its own key/value store (`rollout/engines/torch_engine`). No transformers cache and no
attention mask is involved.

`PackedAttention` has two ways to compute the same thing: `batched` lays sequences of similar length side by side
and uses a few large matmuls (fast for short sequences, on CPU above all), `sdpa` calls torch's fused attention
once per sequence (memory linear in length). Tests hold one against the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from treadle.errors import ModelError
from treadle.models.layout import PackedLayout

ATTENTION_NAME = "treadle"
PLAN_KEY = "treadle_plan"
MAX_BATCHED_SCORES = 1 << 26
MAX_PADDING = 3.0

Backend = Literal["auto", "batched", "sdpa"]


@dataclass(frozen=True)
class LayerAttention:
    """What a layer says about its attention besides queries, keys and values."""

    layer_idx: int
    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None


class AttentionPlan(Protocol):
    """How the tokens of one forward pass attend."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: LayerAttention) -> Tensor:
        """query [N, H, D], key and value [N, K, D] with H a multiple of K → [N, H, D]."""
        ...


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
        layer_idx=module.layer_idx,
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


class _ToGrid(torch.autograd.Function):
    """Lay rows [N, …] into the cells of a zeroed grid [C, …]; each cell is used at most once."""

    @staticmethod
    def forward(ctx, x: Tensor, rows: Tensor, cells: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(rows, cells)
        ctx.num_rows = x.shape[0]
        return x.new_zeros(size, *x.shape[1:]).index_copy_(0, cells, x.index_select(0, rows))

    @staticmethod
    def backward(ctx, grad: Tensor):
        rows, cells = ctx.saved_tensors
        out = grad.new_zeros(ctx.num_rows, *grad.shape[1:])
        return out.index_copy_(0, rows, grad.index_select(0, cells)), None, None, None


class _FromGrids(torch.autograd.Function):
    """Gather the rows [N, …] of two grids back: the inverse of laying prefixes and suffixes out."""

    @staticmethod
    def forward(ctx, prefix: Tensor, suffix: Tensor, prefix_cells, suffix_cells, num_rows: int) -> Tensor:
        ctx.save_for_backward(*prefix_cells, *suffix_cells)
        ctx.sizes = prefix.shape[0], suffix.shape[0]
        out = prefix.new_empty(num_rows, *prefix.shape[1:])
        for grid, (rows, cells) in ((prefix, prefix_cells), (suffix, suffix_cells)):
            out.index_copy_(0, rows, grid.index_select(0, cells))
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        p_rows, p_cells, s_rows, s_cells = ctx.saved_tensors
        grids = []
        for size, rows, cells in ((ctx.sizes[0], p_rows, p_cells), (ctx.sizes[1], s_rows, s_cells)):
            grids.append(grad.new_zeros(size, *grad.shape[1:]).index_copy_(0, cells, grad.index_select(0, rows)))
        return grids[0], grids[1], None, None, None


class PackedAttention:
    """The plan of a packed row: each suffix sees its prefix and itself, causally."""

    def __init__(self, layout: PackedLayout, backend: Backend = "auto"):
        self.layout = layout
        self.backend = backend
        self._masks: dict[tuple[int | None, torch.dtype], tuple[Tensor, Tensor, Tensor]] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: LayerAttention) -> Tensor:
        if self._choose(query.shape[1]) == "batched":
            return self._batched(query, key, value, layer)
        return self._per_sequence(query, key, value, layer)

    def _choose(self, num_heads: int) -> str:
        if self.backend != "auto":
            return self.backend
        families, most, prefix, suffix = self.layout.shape
        scores = num_heads * families * (prefix * prefix + most * suffix * (prefix + suffix))
        cells = families * (prefix + most * suffix)
        fits = scores <= MAX_BATCHED_SCORES and cells <= MAX_PADDING * self.layout.num_tokens
        return "batched" if fits and self.layout.device.type != "cuda" else "sdpa"

    def _grid_masks(self, window: int | None, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """What scores are raised by, -inf where a query may not look and 0 elsewhere.

        Prefix (P, 1, P), suffix → prefix (F, 1, 1, R, 1, P), suffix → itself (R, 1, R); the 1 before the last is for
        the heads of a key. Adding to the scores in place costs no copy and nothing in the backward pass.
        """
        if (window, dtype) not in self._masks:
            _, _, longest, width = self.layout.shape
            device = self.layout.device
            p, r = torch.arange(longest, device=device), torch.arange(width, device=device)
            ahead = p[None, :] - p[:, None]
            own = r[None, :] - r[:, None]
            lengths = self.layout.prefix_lengths[:, None, None]
            back = lengths + r[None, :, None] - p[None, None, :]
            cross = (p[None, None, :] >= lengths).expand(-1, width, -1)
            masks = ahead > 0, cross, own > 0
            if window is not None:
                masks = masks[0] | (-ahead >= window), masks[1] | (back >= window), masks[2] | (-own >= window)
            hidden = masks[0][:, None], masks[1][:, None, None, :, None], masks[2][:, None]
            prefix, cross, own = (torch.zeros_like(m, dtype=dtype).masked_fill_(m, float("-inf")) for m in hidden)
            self._masks[window, dtype] = prefix, cross, own
        return self._masks[window, dtype]

    def _batched(self, query: Tensor, key: Tensor, value: Tensor, layer: LayerAttention) -> Tensor:
        layout = self.layout
        families, most, longest, width = layout.shape
        heads, dim, groups = query.shape[1], query.shape[2], key.shape[1]
        repeat = heads // groups
        prefix_mask, cross_mask, own_mask = self._grid_masks(layer.sliding_window, query.dtype)
        query = query * layer.scaling

        def prefix_grid(x: Tensor) -> Tensor:  # → (F, K, P, heads per K, D)
            grid = _ToGrid.apply(x, *layout.prefix_cells, families * longest)
            return grid.view(families, longest, groups, x.shape[1] // groups, dim).permute(0, 2, 1, 3, 4)

        def suffix_grid(x: Tensor) -> Tensor:  # → (F, K, M, R, heads per K, D)
            grid = _ToGrid.apply(x, *layout.suffix_cells, families * most * width)
            return grid.view(families, most, width, groups, x.shape[1] // groups, dim).permute(0, 3, 1, 2, 4, 5)

        key_p = prefix_grid(key).reshape(families * groups, longest, dim)
        value_p = prefix_grid(value).reshape(families * groups, longest, dim)
        out_p = query.new_zeros(0, heads, dim)
        if longest:
            rows = prefix_grid(query).reshape(families * groups, longest * repeat, dim)
            scores = _capped(torch.bmm(rows, key_p.transpose(1, 2)), layer.softcap)
            scores = scores.view(-1, longest, repeat, longest).add_(prefix_mask)
            probs = torch.softmax(scores, dim=-1).view(-1, longest * repeat, longest)
            out_p = torch.bmm(probs, value_p).view(families, groups, longest, repeat, dim)
            out_p = out_p.permute(0, 2, 1, 3, 4).reshape(families * longest, heads, dim)
        out_s = query.new_zeros(0, heads, dim)
        if most and width:
            key_s = suffix_grid(key).reshape(families * groups * most, width, dim)
            value_s = suffix_grid(value).reshape(families * groups * most, width, dim)
            rows = suffix_grid(query).reshape(families * groups, most * width * repeat, dim).contiguous()
            cross = _capped(torch.bmm(rows, key_p.transpose(1, 2)), layer.softcap)
            cross = cross.view(families, groups, most, width, repeat, longest).add_(cross_mask)
            own = _capped(
                torch.bmm(rows.view(families * groups * most, width * repeat, dim), key_s.transpose(1, 2)),
                layer.softcap,
            )
            own = own.view(families, groups, most, width, repeat, width).add_(own_mask)
            probs = torch.softmax(torch.cat([cross, own], dim=-1), dim=-1)
            probs_p, probs_s = probs.split([longest, width], dim=-1)
            out_s = torch.bmm(probs_p.reshape(families * groups, most * width * repeat, longest), value_p)
            out_s = out_s.view(-1, width * repeat, dim) + torch.bmm(probs_s.reshape(-1, width * repeat, width), value_s)
            out_s = out_s.view(families, groups, most, width, repeat, dim).permute(0, 2, 3, 1, 4, 5)
            out_s = out_s.reshape(families * most * width, heads, dim)
        return _FromGrids.apply(out_p, out_s, layout.prefix_cells, layout.suffix_cells, layout.num_tokens)

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


def _capped(scores: Tensor, softcap: float | None) -> Tensor:
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
    scores = _capped(q @ k.repeat_interleave(repeat, 1).transpose(2, 3) * layer.scaling, layer.softcap)
    probs = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1)
    return (probs @ v.repeat_interleave(repeat, 1))[0].transpose(0, 1)
