"""Attention of a packed row as a few large matmuls, with a backward pass of its own.

Sequences of similar length lie side by side in dense blocks, with the heads of a key folded into rows. What a query
attends to is a run of columns, so a *tile* (some rows of all blocks of a kind, and the columns they attend to) needs only
the ends of each run as its mask. Prefixes attend to themselves. Suffixes attend to their prefix, all samples of it in
one matmul, and to themselves; the two results are joined by the logs of their sums. Scores are computed again in the
backward pass, piece by piece, so memory is linear in length.

Same idea: Dao et al. 2022, "FlashAttention", arXiv 2205.14135; Juravsky et al. 2024, "Hydragen" (shared prefixes), arXiv 2402.05099.

Axis letters: `N` tokens, `H` heads, `K` key heads, `D` head size, `F` families, `M` most suffixes in a family, `P` longest
prefix, `R` longest suffix, `B` blocks, `Q` rows and `L` columns of a block.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from treadle.compiled_formula import OnePass
from treadle.models.layout import PackedLayout

CACHED_SCORES = 1 << 22
"""Scores computed together on a CPU. They exceed the L2 caches, but fewer and larger operations outweigh that."""
CAUSAL_TOKENS = 256
"""Tokens of a block that attend together to what precedes the last of them: fewer waste less on masked columns, more are faster."""
NOTHING = torch.finfo(torch.float32).min
"""Log of the sum of a row that attends to nothing: not -inf, because -inf - -inf is NaN."""

PREFIX, SUFFIX = 0, 1


@dataclass(frozen=True)
class Tile:
    """Rows of some blocks that attend to columns of others. Row i attends to the columns in [low[i], high[i])."""

    query_kind: int  # PREFIX or SUFFIX
    key_kind: int  # all suffixes of a prefix are one block if they attend to it, else a block each
    blocks: slice
    rows: slice
    columns: slice
    low: Tensor  # float32 [Q], which a compiled loop compares faster than integers
    high: Tensor
    mask: Tensor | None  # [Q, L], 0 or -inf, in the dtype of queries; None if every row attends to every column

    @property
    def step(self) -> int:
        """Number of blocks whose scores are computed together."""
        count = self.blocks.stop - self.blocks.start
        return min(count, max(1, CACHED_SCORES // self.scores)) if self.low.device.type == "cpu" else count

    @property
    def scores(self) -> int:
        """Number of scores in one block."""
        return len(self.low) * (self.columns.stop - self.columns.start)

    def pieces(self) -> Iterator[slice]:
        """Yield the blocks that are computed together, counted from the first of the tile."""
        count = self.blocks.stop - self.blocks.start
        return (slice(start, min(start + self.step, count)) for start in range(0, count, self.step))


@dataclass(frozen=True)
class Pair:
    """Prefixes [F·K, P·H/K, D] and suffixes [F·K·M, R·H/K, D], and the memory of both, [cells, H/K·D]."""

    cells: Tensor
    parts: tuple[Tensor, Tensor]

    def rows_of(self, tile: Tile) -> Tensor:
        """Return the rows of a tile [B, Q, D]."""
        part = self.parts[tile.query_kind]
        return part.view(len(self.parts[tile.key_kind]), -1, part.shape[-1])[tile.blocks, tile.rows]

    def columns_of(self, tile: Tile) -> Tensor:
        """Return the columns of a tile [B, L, D]."""
        return self.parts[tile.key_kind][tile.blocks, tile.columns]


@dataclass(frozen=True)
class Grid:
    """A packed row laid out in dense blocks, one for each family and key head: prefixes (F·K, P), suffixes (F·K·M, R).

    A cell holds the queries of one key head, or its key or value, of one token. Cells without a token repeat token 0:
    no token attends to them, and their results are not read.
    """

    sizes: tuple[int, int, int, int, int]  # F, M, P, R, K
    source: Tensor  # int64 [F·K·P + F·K·M·R]: which (token, key head) is in a cell, prefixes before suffixes
    padding: Tensor  # int64: the cells without a token
    cells: Tensor  # int64 [N·K]: the cell of each (token, key head)
    tiles: tuple[Tile, ...]
    scratch: dict[torch.dtype, Tensor] = field(
        default_factory=dict
    )  # for `score_pair`; all pieces of all layers use it

    def blocks(self, x: Tensor, *, no_padding: bool = False) -> Pair:
        """Lay x [N, H, D] out in blocks; with `no_padding` cells without a token are 0."""
        kv_heads = self.sizes[4]
        cells = x.reshape(len(x) * kv_heads, x.shape[1] // kv_heads * x.shape[2]).index_select(0, self.source)
        if no_padding:
            cells.index_fill_(0, self.padding, 0.0)
        return self.pair(cells, x.shape[2])

    def empty(self, heads: int, dim: int, dtype: torch.dtype) -> Pair:
        """Return uninitialised blocks for numbers [N, H, D]."""
        width = heads // self.sizes[4] * dim
        return self.pair(torch.empty(len(self.source), width, dtype=dtype, device=self.source.device), dim)

    def score_pair(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return two uninitialised tensors of this shape, for the scores of a piece and for their gradients."""
        if dtype not in self.scratch:
            most = max(tile.step * tile.scores for tile in self.tiles)
            self.scratch[dtype] = torch.empty(2, most, dtype=dtype, device=self.source.device)
        return self.scratch[dtype][:, : math.prod(shape)].view(2, *shape)

    def pair(self, cells: Tensor, dim: int) -> Pair:
        families, most, prefix, suffix, kv_heads = self.sizes
        first, rest = cells.split([families * kv_heads * prefix, families * kv_heads * most * suffix])
        repeat, blocks = cells.shape[1] // dim, families * kv_heads
        return Pair(cells, (first.view(blocks, prefix * repeat, dim), rest.view(blocks * most, suffix * repeat, dim)))

    def row(self, pair: Pair, shape: Sequence[int]) -> Tensor:
        """Return the inverse of `blocks`, [N, H, D] of this shape."""
        return pair.cells.index_select(0, self.cells).view(shape)


