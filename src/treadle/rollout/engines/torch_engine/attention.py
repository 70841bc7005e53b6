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
    slot s. The rows of a slot sit side by side in a grid (S, K, M), so the prompt is read once for all of them; cells
    without a row repeat row 0 and are not read back.
    """

    def __init__(self, store: KVStore, slots: Tensor, places: Tensor, prefix_lengths: Tensor):
        self.store = store
        self.slots, self.places = slots, places
        self.num_slots = int(prefix_lengths.shape[0])
        self.prefix_span = min(_round_up(int(prefix_lengths.max())), store.shape.prefix_capacity)
        self.row_span = min(_round_up(int(places.max()) + 1), store.shape.row_capacity)
        self.prefix_lengths = prefix_lengths
        self._masks: dict[tuple[int | None, torch.dtype], Tensor] = {}
        self._cells_of_rows, self._rows_of_cells = self._grid(store.shape.kv_heads)
        self._written = store.token_cells(places)

    def _grid(self, kv_heads: int) -> tuple[Tensor, Tensor]:
        """Where in the grid (S, K, M) each (row, head) is, int64 [B·K], and which (row, head) is in each cell [S·K·M]."""
        device, num_rows = self.slots.device, len(self.slots)
        counts = torch.bincount(self.slots, minlength=self.num_slots)
        width = int(counts.max())
        order = torch.argsort(self.slots, stable=True)
        rank = torch.empty_like(order)
        rank[order] = torch.arange(num_rows, device=device) - (torch.cumsum(counts, 0) - counts)[self.slots[order]]
        heads = torch.arange(kv_heads, device=device)
        cells = ((self.slots[:, None] * kv_heads + heads) * width + rank[:, None]).flatten()
        rows = torch.zeros(self.num_slots * kv_heads * width, dtype=torch.int64, device=device)
        return cells, rows.index_copy_(0, cells, torch.arange(num_rows * kv_heads, device=device))

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """0 where row i may look and -inf where not, [B, 1, 1, P + R]; what scores are raised by."""
        if (window, dtype) not in self._masks:
            device = self.slots.device
            lengths = self.prefix_lengths[self.slots][:, None]
            p = torch.arange(self.prefix_span, device=device)[None, :]
            r = torch.arange(self.row_span, device=device)[None, :]
            here = self.places[:, None]
            prefix, own = p >= lengths, r > here
            if window is not None:
                prefix = prefix | (lengths + here - p >= window)
                own = own | (here - r >= window)
            hidden = torch.cat([prefix, own], dim=1)[:, None, None, :]
            self._masks[window, dtype] = torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, float("-inf"))
        return self._masks[window, dtype]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: LayerAttention) -> Tensor:
        store, index = self.store, layer.layer_idx
        num_rows, heads, dim = query.shape
        kv_heads, repeat = key.shape[1], heads // key.shape[1]
        store.write_tokens(index, self._written, key, value)
        prefix_keys, prefix_values = store.prefixes(index, self.num_slots, self.prefix_span)  # [S·K, P, D]
        row_keys, row_values = store.rows(index, num_rows, self.row_span)  # [B·K, R, D]

        query = (query * layer.scaling).view(num_rows * kv_heads, repeat, dim)
        of_prefix = torch.bmm(self._to_grid(query), prefix_keys.transpose(1, 2))
        of_row = torch.bmm(query, row_keys.transpose(1, 2))
        scores = torch.cat([self._from_grid(of_prefix, repeat), of_row], dim=-1)
        if layer.softcap is not None:
            scores = torch.tanh(scores / layer.softcap) * layer.softcap
        mask = self._mask(layer.sliding_window, scores.dtype)
        scores.view(num_rows, kv_heads, repeat, -1).add_(mask)
        probs = torch.softmax(scores, dim=-1)
        prefix_probs, row_probs = probs.split([self.prefix_span, self.row_span], dim=-1)
        out = self._from_grid(torch.bmm(self._to_grid(prefix_probs.contiguous()), prefix_values), repeat)
        return out.add_(torch.bmm(row_probs, row_values)).view(num_rows, heads, dim)

    def _to_grid(self, x: Tensor) -> Tensor:
        """Rows [B·K, Q, X] → slots side by side [S·K, M·Q, X]."""
        size = x.shape[-1]
        cells = x.view(len(x), -1).index_select(0, self._rows_of_cells)
        return cells.view(self.num_slots * self.store.shape.kv_heads, -1, size)

    def _from_grid(self, grid: Tensor, repeat: int) -> Tensor:
        """The inverse: [S·K, M·Q, X] → [B·K, Q, X]."""
        size = grid.shape[-1]
        return grid.view(-1, repeat * size).index_select(0, self._cells_of_rows).view(-1, repeat, size)


def _round_up(length: int) -> int:
    return -(-length // LENGTH_STEP) * LENGTH_STEP
