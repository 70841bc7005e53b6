"""Prefill and decode: forward passes whose attention reads and writes the engine's key/value store.

Axis letters: `B` rows, `S` prefix slots in use, `M` most rows of one slot, `K` key/value heads, `Q` query heads per
key/value head, `P` and `R` tokens of a prompt and of a row, `D` head size.

Keys and values are stored by the order of the calls in a forward pass: an architecture may call attention twice in a layer
(DiffLlama), or run its layers several times (HRM). A plan serves one forward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from treadle.models.attention import LayerAttention, PackedAttention, capped_scores, widened
from treadle.models.cpu.decode_kernels import CpuKernels, DecodeKernel
from treadle.models.cpu.inference import InferenceModel
from treadle.models.layout import PackedLayout
from treadle.rollout.engines.torch_engine.kv_store import KVStore

READ_BY_ROW = 1 << 14
"""Up to this many tokens of prompts, over all rows, a compiled kernel reads prompts row by row; above, one matmul for all
rows of a prompt is faster."""


def prefill(
    inference: InferenceModel, store: KVStore, tokens: Tensor, lengths: Sequence[int], slots: Sequence[int]
) -> Tensor:
    """Compute new prompts in one packed row, store their keys and values, and return the logits of what follows them.

    Args:
        tokens: int64 [N], the prompts one after another.
        lengths: tokens of each prompt.
        slots: slot of each prompt.
    Returns:
        [prompts, V]: logits of each prompt's next token.
    """
    layout = PackedLayout.of_lengths(lengths, tokens.device)
    hidden = inference.hidden_states(tokens, layout.position_ids, PrefillAttention(store, layout, slots))
    return inference.logits(hidden[torch.tensor(np.cumsum(lengths) - 1, device=tokens.device)])


def decode(
    inference: InferenceModel, store: KVStore, tokens: Tensor, slots: Tensor, places: Tensor, prefix_lengths: Tensor
) -> Tensor:
    """Feed one more token to each of the first B rows and return the logits of what follows it.

    Args:
        tokens: int64 [B].
        slots: int64 [B], the slot of each row's prompt.
        places: int64 [B], where the token is in its row.
        prefix_lengths: int64 [S], tokens of each slot's prompt.
    Returns:
        [B, V].
    """
    plan = DecodeAttention(store, slots, places, prefix_lengths, inference.kernels)
    return inference.logits(inference.hidden_states(tokens, prefix_lengths[slots] + places, plan))


class PrefillAttention:
    """Attend as in training, to new prompts in one packed row, and keep their keys and values in slots."""

    def __init__(self, store: KVStore, layout: PackedLayout, slots: Sequence[int]):
        self.store, self.packed, self._calls = store, PackedAttention(layout), 0
        self.spans = [
            (slot, slice(start, start + family.prefix))
            for slot, start, family in zip(slots, layout.starts, layout.families, strict=True)
        ]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: LayerAttention) -> Tensor:
        size = self.store.shape.head_dim
        keys, values = widened(key, size), widened(value, size)
        for slot, span in self.spans:
            self.store.write_prefix(self._calls, slot, keys[span], values[span])
        self._calls += 1
        return self.packed.attend(query, key, value, layer)


class DecodeAttention:
    """One new token for each of the first B rows: it attends to its slot's prompt and to its own row.

    The rows of a slot are side by side in a grid (S, K, M), so the prompt is read once for all of them; cells without a
    row repeat row 0 and are not read back. The prompt is attended to by itself and joins the row's softmax as one more
    score, the log of its sum, whose value is its output. This is exact (FlashAttention, arXiv:2205.14135, section 3.1).
    With `kernels` the rest is one call, and short prompts are part of it.

    Args:
        slots: int64 [B], the slot of each row.
        places: int64 [B], where each row's new token goes.
        prefix_lengths: int64 [S], tokens of each slot's prompt.
    """

    def __init__(
        self, store: KVStore, slots: Tensor, places: Tensor, prefix_lengths: Tensor, kernels: CpuKernels | None = None
    ):
        store.fit_rows(int(places.max()) + 1)
        # The kernels write where they are told to.
        assert int(places.max()) < store.rows.span, f"a row in a store for {store.rows.span} tokens"
        assert len(slots) <= store.rows.count, f"{len(slots)} rows in a store for {store.rows.count}"
        assert int(slots.max()) < len(prefix_lengths) <= store.prefixes.count, "a slot that the store does not have"
        assert int(prefix_lengths.max()) <= store.prefixes.span, f"a prompt longer than {store.prefixes.span} tokens"
        self.store, self.slots, self.places, self.prefix_lengths = store, slots, places, prefix_lengths
        self._calls = 0
        self._masks: dict[tuple[int | None, torch.dtype], tuple[Tensor | None, Tensor]] = {}
        self._kernel = None if kernels is None else DecodeKernel(kernels, places, slots, prefix_lengths)
        self._reads_prompts = len(slots) * store.prefixes.span <= READ_BY_ROW

    @functools.cached_property
    def _written(self) -> Tensor:
        return self.store.rows.cells(self.places)

    @functools.cached_property
    def _grid(self) -> tuple[Tensor, Tensor]:
        """Where in the grid (S, K, M) each (row, head) is, int64 [B·K], and which (row, head) is in each cell [S·K·M]."""
        device, num_rows, kv_heads = self.slots.device, len(self.slots), self.store.shape.kv_heads
        counts = torch.bincount(self.slots, minlength=len(self.prefix_lengths))
        width = int(counts.max())
        order = torch.argsort(self.slots, stable=True)
        rank = torch.empty_like(order)
        rank[order] = torch.arange(num_rows, device=device) - (torch.cumsum(counts, 0) - counts)[self.slots[order]]
        heads = torch.arange(kv_heads, device=device)
        cells = ((self.slots[:, None] * kv_heads + heads) * width + rank[:, None]).flatten()
        rows = torch.zeros(len(counts) * kv_heads * width, dtype=torch.int64, device=device)
        return cells, rows.index_copy_(0, cells, torch.arange(num_rows * kv_heads, device=device))

    def _mask(self, layer: LayerAttention, repeat: int, dtype: torch.dtype) -> tuple[Tensor | None, Tensor]:
        """Return what is added to scores, 0 where a token may attend: of prompts [S, 1 or K, M·Q, P] (None if everywhere),
        of rows [B, 1, 1, R] float32.

        Hidden scores are very low, not -inf: a window may hide a whole prompt, whose share is then 0 and not NaN.
        """
        window = layer.sliding_window
        if (window, dtype) not in self._masks:
            device, (num_slots, kv_heads) = self.slots.device, (len(self.prefix_lengths), self.store.shape.kv_heads)
            p = torch.arange(self.store.prefixes.span, device=device)
            r = torch.arange(self.store.rows.span, device=device)
            here, width = self.places[:, None], len(self._grid[1]) // (num_slots * kv_heads)
            own = r > here
            if window is None:
                hidden = (p >= self.prefix_lengths[:, None])[:, None, None]
            else:
                own = own | (here - r >= window)
                last = self.prefix_lengths[self.slots][:, None]
                of_row = (p >= last) | (last + here - p >= window)
                of_head = of_row.repeat_interleave(kv_heads, 0).index_select(0, self._grid[1])
                of_head = of_head.view(num_slots, kv_heads, width, 1, len(p)).expand(-1, -1, -1, repeat, -1)
                hidden = of_head.flatten(2, 3)
            prompt = torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, torch.finfo(dtype).min / 2)
            row = torch.zeros_like(own, dtype=torch.float32).masked_fill_(own, torch.finfo(torch.float32).min / 2)
            prompt = prompt.expand(-1, -1, width * repeat, -1)
            self._masks[window, dtype] = prompt if bool(hidden.any()) else None, row[:, None, None, :]
        return self._masks[window, dtype]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: LayerAttention) -> Tensor:
        size = value.shape[2]
        if not key.shape[2] == size == self.store.shape.head_dim:
            query, key, value = (widened(x, self.store.shape.head_dim) for x in (query, key, value))
        by_kernel = self._kernel is not None and layer.softcap is None
        out = (self._by_kernel if by_kernel else self._by_operations)(query, key, value, layer)
        self._calls += 1
        return out if out.shape[2] == size else out[..., :size]

    def _by_operations(self, query: Tensor, key: Tensor, value: Tensor, layer: LayerAttention) -> Tensor:
        rows = self.store.rows
        num_rows, heads, dim = query.shape
        kv_heads, repeat = key.shape[1], heads // key.shape[1]
        rows.write(self._calls, self._written, key, value)
        keys, values = rows.first(self._calls, num_rows)  # [B·K, R, D]
        prompt_mask, row_mask = self._mask(layer, repeat, query.dtype)

        query = query.reshape(num_rows * kv_heads, repeat, dim)
        of_prompt, total = self._of_prompts(query, prompt_mask, layer)  # [B·K, Q, D], [B·K, Q]
        scores = query.new_empty(num_rows, kv_heads, repeat, rows.span + 1, dtype=torch.float32)
        # Keys come first: the smaller matrix is the one that is repacked.
        of_row = torch.bmm(keys, query.transpose(1, 2)).view(num_rows, kv_heads, rows.span, repeat).transpose(2, 3)
        if layer.softcap is None:
            torch.add(row_mask, of_row, alpha=layer.scaling, out=scores[..., :-1])
        else:
            torch.add(row_mask, capped_scores(of_row.float() * layer.scaling, layer.softcap), out=scores[..., :-1])
        scores[..., -1] = total.view(num_rows, kv_heads, repeat)
        shares = torch.softmax(scores, dim=-1).view(num_rows * kv_heads, repeat, -1)
        out = torch.bmm(shares[..., :-1].to(values.dtype, memory_format=torch.contiguous_format), values)
        return out.addcmul_(of_prompt, shares[..., -1:].to(values.dtype)).view(num_rows, heads, dim)

    def _by_kernel(self, query: Tensor, key: Tensor, value: Tensor, layer: LayerAttention) -> Tensor:
        assert self._kernel is not None
        known = None
        if not self._reads_prompts:
            repeat = query.shape[1] // key.shape[1]
            mask = self._mask(layer, repeat, query.dtype)[0]
            known = self._of_prompts(query.reshape(-1, repeat, query.shape[2]), mask, layer)
        rows, prompts = (part.layers[self._calls] for part in (self.store.rows, self.store.prefixes))
        return self._kernel.attend((query, key, value), (rows[0], rows[1]), (prompts[0], prompts[1]), layer, known)

    def _of_prompts(self, query: Tensor, mask: Tensor | None, layer: LayerAttention) -> tuple[Tensor, Tensor]:
        """Attend to the prompts alone.

        Args:
            query: [B·K, Q, D].
        Returns:
            the output [B·K, Q, D], and the log of the sum under its softmax, float32 [B·K, Q].
        """
        repeat, dim = query.shape[1:]
        grid_shape = len(self.prefix_lengths), self.store.shape.kv_heads, -1, dim
        grid = query.view(len(query), -1).index_select(0, self._grid[1]).view(grid_shape)
        keys, values = (x.view(grid_shape) for x in self.store.prefixes.first(self._calls, grid_shape[0]))
        if layer.softcap is None and query.device.type == "cpu":
            out, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                grid, keys, values, 0.0, False, attn_mask=mask, scale=layer.scaling
            )
        else:
            scores = capped_scores((grid @ keys.transpose(2, 3)).float() * layer.scaling, layer.softcap)
            if mask is not None:
                scores = scores + mask
            total = torch.logsumexp(scores, dim=-1)
            out = torch.softmax(scores, dim=-1).to(values.dtype) @ values
        return self._from_grid(out, repeat), self._from_grid(total[..., None], repeat)[..., 0]

    def _from_grid(self, grid: Tensor, repeat: int) -> Tensor:
        """Slots side by side [S, K, M·Q, X] → rows [B·K, Q, X]."""
        size = grid.shape[-1]
        return grid.reshape(-1, repeat * size).index_select(0, self._grid[0]).view(-1, repeat, size)
