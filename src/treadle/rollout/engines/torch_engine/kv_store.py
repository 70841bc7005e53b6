"""Keys and values of everything that is being generated.

A prompt's keys and values are stored once for all its samples (a *prefix slot*); each sample has a *row* for its
own tokens. Slots and rows in use are kept at the front and are all as long as the longest one, so attention works on
dense tensors, whole: one that is removed is replaced by the last one, and rows are laid out again as they grow.

Axis letters: `L` layers, `C` sequences (prefix slots or rows), `K` key/value heads, `T` tokens, `D` head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from treadle.errors import ModelError
from treadle.models.forward import attention_calls

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LENGTH_STEP = 16
"""Lengths are rounded up to this: matmul kernels are prepared per shape, and few shapes keep them cached."""


@dataclass(frozen=True)
class KVShape:
    """What a store has room for; memory is taken for the tokens that are there, up to this."""

    layers: int
    kv_heads: int
    head_dim: int
    slots: int
    rows: int
    prefix_capacity: int
    row_capacity: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.slots * self.slot_bytes + self.rows * self.row_bytes

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def slot_bytes(self) -> int:
        return self.prefix_capacity * self.token_bytes

    @property
    def row_bytes(self) -> int:
        return self.row_capacity * self.token_bytes


def token_shape(model: PreTrainedModel) -> KVShape:
    """Return the shape of a store for one token of a model, as the model's own forward pass asks for it.

    Raises:
        ModelError: if layers differ in the number of their key/value heads. Smaller heads are stored as the largest.
    """
    calls = attention_calls(model)
    heads = sorted({call.kv_heads for call in calls})
    if len(heads) != 1:
        raise ModelError(
            f"{type(model).__name__} has layers of {' and '.join(map(str, heads)) or 'no'} key/value heads, which the torch "
            "engine can't store; choose --rollout-engine vllm or sglang"
        )
    size = max(call.head_dim for call in calls)
    return KVShape(len(calls), heads[0], size, 1, 1, 1, 1, model.get_input_embeddings().weight.dtype)


class Sequences:
    """Keys and values of sequences of at most `span` tokens: for each layer one tensor (2, C, K, T, D)."""

    def __init__(self, shape: KVShape, count: int, span: int, device: torch.device):
        self.count, self.span = count, span
        size = (2, count, shape.kv_heads, span, shape.head_dim)
        # Zeros, not empty: padded cells meet a probability of exactly 0, and 0 · NaN would be NaN.
        self.layers = [torch.zeros(size, dtype=shape.dtype, device=device) for _ in range(shape.layers)]

    def fit(self, count: int, span: int) -> None:
        """Lay out again for `count` sequences of `span` tokens, layer by layer; what fits of the old ones stays."""
        count_kept, kept = min(count, self.count), min(span, self.span)
        for i, old in enumerate(self.layers):
            new = old.new_zeros(2, count, old.shape[2], span, old.shape[4])
            new[:, :count_kept, :, :kept] = old[:, :count_kept, :, :kept]
            self.layers[i] = new
        self.count, self.span = count, span

    def first(self, layer: int, count: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first `count` sequences: two [C·K, T, D], dense."""
        both = self.layers[layer][:, :count].flatten(1, 2)
        return both[0], both[1]

    def cells(self, places: Tensor) -> Tensor:
        """Where the token at `places[i]` of sequence i lies, for `write`: int64 [2 · C · K], keys before values."""
        heads = self.layers[0].shape[2]
        one = torch.arange(len(places) * heads, device=places.device) * self.span + places.repeat_interleave(heads)
        return torch.cat([one, one + self.count * heads * self.span])

    def write(self, layer: int, cells: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store one token for each sequence: keys and values [C, K, D] at the cells that `cells` gave."""
        size = keys.shape[-1]
        self.layers[layer].view(-1, size).index_copy_(0, cells, torch.cat([keys, values]).view(-1, size))

    def move(self, source: int, target: int) -> None:
        for layer in self.layers:
            layer[:, target] = layer[:, source]


class KVStore:
    """Prompts (`prefixes`) and what was generated after them (`rows`), within a shape."""

    def __init__(self, shape: KVShape, device: torch.device):
        self.shape = shape
        self.prefixes = Sequences(shape, shape.slots, shape.prefix_capacity, device)
        self.rows = Sequences(shape, shape.rows, min(LENGTH_STEP, shape.row_capacity), device)

    def grow(self, shape: KVShape) -> None:
        """Have room for more; what is there stays."""
        if (shape.slots, shape.prefix_capacity) != (self.shape.slots, self.shape.prefix_capacity):
            self.prefixes.fit(shape.slots, shape.prefix_capacity)
        if shape.rows != self.shape.rows:
            self.rows.fit(shape.rows, self.rows.span)
        self.shape = shape

    def fit_rows(self, longest: int) -> None:
        """Have memory for rows of `longest` tokens.

        How much that is depends on nothing else: what was generated before must not change how sums are rounded, or a
        run that is resumed would not be the same run.
        """
        step = LENGTH_STEP
        while longest > 16 * step:  # rarely laid out again if rows are long, and at most an eighth too much
            step *= 2
        span = min(-(-longest // step) * step, self.shape.row_capacity)
        if span != self.rows.span:
            self.rows.fit(self.shape.rows, span)

    def write_prefix(self, layer: int, slot: int, keys: Tensor, values: Tensor) -> None:
        """Store a prompt's keys and values [T, K, D] of one layer."""
        target = self.prefixes.layers[layer][:, slot, :, : keys.shape[0]]
        target[0], target[1] = keys.transpose(0, 1), values.transpose(0, 1)


def round_up(length: int) -> int:
    """A number of tokens there may be memory for: this many or a few more."""
    return -(-length // LENGTH_STEP) * LENGTH_STEP
