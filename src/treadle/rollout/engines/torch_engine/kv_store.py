"""Keys and values of everything that is being generated.

A prompt's keys and values are stored once for all its samples (a *prefix slot*); each sample has a *row* for its
own tokens. Slots and rows in use are kept at the front and are all as long as the longest one, so attention works on
dense tensors, whole: one that is removed is replaced by the last one, and rows are laid out again as they grow.

Axis letters: `L` layers, `C` sequences (prefix slots or rows), `K` key/value heads, `T` tokens, `D` head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from treadle.errors import ModelError
from treadle.models.forward import attention_calls
from treadle.rollout.engines.torch_engine.scheduler import EngineLimits, Request

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
    return KVShape(len(calls), heads[0], size, 1, 1, 1, 1, next(model.get_input_embeddings().parameters()).dtype)


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

    @torch.inference_mode()
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


class DenseMemory:
    """A store for the requests that a scheduler admits: `slots[i]` is the request whose prompt is in slot i.

    It is all that a scheduler knows of memory (`KVMemory`): paged blocks or a prefix cache would take its place here.
    """

    def __init__(self, token: KVShape, limits: EngineLimits, device: torch.device):
        self.token, self.limits, self.device = token, limits, device
        self.slots: list[Request] = []
        self.store: KVStore | None = None

    @property
    def filled(self) -> KVStore:
        assert self.store is not None, "no request has been admitted"
        return self.store

    def admit(self, waiting: Sequence[Request], num_rows: int) -> bool:
        """Give the first of the waiting requests a slot, and grow the store if it must and the limits allow it.

        A later turn of a conversation is what grows it: a longer prompt, and a slot for each sample.
        """
        if not self.slots:
            self._renew(waiting)
        request, shape = waiting[0], self.filled.shape
        rows = num_rows + request.n
        wanted = replace(
            shape,
            slots=shape.slots if len(self.slots) < shape.slots else 2 * shape.slots,
            rows=max(shape.rows, rows),
            prefix_capacity=max(shape.prefix_capacity, round_up(len(request.token_ids))),
            row_capacity=max(shape.row_capacity, round_up(request.sampling.max_new_tokens)),
        )
        if wanted != shape:
            if wanted.rows > max(shape.rows, self.limits.max_rows) or wanted.num_bytes > self.limits.kv_bytes:
                return False
            self.filled.grow(wanted)
        request.slot = len(self.slots)
        self.slots.append(request)
        return True

    def _renew(self, waiting: Sequence[Request]) -> None:
        """With nothing held: room for the waiting requests as far as the limits allow, and always for the first one.

        A larger store would do, but what ran before must not change how many requests are admitted and how sums are
        rounded: a run that is resumed would not be the same run.
        """
        prefix = round_up(max(len(r.token_ids) for r in waiting))
        row = round_up(max(r.sampling.max_new_tokens for r in waiting))
        wanted = replace(self.token, prefix_capacity=prefix, row_capacity=row, slots=0, rows=0)
        for request in waiting:
            larger = replace(wanted, slots=wanted.slots + 1, rows=wanted.rows + request.n)
            if wanted.slots and (larger.rows > self.limits.max_rows or larger.num_bytes > self.limits.kv_bytes):
                break
            wanted = larger
        if self.store is None or self.store.shape != wanted:
            self.store = None  # free the old one before the new one is made
            self.store = KVStore(wanted, self.device)

    def move_row(self, source: int, target: int) -> None:
        self.filled.rows.move(source, target)

    def release(self, request: Request) -> None:
        """Free a slot; the last one takes its place."""
        moved = self.slots.pop()
        if moved is not request:
            self.filled.prefixes.move(moved.slot, request.slot)
            moved.slot = request.slot
            self.slots[moved.slot] = moved

    def clear(self) -> None:
        self.slots.clear()


def round_up(length: int) -> int:
    """A number of tokens there may be memory for: this many or a few more."""
    return -(-length // LENGTH_STEP) * LENGTH_STEP
