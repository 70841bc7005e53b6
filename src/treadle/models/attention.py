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

from collections.abc import Iterator, Sequence
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
CACHED_SCORES = 1 << 20
"""Scores computed together on a CPU: 2 MiB in bfloat16, which two cores keep in their second-level caches."""

Backend = Literal["auto", "batched", "sdpa"]
Pair = Sequence[Tensor]


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


@dataclass(frozen=True)
class _Piece:
    """Blocks of a grid that are computed together: some families, or one key head of one family."""

    families: slice
    blocks: slice  # of F·K
    suffixes: slice  # of F·K·M


@dataclass(frozen=True)
class _Grid:
    """A packed row laid out in dense blocks, one for each family and key head: prefixes (F·K, P), suffixes (F·K·M, R).

    A cell holds the queries of one key head, or its key or value, of one token. Cells without a token repeat token 0:
    no token looks at them, and what they look at is not read.
    """

    sizes: tuple[int, int, int, int, int]  # F, M, P, R, K
    sources: tuple[Tensor, Tensor]  # int64 [F·K·P] and [F·K·M·R]: which (token, key head) is in a cell
    padding: tuple[Tensor, Tensor]  # int64: the cells of each without a token
    cells: Tensor  # int64 [N·K]: where each (token, key head) is, prefixes before suffixes
    masks: tuple[Tensor, Tensor]  # added to scores: prefixes [1, 1, 1, P, 1, P], suffixes [F, 1, 1, R, 1, P + R]

    def blocks(self, x: Tensor, *, no_padding: bool = False) -> tuple[Tensor, Tensor]:
        """x [N, H, D] → prefixes [F·K, P·H/K, D] and suffixes [F·K·M, R·H/K, D]; with `no_padding` cells without a token are 0."""
        families, most, prefix, suffix, kv_heads = self.sizes
        repeat, dim = x.shape[1] // kv_heads, x.shape[2]
        pairs = x.reshape(len(x) * kv_heads, repeat * dim)
        first, rest = (pairs.index_select(0, source) for source in self.sources)
        if no_padding:
            first, rest = (x.index_fill_(0, at, 0.0) for x, at in zip((first, rest), self.padding, strict=True))
        return (
            first.view(families * kv_heads, prefix * repeat, dim),
            rest.view(families * kv_heads * most, suffix * repeat, dim),
        )

    def row(self, prefixes: Tensor, suffixes: Tensor, shape: Sequence[int]) -> Tensor:
        """The inverse, [N, H, D] of this shape."""
        width = shape[1] // self.sizes[4] * shape[2]
        both = torch.cat([x.view(x.numel() // width, width) for x in (prefixes, suffixes)])
        return both.index_select(0, self.cells).view(shape)

    def pieces(self, heads: int) -> Iterator[_Piece]:
        """The whole grid on a GPU; on a CPU pieces whose scores stay in its cache from one operation to the next."""
        families, most, prefix, suffix, kv_heads = self.sizes
        scores = heads * (prefix * prefix + most * suffix * (prefix + suffix))
        step = max(1, families) if self.cells.device.type != "cpu" else max(1, CACHED_SCORES // max(scores, 1))
        by_head = kv_heads if step == 1 and scores > CACHED_SCORES and self.cells.device.type == "cpu" else 1
        for start in range(0, families, step):
            end = min(start + step, families)
            count = (end - start) * kv_heads // by_head
            for first in range(start * kv_heads, end * kv_heads, count):
                blocks = slice(first, first + count)
                yield _Piece(slice(start, end), blocks, slice(first * most, (first + count) * most))

    def joined(self, of_prefix: Tensor, of_suffix: Tensor) -> Tensor:
        """Keys or values that the suffixes of a piece see, their prefix and their own: [n·M, P + R, D]."""
        most, suffix = self.sizes[1], self.sizes[3]
        shared = of_prefix.unsqueeze(1).expand(-1, most, -1, -1)
        own = of_suffix.view(len(of_prefix), most, suffix, of_suffix.shape[-1])
        return torch.cat([shared, own], dim=2).flatten(0, 1)

    def part(self, of_joined: Tensor, of_prefix: Tensor, of_suffix: Tensor) -> None:
        """Add the gradient of what `joined` gave to the gradient of prefixes, and set that of suffixes."""
        _, most, prefix, suffix, _ = self.sizes
        parts = of_joined.view(len(of_prefix), most, prefix + suffix, of_joined.shape[-1])
        of_prefix += parts[:, :, :prefix].sum(1)
        of_suffix.copy_(parts[:, :, prefix:].flatten(0, 1))


class _BlockAttention(torch.autograd.Function):
    """Softmax attention of a grid, piece by piece."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, grid: _Grid, layer: LayerAttention) -> Tensor:
        assert query.shape[2] == key.shape[2] and key.shape == value.shape, "values are as wide as keys"  # noqa: PT018
        queries, keys, values = (grid.blocks(x) for x in (query, key, value))
        outs = [torch.empty_like(rows) for rows in queries]
        widths = grid.sizes[2], grid.sizes[2] + grid.sizes[3]
        probs = [rows.new_empty(*rows.shape[:2], width) for rows, width in zip(queries, widths, strict=True)]
        for piece in grid.pieces(query.shape[1]):
            for part, seen, content in _parts(grid, piece, keys, values):
                index = (piece.blocks, piece.suffixes)[part]
                scores = torch.bmm(queries[part][index], seen.transpose(1, 2))
                _mask(scores, grid, piece, part, layer)
                torch.softmax(scores, dim=-1, out=probs[part][index])
                torch.bmm(probs[part][index], content, out=outs[part][index])
        ctx.save_for_backward(*queries, *keys, *values, *probs)
        ctx.grid, ctx.layer, ctx.shapes = grid, layer, (query.shape, key.shape, key.shape)
        return grid.row(*outs, query.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grid, layer = ctx.grid, ctx.layer
        saved = ctx.saved_tensors  # asked for once: with recomputed activations there is no second time
        queries, keys, values, probs = (saved[i : i + 2] for i in range(0, 8, 2))
        of_outs = grid.blocks(grad, no_padding=True)
        of_queries, of_keys, of_values = ([torch.empty_like(x) for x in pair] for pair in (queries, keys, values))
        for piece in grid.pieces(grad.shape[1]):
            for part, seen, content in _parts(grid, piece, keys, values):
                index = (piece.blocks, piece.suffixes)[part]
                rows, of_out, shares = queries[part][index], of_outs[part][index], probs[part][index]
                of_shares = torch.bmm(of_out, content.transpose(1, 2))
                of_scores = torch._softmax_backward_data(of_shares, shares, -1, shares.dtype)
                if layer.softcap is not None:
                    capped = torch.bmm(rows, seen.transpose(1, 2)).mul_(layer.scaling / layer.softcap).tanh_()
                    of_scores.mul_(1 - capped.square_())
                torch.bmm(of_scores, seen, out=of_queries[part][index]).mul_(layer.scaling)
                of_seen = torch.bmm(of_scores.transpose(1, 2), rows).mul_(layer.scaling)
                of_content = torch.bmm(shares.transpose(1, 2), of_out)
                for of_part, whole in ((of_seen, of_keys), (of_content, of_values)):
                    if part == 0:
                        whole[0][index] = of_part
                    else:
                        grid.part(of_part, whole[0][piece.blocks], whole[1][index])
        pairs = zip((of_queries, of_keys, of_values), ctx.shapes, strict=True)
        return *(grid.row(*pair, shape) for pair, shape in pairs), None, None


def _parts(grid: _Grid, piece: _Piece, keys: Pair, values: Pair) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Of a piece the prefixes (0) and the suffixes (1), where there are any, with the keys and values they see."""
    _, most, prefix, suffix, _ = grid.sizes
    if prefix:
        yield 0, keys[0][piece.blocks], values[0][piece.blocks]
    if most * suffix:
        key, value = (grid.joined(x[0][piece.blocks], x[1][piece.suffixes]) for x in (keys, values))
        yield 1, key, value


def _mask(scores: Tensor, grid: _Grid, piece: _Piece, part: int, layer: LayerAttention) -> None:
    """Scale, cap and mask the scores of a piece, in place."""
    mask = grid.masks[part] if part == 0 else grid.masks[part][piece.families]
    families, rows = len(range(*piece.families.indices(grid.sizes[0]))), mask.shape[3]
    blocks = len(scores) if part == 0 else len(scores) // grid.sizes[1]
    view = scores.view(families, blocks // families, len(scores) // blocks, rows, -1, scores.shape[-1])
    if layer.softcap is None:
        torch.add(mask, view, alpha=layer.scaling, out=view)
    else:
        view.mul_(layer.scaling / layer.softcap).tanh_().mul_(layer.softcap).add_(mask)


class PackedAttention:
    """The plan of a packed row: each suffix sees its prefix and itself, causally."""

    def __init__(self, layout: PackedLayout, backend: Backend = "auto"):
        self.layout = layout
        self.backend = backend
        self._grids: dict[tuple[int, int | None, torch.dtype], _Grid] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: LayerAttention) -> Tensor:
        if self._choose(query.shape[1]) == "batched":
            grid = self._grid(key.shape[1], layer.sliding_window, query.dtype)
            return _BlockAttention.apply(query, key, value, grid, layer)
        return self._per_sequence(query, key, value, layer)

    def _choose(self, num_heads: int) -> str:
        if self.backend != "auto":
            return self.backend
        families, most, prefix, suffix = self.layout.shape
        scores = num_heads * families * (prefix * prefix + most * suffix * (prefix + suffix))
        cells = families * (prefix + most * suffix)
        fits = scores <= MAX_BATCHED_SCORES and cells <= MAX_PADDING * self.layout.num_tokens
        return "batched" if fits and self.layout.device.type != "cuda" else "sdpa"

    def _grid(self, kv_heads: int, window: int | None, dtype: torch.dtype) -> _Grid:
        """Where tokens lie, and what is added to scores: -inf where a query may not look, and 0 elsewhere."""
        found = self._grids.get((kv_heads, window, dtype))
        if found is not None:
            return found
        layout, device = self.layout, self.layout.device
        families, most, longest, width = layout.shape
        p, r = torch.arange(longest, device=device), torch.arange(width, device=device)
        ahead, own = p[None, :] - p[:, None], r[None, :] - r[:, None]
        lengths = layout.prefix_lengths[:, None, None]
        back = lengths + r[None, :, None] - p[None, None, :]
        hidden_p, cross, hidden_own = ahead > 0, (p[None, None, :] >= lengths).expand(-1, width, -1), own > 0
        if window is not None:
            hidden_p, cross, hidden_own = (
                hidden_p | (-ahead >= window),
                cross | (back >= window),
                hidden_own | (-own >= window),
            )
        hidden_s = torch.cat([cross, hidden_own.expand(families, -1, -1)], dim=-1)[:, None, None, :, None, :]
        hidden_p = hidden_p[None, None, None, :, None, :]
        masks = [torch.zeros_like(m, dtype=dtype).masked_fill_(m, float("-inf")) for m in (hidden_p, hidden_s)]

        heads = torch.arange(kv_heads, device=device)
        sizes, sources, padding = (longest, most * width), [], []
        cells = torch.zeros(layout.num_tokens, kv_heads, dtype=torch.int64, device=device)
        offset = 0
        for (rows, places), size in zip((layout.prefix_cells, layout.suffix_cells), sizes, strict=True):
            family, inside = places // max(size, 1), places % max(size, 1)
            at = (family[:, None] * kv_heads + heads) * size + inside[:, None]
            cells[rows] = at + offset
            source = torch.full((families * kv_heads * size,), -1, device=device)
            source.index_copy_(0, at.flatten(), (rows[:, None] * kv_heads + heads).flatten())
            padding.append((source < 0).nonzero()[:, 0])
            sources.append(source.clamp_(min=0))
            offset += len(source)
        grid = _Grid(
            sizes=(families, most, longest, width, kv_heads),
            sources=(sources[0], sources[1]),
            padding=(padding[0], padding[1]),
            cells=cells.flatten(),
            masks=(masks[0], masks[1]),
        )
        self._grids[kv_heads, window, dtype] = grid
        return grid

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
