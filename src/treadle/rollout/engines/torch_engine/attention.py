"""How prefill and decode attend: plans for the models' attention seam, over the engine's key/value store.

Axis letters: `B` rows, `S` prefix slots in use, `M` most rows of one slot, `K` key/value heads, `Q` query heads per
key/value head, `P` and `R` lengths looked at, `D` head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from treadle.models.attention import LayerAttention, PackedAttention
from treadle.models.layout import PackedLayout
from treadle.rollout.engines.torch_engine.kv_store import KVStore

LENGTH_STEP = 16
"""Lengths looked at are rounded up to this: matmul kernels are prepared per shape, and few shapes keep them cached."""


class PrefillAttention:
    """New prompts in one packed row: attend as in training, and keep keys and values in their slots."""

    def __init__(self, store: KVStore, layout: PackedLayout, slots: list[int]):
        self.store = store
        self.packed = PackedAttention(layout)
        self.spans = [
            (slot, slice(start, start + family.prefix))
            for slot, start, family in zip(slots, layout.starts, layout.families, strict=True)
        ]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: LayerAttention) -> Tensor:
        for slot, span in self.spans:
            self.store.write_prefix(layer.layer_idx, slot, key[span], value[span])
        return self.packed.attend(query, key, value, layer)


class DecodeAttention:
    """One new token for each of the first B rows: it sees its slot's prompt and its own row.

    `slots[i]` is the slot of row i, `places[i]` where its new token goes, `prefix_lengths[s]` the prompt length of
    slot s. The rows of a slot sit side by side in a grid (S, M), so the prompt is read once for all of them.
    """

    def __init__(self, store: KVStore, slots: Tensor, places: Tensor, prefix_lengths: Tensor):
        self.store = store
        self.rows = torch.arange(len(slots), device=slots.device)
        self.slots, self.places = slots, places
        self.num_slots = int(prefix_lengths.shape[0])
        counts = torch.bincount(slots, minlength=self.num_slots)
        self.width = int(counts.max())
        order = torch.argsort(slots, stable=True)
        first = torch.cumsum(counts, 0) - counts
        rank = torch.empty_like(order)
        rank[order] = torch.arange(len(order), device=slots.device) - first[slots[order]]
        self.cells = slots * self.width + rank
        self.prefix_span = min(_round_up(int(prefix_lengths.max())), store.shape.prefix_capacity)
        self.row_span = min(_round_up(int(places.max()) + 1), store.shape.row_capacity)
        self.prefix_lengths = prefix_lengths
        self._masks: dict[int | None, Tensor] = {}

    def _hidden(self, window: int | None) -> Tensor:
        """True where row i may not look, bool [B, 1, 1, P + R]."""
        if window not in self._masks:
            device = self.slots.device
            lengths = self.prefix_lengths[self.slots][:, None]
            p = torch.arange(self.prefix_span, device=device)[None, :]
            r = torch.arange(self.row_span, device=device)[None, :]
            here = self.places[:, None]
            prefix, own = p >= lengths, r > here
            if window is not None:
                prefix = prefix | (lengths + here - p >= window)
                own = own | (here - r >= window)
            self._masks[window] = torch.cat([prefix, own], dim=1)[:, None, None, :]
        return self._masks[window]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: LayerAttention) -> Tensor:
        store, index = self.store, layer.layer_idx
        num_rows, heads, dim = query.shape
        kv_heads = key.shape[1]
        store.write_tokens(index, self.rows, self.places, key, value)
        query = (query * layer.scaling).reshape(num_rows, kv_heads, heads // kv_heads, dim)
        scores = torch.cat([self._prefix_scores(query, index), self._row_scores(query, index)], dim=-1)
        if layer.softcap is not None:
            scores = torch.tanh(scores / layer.softcap) * layer.softcap
        probs = torch.softmax(scores.masked_fill_(self._hidden(layer.sliding_window), float("-inf")), dim=-1)
        prefix_probs, row_probs = probs.split([self.prefix_span, self.row_span], dim=-1)
        values = self.store.row_values[index, :num_rows, :, : self.row_span].flatten(0, 1)
        out = torch.bmm(row_probs.flatten(0, 1), values).view(num_rows, kv_heads, -1, dim)
        return (out + self._prefix_output(prefix_probs, index)).reshape(num_rows, heads, dim)

    def _row_scores(self, query: Tensor, index: int) -> Tensor:
        keys = self.store.row_keys[index, : len(query), :, : self.row_span].flatten(0, 1)
        return torch.bmm(query.flatten(0, 1), keys.transpose(1, 2)).view(*query.shape[:3], self.row_span)

    def _to_grid(self, x: Tensor) -> Tensor:
        """Rows [B, K, Q, X] → slots side by side [S·K, M·Q, X]."""
        grid = x.new_zeros(self.num_slots * self.width, *x.shape[1:]).index_copy_(0, self.cells, x)
        grid = grid.view(self.num_slots, self.width, *x.shape[1:]).transpose(1, 2)
        return grid.reshape(self.num_slots * x.shape[1], self.width * x.shape[2], x.shape[3])

    def _from_grid(self, grid: Tensor, kv_heads: int) -> Tensor:
        """The inverse: [S·K, M·Q, X] → [B, K, Q, X]."""
        grid = grid.view(self.num_slots, kv_heads, self.width, -1, grid.shape[-1]).transpose(1, 2)
        return grid.reshape(self.num_slots * self.width, kv_heads, -1, grid.shape[-1]).index_select(0, self.cells)

    def _prefix_scores(self, query: Tensor, index: int) -> Tensor:
        keys = self.store.prefix_keys[index, : self.num_slots, :, : self.prefix_span].flatten(0, 1)
        return self._from_grid(torch.bmm(self._to_grid(query), keys.transpose(1, 2)), query.shape[1])

    def _prefix_output(self, probs: Tensor, index: int) -> Tensor:
        values = self.store.prefix_values[index, : self.num_slots, :, : self.prefix_span].flatten(0, 1)
        return self._from_grid(torch.bmm(self._to_grid(probs), values), probs.shape[1])


def _round_up(length: int) -> int:
    return -(-length // LENGTH_STEP) * LENGTH_STEP
