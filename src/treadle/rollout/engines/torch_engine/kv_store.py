"""Keys and values of everything that is being generated, allocated once.

A prompt's keys and values are stored once for all its samples (a *prefix slot*); each sample has a *row* for its
own tokens. Slots and rows in use are kept at the front, so attention works on dense tensors: whoever leaves is
replaced by the last one.

Axis letters: `L` layers, `S` prefix slots, `B` rows, `K` key/value heads, `P` and `R` capacities in tokens, `D` head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class KVShape:
    """What a store has room for."""

    layers: int
    kv_heads: int
    head_dim: int
    slots: int
    rows: int
    prefix_capacity: int
    row_capacity: int
    dtype: torch.dtype

    def covers(self, other: KVShape) -> bool:
        """True where whatever fits a store of the other shape fits one of this shape."""
        return (
            self.slots >= other.slots
            and self.rows >= other.rows
            and self.prefix_capacity >= other.prefix_capacity
            and self.row_capacity >= other.row_capacity
        )

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


class KVStore:
    """The tensors, and moving a slot or a row to another place."""

    def __init__(self, shape: KVShape, device: torch.device):
        self.shape, self.device = shape, device
        prefix = (shape.layers, shape.slots, shape.kv_heads, shape.prefix_capacity, shape.head_dim)
        row = (shape.layers, shape.rows, shape.kv_heads, shape.row_capacity, shape.head_dim)
        # Zeros, not empty: padded cells meet a probability of exactly 0, and 0 · NaN would be NaN.
        self.prefix_keys, self.prefix_values = (torch.zeros(prefix, dtype=shape.dtype, device=device) for _ in range(2))
        self.row_keys, self.row_values = (torch.zeros(row, dtype=shape.dtype, device=device) for _ in range(2))

    def grown(self, shape: KVShape) -> KVStore:
        """A larger store that holds what this one does."""
        new, own = KVStore(shape, self.device), self.shape
        new.prefix_keys[:, : own.slots, :, : own.prefix_capacity] = self.prefix_keys
        new.prefix_values[:, : own.slots, :, : own.prefix_capacity] = self.prefix_values
        new.row_keys[:, : own.rows, :, : own.row_capacity] = self.row_keys
        new.row_values[:, : own.rows, :, : own.row_capacity] = self.row_values
        return new

    def write_prefix(self, layer: int, slot: int, keys: Tensor, values: Tensor) -> None:
        """Store a prompt's keys and values [P, K, D] of one layer."""
        length = keys.shape[0]
        self.prefix_keys[layer, slot, :, :length] = keys.transpose(0, 1)
        self.prefix_values[layer, slot, :, :length] = values.transpose(0, 1)

    def prefixes(self, layer: int, slots: int, span: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first `slots` prompts, `span` tokens of each: two [S·K, span, D]."""
        keys, values = self.prefix_keys[layer, :slots], self.prefix_values[layer, :slots]
        return keys.flatten(0, 1)[:, :span], values.flatten(0, 1)[:, :span]

    def rows(self, layer: int, rows: int, span: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first `rows` rows, `span` tokens of each: two [B·K, span, D]."""
        keys, values = self.row_keys[layer, :rows], self.row_values[layer, :rows]
        return keys.flatten(0, 1)[:, :span], values.flatten(0, 1)[:, :span]

    def token_cells(self, places: Tensor) -> Tensor:
        """Where the tokens at `places[i]` of row i lie in a layer, for `write_tokens`: int64 [B·K]."""
        heads = torch.arange(len(places) * self.shape.kv_heads, device=places.device)
        return heads * self.shape.row_capacity + places.repeat_interleave(self.shape.kv_heads)

    def write_tokens(self, layer: int, cells: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store one token a row: keys and values [B, K, D] at the cells that `token_cells` gave."""
        size = self.shape.head_dim
        self.row_keys[layer].view(-1, size).index_copy_(0, cells, keys.reshape(-1, size))
        self.row_values[layer].view(-1, size).index_copy_(0, cells, values.reshape(-1, size))

    def move_slot(self, source: int, target: int, length: int) -> None:
        self.prefix_keys[:, target, :, :length] = self.prefix_keys[:, source, :, :length]
        self.prefix_values[:, target, :, :length] = self.prefix_values[:, source, :, :length]

    def move_row(self, source: int, target: int, length: int) -> None:
        self.row_keys[:, target, :, :length] = self.row_keys[:, source, :, :length]
        self.row_values[:, target, :, :length] = self.row_values[:, source, :, :length]
