"""The key/value store: what attention reads and writes, and how much of it the limits allow.

A prompt's keys and values are stored once for all its samples (a *prefix slot*), and each sample has a *row* for its own
tokens. Slots and rows in use are at the front and have the length of the longest one, so that attention works on whole
dense tensors. The last slot or row replaces one that is removed, and rows are laid out again as they grow.

Axis letters: `L` layers, `C` sequences (prefix slots or rows), `K` key/value heads, `T` tokens, `D` head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from treadle.errors import ModelError
from treadle.models.forward import attention_calls, embeddings_of
from treadle.rollout.engines.torch_engine.scheduler import EngineLimits, Request

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LENGTH_STEP = 16
"""Lengths are rounded up to this: matmul kernels are prepared per shape, and few shapes keep them cached."""
NO_LIMITS = EngineLimits(max_rows=0, kv_bytes=0)
"""The limits of a store that has its shape from the start."""


@dataclass(frozen=True)
class KVShape:
    """What a store has room for. Memory is allocated for the tokens that are there, up to this."""

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
        token_bytes = 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize  # keys and values
        return token_bytes * (self.slots * self.prefix_capacity + self.rows * self.row_capacity)


def token_shape(model: PreTrainedModel) -> KVShape:
    """Return the shape of an empty store for a model, as the model's own forward pass asks for it.

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
    return KVShape(len(calls), heads[0], size, 0, 0, 1, 1, embeddings_of(model).dtype)


class Sequences:
    """Keys and values of sequences of at most `span` tokens: for each layer one tensor (2, C, K, T, D)."""

    def __init__(self, shape: KVShape, count: int, span: int, device: torch.device):
        self.count, self.span = count, span
        size = (2, count, shape.kv_heads, span, shape.head_dim)
        # Zeros, not empty: padded cells meet a probability of exactly 0, and 0 · NaN would be NaN.
        self.layers = [torch.zeros(size, dtype=shape.dtype, device=device) for _ in range(shape.layers)]

    def fit(self, count: int, span: int) -> None:
        """Lay out again for `count` sequences of `span` tokens, layer by layer; stored tokens that fit are kept."""
        count_kept, kept = min(count, self.count), min(span, self.span)
        for i, old in enumerate(self.layers):
            new = old.new_zeros(2, count, old.shape[2], span, old.shape[4])
            new[:, :count_kept, :, :kept] = old[:, :count_kept, :, :kept]
            self.layers[i] = new
        self.count, self.span = count, span

    def first(self, layer: int, count: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of the first `count` sequences, each dense [C·K, T, D]."""
        both = self.layers[layer][:, :count].flatten(1, 2)
        return both[0], both[1]

    def cells(self, places: Tensor) -> Tensor:
        """Return where the token at `places[i]` of sequence i is, for `write`: int64 [2 · C · K], keys before values."""
        heads = self.layers[0].shape[2]
        one = torch.arange(len(places) * heads, device=places.device) * self.span + places.repeat_interleave(heads)
        return torch.cat([one, one + self.count * heads * self.span])

    def write(self, layer: int, cells: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store one token for each sequence: keys and values [C, K, D] at the cells that `cells` returned."""
        size = keys.shape[-1]
        self.layers[layer].view(-1, size).index_copy_(0, cells, torch.cat([keys, values]).view(-1, size))

    @torch.inference_mode()
    def move(self, source: int, target: int) -> None:
        for layer in self.layers:
            layer[:, target] = layer[:, source]


class KVStore:
    """Prompts (`prefixes`) and what was generated after them (`rows`); `slots[i]` is the request whose prompt is in slot i.

    Its first four methods are all that a scheduler knows of memory (`KVMemory`), and attention uses the others: paged
    blocks or a prefix cache would be another class with these methods.
    """

    def __init__(self, shape: KVShape, device: torch.device, limits: EngineLimits = NO_LIMITS):
        self.shape, self.device, self.limits = shape, device, limits
        self.slots: list[Request] = []
        self._allocate(shape)

    def admit(self, waiting: Sequence[Request], num_rows: int) -> bool:
        """Give the first of the waiting requests a slot beside `num_rows` rows, and grow if the limits allow it.

        A later turn of a conversation is what makes a store grow: a longer prompt, and a slot for each sample.
        """
        if not self.slots:
            self._renew(waiting)
        request, shape = waiting[0], self.shape
        wanted = replace(
            shape,
            slots=shape.slots if len(self.slots) < shape.slots else 2 * shape.slots,
            rows=max(shape.rows, num_rows + request.n),
            prefix_capacity=max(shape.prefix_capacity, round_up(len(request.token_ids))),
            row_capacity=max(shape.row_capacity, round_up(request.sampling.max_new_tokens)),
        )
        if wanted != shape:
            if wanted.rows > max(shape.rows, self.limits.max_rows) or wanted.num_bytes > self.limits.kv_bytes:
                return False
            self.grow(wanted)
        request.slot = len(self.slots)
        self.slots.append(request)
        return True

    def move_row(self, source: int, target: int) -> None:
        self.rows.move(source, target)

    def release(self, request: Request) -> None:
        """Free a slot; the last one takes its place."""
        moved = self.slots.pop()
        if moved is not request:
            self.prefixes.move(moved.slot, request.slot)
            moved.slot = request.slot
            self.slots[moved.slot] = moved

    def clear(self) -> None:
        self.slots.clear()

    def free(self) -> None:
        """Free all memory; nothing may be held."""
        self._allocate(replace(self.shape, slots=0, rows=0))

    def grow(self, shape: KVShape) -> None:
        """Make room for more; what is stored stays."""
        if (shape.slots, shape.prefix_capacity) != (self.shape.slots, self.shape.prefix_capacity):
            self.prefixes.fit(shape.slots, shape.prefix_capacity)
        if shape.rows != self.shape.rows:
            self.rows.fit(shape.rows, self.rows.span)
        self.shape = shape

    def fit_rows(self, longest: int) -> None:
        """Allocate memory for rows of `longest` tokens.

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

    def _renew(self, waiting: Sequence[Request]) -> None:
        """Make room for the waiting requests as far as the limits allow, and always for the first one.

        A larger store would do, but what ran before must not change how many requests are admitted and how sums are
        rounded: a run that is resumed would not be the same run.
        """
        prefix = round_up(max(len(r.token_ids) for r in waiting))
        row = round_up(max(r.sampling.max_new_tokens for r in waiting))
        wanted = replace(self.shape, prefix_capacity=prefix, row_capacity=row, slots=0, rows=0)
        for request in waiting:
            larger = replace(wanted, slots=wanted.slots + 1, rows=wanted.rows + request.n)
            if wanted.slots and (larger.rows > self.limits.max_rows or larger.num_bytes > self.limits.kv_bytes):
                break
            wanted = larger
        if self.shape != wanted:
            self.free()  # before the new memory is allocated
            self._allocate(wanted)

    def _allocate(self, shape: KVShape) -> None:
        self.shape = shape
        self.prefixes = Sequences(shape, shape.slots, shape.prefix_capacity, self.device)
        self.rows = Sequences(shape, shape.rows, min(LENGTH_STEP, shape.row_capacity), self.device)


def round_up(length: int) -> int:
    """Round a number of tokens up to a multiple of `LENGTH_STEP`."""
    return -(-length // LENGTH_STEP) * LENGTH_STEP
