"""How prefill and decode attend: plans for the models' attention seam, over the engine's key/value store.

Axis letters: `B` rows, `S` prefix slots in use, `M` most rows of one slot, `K` key/value heads, `Q` query heads per
key/value head, `P` and `R` tokens of a prompt and of a row, `D` head size.

Keys and values are stored by the order of the calls in a forward pass: an architecture may call attention twice in a layer
(DiffLlama), or run its layers several times (HRM). A plan serves one forward pass.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from treadle.models.attention import LayerAttention, PackedAttention, capped_scores, widened
from treadle.models.cpu.decode_kernels import CpuKernels, DecodeKernel
from treadle.models.layout import PackedLayout
from treadle.rollout.engines.torch_engine.kv_store import KVStore

READ_BY_ROW = 1 << 14
"""Tokens of prompts, over all rows, up to which a compiled kernel reads them row by row; above, a matmul for all rows of a prompt is quicker."""


class PrefillAttention:
    """New prompts in one packed row: attend as in training, and keep keys and values in their slots."""

    def __init__(self, store: KVStore, layout: PackedLayout, slots: list[int]):
        self.store = store
        self.packed = PackedAttention(layout)
        self._calls = 0
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
    """One new token for each of the first B rows: it sees its slot's prompt and its own row.

    `slots[i]` is the slot of row i, `places[i]` where its new token goes, `prefix_lengths[s]` the prompt length of
    slot s. The rows of a slot sit side by side in a grid (S, K, M), so the prompt is read once for all of them; cells
    without a row repeat row 0 and are not read back.

    A prompt is attended to by itself, and joins the row's softmax as one more score, the log of its sum, whose value is
    what it came to: exact (FlashAttention, arXiv:2205.14135, section 3.1). With `kernels` the rest is one call, and short
    prompts are part of it.
    """

    def __init__(
        self, store: KVStore, slots: Tensor, places: Tensor, prefix_lengths: Tensor, kernels: CpuKernels | None = None
    ):
        longest = int(places.max()) + 1
        store.fit_rows(longest)
        rows, prompts = store.rows, store.prefixes
        assert longest <= rows.span, f"a row of {longest} tokens in a store for {rows.span}"
        assert len(slots) <= rows.count, f"{len(slots)} rows in a store for {rows.count}"
        assert int(slots.max()) < len(prefix_lengths) <= prompts.count, f"a prompt past the last of {prompts.count}"
        assert int(prefix_lengths.max()) <= prompts.span, f"a prompt longer than {prompts.span} tokens"
        self.store = store
        self._calls = 0
        self.slots, self.places = slots, places
        self.num_slots = int(prefix_lengths.shape[0])
        self.prefix_lengths = prefix_lengths
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
        counts = torch.bincount(self.slots, minlength=self.num_slots)
        width = int(counts.max())
        order = torch.argsort(self.slots, stable=True)
        rank = torch.empty_like(order)
        rank[order] = torch.arange(num_rows, device=device) - (torch.cumsum(counts, 0) - counts)[self.slots[order]]
        heads = torch.arange(kv_heads, device=device)
        cells = ((self.slots[:, None] * kv_heads + heads) * width + rank[:, None]).flatten()
        rows = torch.zeros(self.num_slots * kv_heads * width, dtype=torch.int64, device=device)
        return cells, rows.index_copy_(0, cells, torch.arange(num_rows * kv_heads, device=device))

    def _mask(self, layer: LayerAttention, repeat: int, dtype: torch.dtype) -> tuple[Tensor | None, Tensor]:
        """What is added to scores, 0 where one may look: of prompts [S, 1 or K, M·Q, P] (None where all may), of rows
        [B, 1, 1, R] float32.

        Hidden scores are very low, not -inf: a window may hide a whole prompt, whose share is then 0 and not NaN.
        """
        window = layer.sliding_window
        if (window, dtype) not in self._masks:
            device, kv_heads = self.slots.device, self.store.shape.kv_heads
            p = torch.arange(self.store.prefixes.span, device=device)
            r = torch.arange(self.store.rows.span, device=device)
            lengths, here = self.prefix_lengths, self.places[:, None]
            own = r > here
            if window is None:
                hidden = (p >= lengths[:, None])[:, None, None]
                width = len(self._grid[1]) // (self.num_slots * kv_heads)
                shape = self.num_slots, 1, width * repeat, len(p)
            else:
                last = lengths[self.slots][:, None]
                of_row = (p >= last) | (last + here - p >= window)
                of_head = of_row.repeat_interleave(kv_heads, 0).index_select(0, self._grid[1])
                hidden = (
                    of_head.view(self.num_slots, kv_heads, -1, 1, len(p)).expand(-1, -1, -1, repeat, -1).flatten(2, 3)
                )
                shape = tuple(hidden.shape)
                own = own | (here - r >= window)
            low = torch.finfo(dtype).min / 2
            prompt = torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, low).expand(shape)
            row = torch.zeros_like(own, dtype=torch.float32).masked_fill_(own, torch.finfo(torch.float32).min / 2)
            self._masks[window, dtype] = prompt if bool(hidden.any()) else None, row[:, None, None, :]
        return self._masks[window, dtype]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: LayerAttention) -> Tensor:
        index, self._calls = self._calls, self._calls + 1
        size = self.store.shape.head_dim
        if key.shape[2] == value.shape[2] == size:
            return self._attend(index, query, key, value, layer)
        wide = (widened(x, size) for x in (query, key, value))
        return self._attend(index, *wide, layer)[..., : value.shape[2]]

    def _attend(self, index: int, query: Tensor, key: Tensor, value: Tensor, layer: LayerAttention) -> Tensor:
        rows = self.store.rows
        num_rows, heads, dim = query.shape
        kv_heads, repeat = key.shape[1], heads // key.shape[1]
        if self._kernel is not None and layer.softcap is None:
            return self._by_kernel(index, (query, key, value), layer)
        rows.write(index, self._written, key, value)
        keys, values = rows.first(index, num_rows)  # [B·K, R, D]
        prompt_mask, row_mask = self._mask(layer, repeat, query.dtype)

        query = query.reshape(num_rows * kv_heads, repeat, dim)
        of_prompt, total = self._of_prompts(index, query, prompt_mask, layer)  # [B·K, Q, D], [B·K, Q]
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

    def _by_kernel(self, index: int, new: tuple[Tensor, Tensor, Tensor], layer: LayerAttention) -> Tensor:
        assert self._kernel is not None
        known = None
        if not self._reads_prompts:
            query, kv_heads = new[0], self.store.shape.kv_heads
            repeat, dim = query.shape[1] // kv_heads, query.shape[2]
            mask = self._mask(layer, repeat, query.dtype)[0]
            known = self._of_prompts(index, query.reshape(-1, repeat, dim), mask, layer)
        rows, prompts = (part.layers[index] for part in (self.store.rows, self.store.prefixes))
        return self._kernel.attend(new, (rows[0], rows[1]), (prompts[0], prompts[1]), layer, known)

    def _of_prompts(
        self, index: int, query: Tensor, mask: Tensor | None, layer: LayerAttention
    ) -> tuple[Tensor, Tensor]:
        """query [B·K, Q, D] → attention to the prompt alone [B·K, Q, D], and the log of the sum under its softmax, float32 [B·K, Q]."""
        repeat, dim = query.shape[1:]
        prefixes, kv_heads = self.store.prefixes, self.store.shape.kv_heads
        grid = query.view(len(query), -1).index_select(0, self._grid[1]).view(self.num_slots, kv_heads, -1, dim)
        keys, values = (x.view(self.num_slots, kv_heads, -1, dim) for x in prefixes.first(index, self.num_slots))
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