def grid_of(layout: PackedLayout, heads: int, kv_heads: int, window: int | None, dtype: torch.dtype) -> Grid:
    """Lay the tokens of a row out in blocks, for queries of this dtype."""
    device = layout.device
    families, most, longest, width = layout.shape
    key_heads = torch.arange(kv_heads, device=device)
    source = torch.full((families * kv_heads * (longest + most * width),), -1, device=device)
    cells = torch.zeros(layout.num_tokens, kv_heads, dtype=torch.int64, device=device)
    offset = 0
    for (rows, places), size in zip((layout.prefix_cells, layout.suffix_cells), (longest, most * width), strict=True):
        family, inside = places // max(size, 1), places % max(size, 1)
        cells[rows] = offset + (family[:, None] * kv_heads + key_heads) * size + inside[:, None]
        offset += families * kv_heads * size
    source.index_copy_(0, cells.flatten(), torch.arange(layout.num_tokens * kv_heads, device=device))
    padding = (source < 0).nonzero()[:, 0]
    tiles = tuple(_Tiles(layout, heads // kv_heads, kv_heads, window, dtype).all())
    return Grid((families, most, longest, width, kv_heads), source.clamp_(min=0), padding, cells.flatten(), tiles)


@dataclass(frozen=True)
class _Tiles:
    """Makes the tiles of a row; a token has `repeat` rows in a block."""

    layout: PackedLayout
    repeat: int
    kv_heads: int
    window: int | None
    dtype: torch.dtype

    def all(self) -> Iterator[Tile]:
        families, most, prefix, suffix = self.layout.shape
        count = families * self.kv_heads
        for kind, length, blocks in ((PREFIX, prefix, count), (SUFFIX, suffix, count * most)):
            if length and blocks:
                yield from self._at_themselves(kind, slice(0, blocks), length)
        start = 0
        for length, run in itertools.groupby(family.prefix for family in self.layout.families):
            end = start + self.kv_heads * len(list(run))
            if length and most * suffix:
                yield from self._at_prefixes(slice(start, end), length, most, suffix)
            start = end

    def _at_themselves(self, kind: int, blocks: slice, length: int) -> Iterator[Tile]:
        """Yield the tiles of sequences at themselves: some tokens each, at all that precedes the last of them."""
        tokens, window = min(CAUSAL_TOKENS, length), self.window
        inside = self._positions(0, tokens).repeat_interleave(self.repeat)
        # Counted from the first of the tokens, the columns are the same wherever the tokens are: all use parts of one mask.
        before = (length - 1) // tokens * tokens
        mask = self._mask(self._positions(-before, tokens), self._low(inside), inside + 1)
        for start in range(0, length, tokens):
            end = min(start + tokens, length)
            first = 0 if window is None else max(0, start + 1 - window)
            at = start + inside[: (end - start) * self.repeat]
            part = mask[: len(at), before - start + first : before - start + end]
            rows = slice(start * self.repeat, end * self.repeat)
            yield Tile(kind, kind, blocks, rows, slice(first, end), self._low(at), at + 1, part)

    def _at_prefixes(self, blocks: slice, prefix: int, most: int, suffix: int) -> Iterator[Tile]:
        """Yield the tiles of all suffixes of families at their prefixes, which are equally long."""
        at = prefix + self._positions(0, suffix).repeat_interleave(self.repeat).repeat(most)
        low, high = self._low(at), torch.full_like(at, prefix)
        step = max(1, CACHED_SCORES // prefix)
        whole = self.layout.device.type != "cpu" or len(at) <= step
        for start in range(0, len(at), len(at) if whole else step):
            rows = slice(start, len(at) if whole else min(start + step, len(at)))
            ends, columns = (low[rows], high[rows]), self._positions(0, prefix)
            mask = self._mask(columns, *ends) if bool((ends[0] > 0).any()) else None
            tile = Tile(SUFFIX, PREFIX, blocks, rows, slice(0, prefix), *ends, mask)
            if whole:
                yield tile
            else:  # rows of one block lie together, parts of several do not
                yield from (replace(tile, blocks=slice(i, i + 1)) for i in range(blocks.start, blocks.stop))

    def _low(self, at: Tensor) -> Tensor:
        """Return the first position that each of these attends to."""
        return torch.full_like(at, -torch.inf) if self.window is None else at + 1 - self.window

    def _positions(self, start: int, end: int) -> Tensor:
        return torch.arange(start, end, dtype=torch.float32, device=self.layout.device)

    def _mask(self, columns: Tensor, low: Tensor, high: Tensor) -> Tensor:
        hidden = (columns < low[:, None]) | (columns >= high[:, None])
        return torch.zeros(hidden.shape, dtype=self.dtype, device=low.device).masked_fill_(hidden, -torch.inf)


class BlockAttention(torch.autograd.Function):
    """Softmax attention of a grid: query [N, H, D], key and value [N, K, D] → [N, H, D]."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, grid: Grid, scaling: float, softcap: float | None
    ) -> Tensor:
        assert query.shape[2] == key.shape[2] and key.shape == value.shape, "values are as wide as keys"  # noqa: PT018
        queries, keys, values = (grid.blocks(x) for x in (query, key, value))
        exact = torch.promote_types(query.dtype, torch.float32)
        outs, log_sums = grid.empty(query.shape[1], query.shape[2], query.dtype), grid.empty(query.shape[1], 1, exact)
        for tile in grid.tiles:
            queried, so_far, sum_so_far = (x.rows_of(tile) for x in (queries, outs, log_sums))
            for piece in tile.pieces() if softcap is not None else [slice(None)]:
                some_keys, some_values = (x.columns_of(tile)[piece] for x in (keys, values))
                out, log_sum = _attend(tile, queried[piece], some_keys, some_values, scaling, softcap)
                if tile.query_kind == tile.key_kind:
                    so_far[piece].copy_(out)
                    sum_so_far[piece].copy_(log_sum)
                else:
                    so_far_rows = (x[piece].view(-1, x.shape[-1]) for x in (so_far, sum_so_far))
                    _join(*so_far_rows, out.flatten(0, 1), log_sum.flatten(0, 1))
        row = grid.row(outs, query.shape)
        ctx.save_for_backward(queries.cells, keys.cells, values.cells, log_sums.cells, row)
        ctx.grid, ctx.options, ctx.shapes = grid, (scaling, softcap), (query.shape, key.shape, key.shape)
        return row

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *saved, out = ctx.saved_tensors  # read once: with recomputed activations a second read fails
        grid, (_, heads, dim) = ctx.grid, grad.shape
        queries, keys, values, log_sums = (grid.pair(x, d) for x, d in zip(saved, (dim, dim, dim, 1), strict=True))
        exact = log_sums.cells.dtype
        along = torch.empty(grad.shape[0] * heads, 1, dtype=exact, device=grad.device)
        _row_dots(along, grad.reshape(-1, dim), out.flatten(0, 1))
        of_outs, alongs = (grid.blocks(x, no_padding=True) for x in (grad, along.view(*grad.shape[:2], 1)))
        of_queries = grid.empty(heads, dim, grad.dtype)
        of_keys, of_values = (grid.pair(torch.zeros_like(x.cells, dtype=exact), dim) for x in (keys, values))
        for tile in grid.tiles:
            # Dense, because `bmm` on a CPU is slow if they are not.
            by_row = [x.rows_of(tile).contiguous() for x in (queries, of_outs, log_sums, alongs)]
            by_column = [x.columns_of(tile).contiguous() for x in (keys, values)]
            written = of_queries.rows_of(tile), of_keys.columns_of(tile), of_values.columns_of(tile)
            for piece in tile.pieces():
                _gradients(tile, [x[piece] for x in (*by_row, *by_column, *written)], grid, ctx.options)
        found = zip((of_queries, of_keys, of_values), ctx.shapes, strict=True)
        return *(grid.row(x, shape).to(grad.dtype) for x, shape in found), None, None, None


def _attend(
    tile: Tile, query: Tensor, key: Tensor, value: Tensor, scaling: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Compute the attention of a tile alone.

    Returns:
        The output [B, Q, D] and the log of each row's sum [B, Q, 1]; 0 and `NOTHING` for rows that attend to nothing.
    """
    if softcap is None and query.device.type == "cpu":
        heads = [x.unsqueeze(1) for x in (query, key, value)]
        mask = None if tile.mask is None else tile.mask[None, None]
        out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*heads, attn_mask=mask, scale=scaling)
        out, log_sum = out.squeeze(1), log_sum.squeeze(1).unsqueeze(-1)
        if tile.mask is not None and tile.query_kind != tile.key_kind:
            blind = (tile.high <= tile.low)[None, :, None]
            out, log_sum = out.masked_fill(blind, 0.0), log_sum.masked_fill(blind, NOTHING)
        return out, log_sum
    scores = torch.bmm(query, key.transpose(1, 2)).to(torch.promote_types(query.dtype, torch.float32)) * scaling
    scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
    scores = scores if tile.mask is None else scores + tile.mask
    log_sum = torch.logsumexp(scores, -1, keepdim=True).clamp_(min=NOTHING)
    return torch.bmm((scores - log_sum).exp_().to(value.dtype), value), log_sum


def _gradients(tile: Tile, tensors: Sequence[Tensor], grid: Grid, options: tuple[float, float | None]) -> None:
    """Compute the gradients of the queries, keys and values of some blocks.

    Args:
        tensors: of rows, queries and the gradient of the output [B, Q, D], the log of the sum and `_row_dots` [B, Q, 1];
            of columns, keys and values [B, L, D]; then the gradients of queries, which are written, and of keys and values,
            which are added to in the precision of sums.
    """
    query, of_out, log_sum, along, key, value, of_query, of_key, of_value = tensors
    shares, of_scores = grid.score_pair(len(query), query.shape[1], key.shape[1], dtype=query.dtype)
    torch.bmm(query, key.transpose(1, 2), out=shares)
    torch.bmm(of_out, value.transpose(1, 2), out=of_scores)
    columns = torch.arange(tile.columns.start, tile.columns.stop, dtype=torch.float32, device=shares.device)
    ends = (x.repeat(len(shares))[:, None] for x in (tile.low, tile.high))
    known = torch.cat([log_sum.view(-1, 1), along.view(-1, 1), *ends], dim=1)
    _score_gradients(shares.flatten(0, 1), of_scores.flatten(0, 1), known, whole=(columns, *options))
    if tile.query_kind == tile.key_kind:  # comes first
        torch.bmm(of_scores, key, out=of_query)
    else:
        of_query.baddbmm_(of_scores, key)
    of_key.add_(torch.bmm(of_scores.transpose(1, 2), query))
    of_value.add_(torch.bmm(shares.transpose(1, 2), of_out))


@OnePass
def _join(out: Tensor, log_sum: Tensor, more: Tensor, more_log_sum: Tensor) -> None:
    """Join the results of rows for some columns with those for other columns, in place."""
    joint = torch.logaddexp(log_sum, more_log_sum)
    out.copy_(out * torch.exp(log_sum - joint) + more * torch.exp(more_log_sum - joint))
    log_sum.copy_(joint)


@OnePass
def _row_dots(out: Tensor, one: Tensor, other: Tensor) -> None:
    out.copy_((one.to(out.dtype) * other).sum(-1, keepdim=True))


@OnePass
def _score_gradients(
    scores: Tensor, of_shares: Tensor, known: Tensor, columns: Tensor, scaling: float, softcap: float | None
) -> None:
    """Replace scores by the softmax's shares, and the gradient of shares by that of scores, in place.

    `known` holds for each row the log of its sum, `_row_dots`, and the ends of the columns that it attends to.
    """
    log_sum, along, low, high = known.split(1, 1)
    exact = scores.to(known.dtype) * scaling
    if softcap is not None:
        tanh = torch.tanh(exact / softcap)
        exact = tanh * softcap
    shares = torch.where((columns >= low) & (columns < high), torch.exp(exact - log_sum), 0.0)
    gradients = shares * (of_shares - along) * scaling
    scores.copy_(shares)
    of_shares.copy_(gradients if softcap is None else gradients * (1 - tanh.square()))
