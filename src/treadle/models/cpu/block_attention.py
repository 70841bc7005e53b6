"""Attention of a packed row as a few large matmuls, with a backward pass of its own.

Sequences of similar length lie side by side in dense blocks, with the heads of a key folded into rows. What a query sees
is a run of columns, so a *look* (some rows of all blocks of a kind at some columns of another) needs no more of a mask than
where the run begins and ends: prefixes look at themselves, suffixes at their prefix, all samples of it in one matmul, and at
themselves. A suffix's two looks are joined by the logs of their sums. Scores are made again in the backward pass,
piece by piece, so memory is linear in length.

Same idea: Dao et al. 2022, "FlashAttention", arXiv 2205.14135; Juravsky et al. 2024, "Hydragen" (shared prefixes), arXiv 2402.05099.

Axis letters: `N` tokens, `H` heads, `K` key heads, `D` head size, `F` families, `M` most suffixes in a family, `P` longest
prefix, `R` longest suffix, `B` blocks, `Q` rows and `L` columns of a block.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from treadle.compiled_formula import OnePass
from treadle.models.layout import PackedLayout

CACHED_SCORES = 1 << 22
"""Scores computed together on a CPU. They leave its second-level caches, but fewer and larger operations outweigh that."""
CAUSAL_TOKENS = 256
"""Tokens of a block that look at what is before the last of them: fewer compute less that is hidden, more are quicker to compute."""
NOTHING = torch.finfo(torch.float32).min
"""Log of the sum of a row that sees nothing: not -inf, whose distance to itself is no number."""

PREFIX, SUFFIX = 0, 1


@dataclass(frozen=True)
class Look:
    """Rows of some blocks at some columns of others. Row i sees the columns in [low[i], high[i])."""

    asks: int  # PREFIX or SUFFIX: whose queries
    seen: int  # whose keys; all suffixes of a prefix are one block where they see it, else a block each
    blocks: slice
    rows: slice
    columns: slice
    low: Tensor  # float32 [Q], which a compiled loop compares quicker than integers
    high: Tensor
    mask: Tensor | None  # [Q, L], 0 or -inf, in the dtype of queries; None where every row sees every column

    @property
    def step(self) -> int:
        """Blocks whose scores are computed together."""
        count = self.blocks.stop - self.blocks.start
        return min(count, max(1, CACHED_SCORES // self.scores)) if self.low.device.type == "cpu" else count

    @property
    def scores(self) -> int:
        """Of one block."""
        return len(self.low) * (self.columns.stop - self.columns.start)

    def pieces(self) -> Iterator[slice]:
        """Blocks that are computed together, counted from the first of the look."""
        count = self.blocks.stop - self.blocks.start
        return (slice(start, min(start + self.step, count)) for start in range(0, count, self.step))


@dataclass(frozen=True)
class Pair:
    """Prefixes [F·K, P·H/K, D] and suffixes [F·K·M, R·H/K, D], and the memory of both, [cells, H/K·D]."""

    cells: Tensor
    prefixes: Tensor
    suffixes: Tensor

    def asked(self, look: Look, num_seen: int) -> Tensor:
        """The rows of a look [B, Q, D], where its columns are in `num_seen` blocks."""
        blocks = self.prefixes if look.asks == PREFIX else self.suffixes
        return blocks.view(num_seen, -1, blocks.shape[-1])[look.blocks, look.rows]

    def count(self, look: Look) -> int:
        """Blocks that hold its columns."""
        return len(self.prefixes if look.seen == PREFIX else self.suffixes)

    def seen(self, look: Look) -> Tensor:
        """The columns of a look [B, L, D]."""
        return (self.prefixes if look.seen == PREFIX else self.suffixes)[look.blocks, look.columns]


@dataclass(frozen=True)
class Grid:
    """A packed row laid out in dense blocks, one for each family and key head: prefixes (F·K, P), suffixes (F·K·M, R).

    A cell holds the queries of one key head, or its key or value, of one token. Cells without a token repeat token 0:
    no token looks at them, and what they look at is not read.
    """

    sizes: tuple[int, int, int, int, int]  # F, M, P, R, K
    source: Tensor  # int64 [F·K·P + F·K·M·R]: which (token, key head) is in a cell, prefixes before suffixes
    padding: Tensor  # int64: the cells without a token
    cells: Tensor  # int64 [N·K]: where each (token, key head) is
    looks: tuple[Look, ...]

    def blocks(self, x: Tensor, *, no_padding: bool = False) -> Pair:
        """x [N, H, D] as blocks; with `no_padding` cells without a token are 0."""
        kv_heads = self.sizes[4]
        cells = x.reshape(len(x) * kv_heads, x.shape[1] // kv_heads * x.shape[2]).index_select(0, self.source)
        if no_padding:
            cells.index_fill_(0, self.padding, 0.0)
        return self.pair(cells, x.shape[2])

    def empty(self, heads: int, dim: int, dtype: torch.dtype) -> Pair:
        """Blocks for numbers [N, H, D], not yet written."""
        width = heads // self.sizes[4] * dim
        return self.pair(torch.empty(len(self.source), width, dtype=dtype, device=self.source.device), dim)

    @cached_property
    def scratch(self) -> dict[torch.dtype, Tensor]:
        """Memory for the scores of a piece and for their gradients, by dtype; all pieces of all layers use it."""
        return {}

    def score_pair(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Two tensors of this shape, not yet written."""
        if dtype not in self.scratch:
            most = max(look.step * look.scores for look in self.looks)
            self.scratch[dtype] = torch.empty(2, most, dtype=dtype, device=self.source.device)
        return self.scratch[dtype][:, : math.prod(shape)].view(2, *shape)

    def pair(self, cells: Tensor, dim: int) -> Pair:
        families, most, prefix, suffix, kv_heads = self.sizes
        first, rest = cells.split([families * kv_heads * prefix, families * kv_heads * most * suffix])
        repeat = cells.shape[1] // dim
        return Pair(
            cells,
            first.view(families * kv_heads, prefix * repeat, dim),
            rest.view(families * kv_heads * most, suffix * repeat, dim),
        )

    def row(self, pair: Pair, shape: Sequence[int]) -> Tensor:
        """The inverse of `blocks`, [N, H, D] of this shape."""
        return pair.cells.index_select(0, self.cells).view(shape)


def grid_of(layout: PackedLayout, heads: int, kv_heads: int, window: int | None, dtype: torch.dtype) -> Grid:
    """Where the tokens of a row lie in blocks, and their looks; queries have this dtype."""
    device = layout.device
    families, most, longest, width = layout.shape
    key_heads = torch.arange(kv_heads, device=device)
    count = families * kv_heads * (longest + most * width)
    source = torch.full((count,), -1, device=device)
    cells = torch.zeros(layout.num_tokens, kv_heads, dtype=torch.int64, device=device)
    offset = 0
    for (rows, places), size in zip((layout.prefix_cells, layout.suffix_cells), (longest, most * width), strict=True):
        family, inside = places // max(size, 1), places % max(size, 1)
        cells[rows] = offset + (family[:, None] * kv_heads + key_heads) * size + inside[:, None]
        offset += families * kv_heads * size
    pairs = torch.arange(layout.num_tokens * kv_heads, device=device)
    source.index_copy_(0, cells.flatten(), pairs)
    padding = (source < 0).nonzero()[:, 0]
    looks = _looks(layout, heads // kv_heads, kv_heads, window, dtype)
    return Grid(
        (families, most, longest, width, kv_heads), source.clamp_(min=0), padding, cells.flatten(), tuple(looks)
    )


def _looks(layout: PackedLayout, repeat: int, kv_heads: int, window: int | None, dtype: torch.dtype) -> Iterator[Look]:
    families, most, prefix, suffix = layout.shape
    count = families * kv_heads
    for kind, length, blocks in ((PREFIX, prefix, count), (SUFFIX, suffix, count * most)):
        if length and blocks:
            yield from _at_themselves(kind, slice(0, blocks), _Rows(length, repeat, window, dtype, layout.device))
    start, rows = 0, _Rows(suffix, repeat, window, dtype, layout.device)
    for length, run in itertools.groupby(family.prefix for family in layout.families):
        end = start + kv_heads * len(list(run))
        if length and most * suffix:
            yield from _at_prefixes(slice(start, end), length, most, rows)
        start = end


@dataclass(frozen=True)
class _Rows:
    """The queries of one block: `repeat` rows for each of `length` tokens."""

    length: int
    repeat: int
    window: int | None
    dtype: torch.dtype
    device: torch.device

    def low(self, at: Tensor) -> Tensor:
        """The first position that is seen from each of these."""
        return torch.full_like(at, -torch.inf) if self.window is None else at + 1 - self.window

    def positions(self, start: int, end: int) -> Tensor:
        return torch.arange(start, end, dtype=torch.float32, device=self.device)

    def mask(self, columns: Tensor, low: Tensor, high: Tensor) -> Tensor:
        hidden = (columns < low[:, None]) | (columns >= high[:, None])
        return torch.zeros(hidden.shape, dtype=self.dtype, device=self.device).masked_fill_(hidden, -torch.inf)


def _at_themselves(kind: int, blocks: slice, rows: _Rows) -> Iterator[Look]:
    """Sequences at themselves, some tokens at a time with all that is before the last of them."""
    tokens = min(CAUSAL_TOKENS, rows.length)
    inside = rows.positions(0, tokens).repeat_interleave(rows.repeat)
    # Counted from the first of the tokens, what they see is the same wherever they are: one mask, of which each has a part.
    before = (rows.length - 1) // tokens * tokens
    mask = rows.mask(rows.positions(-before, tokens), rows.low(inside), inside + 1)
    for start in range(0, rows.length, tokens):
        end = min(start + tokens, rows.length)
        first = 0 if rows.window is None else max(0, start + 1 - rows.window)
        count = (end - start) * rows.repeat
        at = start + inside[:count]
        part = mask[:count, before - start + first : before - start + end]
        span = slice(start * rows.repeat, end * rows.repeat)
        yield Look(kind, kind, blocks, span, slice(first, end), rows.low(at), at + 1, part)


def _at_prefixes(blocks: slice, prefix: int, most: int, rows: _Rows) -> Iterator[Look]:
    """All suffixes of families at their prefixes, which are equally long."""
    at = prefix + rows.positions(0, rows.length).repeat_interleave(rows.repeat).repeat(most)
    low, high = rows.low(at), torch.full_like(at, prefix)
    step = max(1, CACHED_SCORES // prefix)
    whole = rows.device.type != "cpu" or len(at) <= step
    for start in range(0, len(at), len(at) if whole else step):
        span = slice(start, len(at) if whole else min(start + step, len(at)))
        mask = None
        if bool((low[span] > 0).any()):
            mask = rows.mask(rows.positions(0, prefix), low[span], high[span])
        look = Look(SUFFIX, PREFIX, blocks, span, slice(0, prefix), low[span], high[span], mask)
        if whole:
            yield look
        else:  # rows of one block lie together, parts of several do not
            yield from (replace(look, blocks=slice(i, i + 1)) for i in range(blocks.start, blocks.stop))


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
        for look in grid.looks:
            count = keys.count(look)
            asked, so_far, sum_so_far = (x.asked(look, count) for x in (queries, outs, log_sums))
            for piece in look.pieces() if softcap is not None else [slice(None)]:
                seen_keys, seen_values = (x.seen(look)[piece] for x in (keys, values))
                out, log_sum = _attend(look, asked[piece], seen_keys, seen_values, scaling, softcap)
                if look.asks == look.seen:
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
        *saved, out = ctx.saved_tensors  # asked for once: with recomputed activations there is no second time
        grid = ctx.grid
        _, heads, dim = grad.shape
        queries, keys, values, log_sums = (grid.pair(x, d) for x, d in zip(saved, (dim, dim, dim, 1), strict=True))
        exact = log_sums.cells.dtype
        along = torch.empty(grad.shape[0] * heads, 1, dtype=exact, device=grad.device)
        _row_dots(along, grad.reshape(-1, dim), out.flatten(0, 1))
        of_outs, alongs = (grid.blocks(x, no_padding=True) for x in (grad, along.view(*grad.shape[:2], 1)))
        of_queries = grid.empty(heads, dim, grad.dtype)
        of_keys, of_values = (grid.pair(torch.zeros_like(x.cells, dtype=exact), dim) for x in (keys, values))
        for look in grid.looks:
            count = keys.count(look)
            # Dense, for `bmm` on a CPU is slow where they are not.
            asked = [x.asked(look, count).contiguous() for x in (queries, of_outs, log_sums, alongs)]
            seen = [x.seen(look).contiguous() for x in (keys, values)]
            asked.append(of_queries.asked(look, count))
            seen += [of_keys.seen(look), of_values.seen(look)]
            for piece in look.pieces():
                _gradients(
                    look, _Asked(*(x[piece] for x in asked)), _Seen(*(x[piece] for x in seen)), grid, ctx.options
                )
        found = zip((of_queries, of_keys, of_values), ctx.shapes, strict=True)
        return *(grid.row(x, shape).to(grad.dtype) for x, shape in found), None, None, None


def _attend(
    look: Look, query: Tensor, key: Tensor, value: Tensor, scaling: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Attention of a look alone, [B, Q, D], and the log of each row's sum, [B, Q, 1]; rows that see nothing get 0 and `NOTHING`."""
    if softcap is None and query.device.type == "cpu":
        asked, seen, content = (x.unsqueeze(1) for x in (query, key, value))
        mask = None if look.mask is None else look.mask[None, None]
        out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            asked, seen, content, attn_mask=mask, scale=scaling
        )
        out, log_sum = out.squeeze(1), log_sum.squeeze(1).unsqueeze(-1)
        if look.mask is not None and look.asks != look.seen:
            blind = (look.high <= look.low)[None, :, None]
            out, log_sum = out.masked_fill(blind, 0.0), log_sum.masked_fill(blind, NOTHING)
        return out, log_sum
    scores = torch.bmm(query, key.transpose(1, 2)).to(torch.promote_types(query.dtype, torch.float32)) * scaling
    scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
    scores = scores if look.mask is None else scores + look.mask
    log_sum = torch.logsumexp(scores, -1, keepdim=True).clamp_(min=NOTHING)
    return torch.bmm((scores - log_sum).exp_().to(value.dtype), value), log_sum


@dataclass(frozen=True)
class _Asked:
    """What the backward pass has of some rows: [B, Q, D], and [B, Q, 1] of the log of the sum and `_row_dots`."""

    query: Tensor
    of_out: Tensor
    log_sum: Tensor
    along: Tensor
    of_query: Tensor  # to be written


@dataclass(frozen=True)
class _Seen:
    """And of some columns: [B, L, D]."""

    key: Tensor
    value: Tensor
    of_key: Tensor  # to be added to, in the precision of sums
    of_value: Tensor


def _gradients(look: Look, asked: _Asked, seen: _Seen, grid: Grid, options: tuple[float, float | None]) -> None:
    """Gradients of the queries, keys and values of some blocks."""
    shape = (len(asked.query), asked.query.shape[1], seen.key.shape[1])
    shares, of_scores = grid.score_pair(*shape, dtype=asked.query.dtype)
    torch.bmm(asked.query, seen.key.transpose(1, 2), out=shares)
    torch.bmm(asked.of_out, seen.value.transpose(1, 2), out=of_scores)
    columns = torch.arange(look.columns.start, look.columns.stop, dtype=torch.float32, device=shares.device)
    ends = (x.repeat(len(shares))[:, None] for x in (look.low, look.high))
    known = torch.cat([asked.log_sum.view(-1, 1), asked.along.view(-1, 1), *ends], dim=1)
    _score_gradients(shares.flatten(0, 1), of_scores.flatten(0, 1), known, whole=(columns, *options))
    if look.asks == look.seen:  # comes first
        torch.bmm(of_scores, seen.key, out=asked.of_query)
    else:
        asked.of_query.baddbmm_(of_scores, seen.key)
    seen.of_key.add_(torch.bmm(of_scores.transpose(1, 2), asked.query))
    seen.of_value.add_(torch.bmm(shares.transpose(1, 2), asked.of_out))


@OnePass
def _join(out: Tensor, log_sum: Tensor, more: Tensor, more_log_sum: Tensor) -> None:
    """What rows found at some columns with what they found at others, in place."""
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
    """Makes the softmax's shares of scores, and of their gradient that of the scores, in place.

    Known of each row: the log of its sum, `_row_dots`, and where the columns it sees begin and end.
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
