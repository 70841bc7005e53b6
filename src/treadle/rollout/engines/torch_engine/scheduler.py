"""Which samples run, and one step of all of them.

Continuous batching: requests wait in line, a request enters as soon as a prefix slot and rows for all its samples
are free, and a sample leaves the moment it ends. Sync and single-threaded: `TorchEngine` calls `step` and hands
the results on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from treadle.models.cpu.inference import inference_model
from treadle.models.layout import PackedLayout
from treadle.rollout.engines.torch_engine.attention import DecodeAttention, PrefillAttention
from treadle.rollout.engines.torch_engine.check import check_decode
from treadle.rollout.engines.torch_engine.kv_store import KVShape, KVStore, round_up
from treadle.rollout.engines.torch_engine.sampler import SamplingTensors, row_seed, sample, uniforms
from treadle.types import Completion, SamplingParams, Status

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_PREFILL_TOKENS = 8192


@dataclass(eq=False)
class Request:
    """A prompt to continue n times."""

    token_ids: Sequence[int]
    sampling: SamplingParams
    n: int
    slot: int = -1
    running: int = 0


@dataclass(eq=False)
class Row:
    """One running sample: the tokens so far (the last one not yet fed to the model)."""

    request: Request
    index: int
    seed: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class EngineLimits:
    """How much may run at once."""

    max_rows: int
    kv_bytes: int
    fused: bool = True


class Scheduler:
    """The waiting line, the running rows and the key/value store."""

    def __init__(
        self,
        model: PreTrainedModel,
        eos_token_ids: frozenset[int],
        decode_text: Callable[[Sequence[int]], str],
        limits: EngineLimits,
        unused_ids: Sequence[int] = (),
    ):
        self.model = model
        self.inference = inference_model(model, fused=limits.fused)
        self._token = check_decode(model, self.inference)
        self._parameters = tuple(model.parameters())  # a walk over all modules costs 1 % of a small step
        self._prepared: tuple[int, int] | None = None
        self.eos_token_ids = eos_token_ids
        self.decode_text = decode_text
        self.limits = limits
        self.version = 0
        self.waiting: deque[Request] = deque()
        self.slots: list[Request] = []
        self.rows: list[Row] = []
        self.store: KVStore | None = None
        self.device = model.get_input_embeddings().weight.device
        self._settings: SamplingTensors | None = None
        self._unused = torch.tensor(unused_ids, dtype=torch.int64, device=self.device) if unused_ids else None

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.rows)

    @torch.inference_mode()
    def step(self) -> list[tuple[Request, Completion]]:
        """Admit what fits and sample its first tokens, or else one token for every running sample; return those that ended."""
        self._prepare()
        admitted = self._admit()
        return self._prefill(admitted) if admitted else self._decode()

    def abort(self) -> list[tuple[Request, Completion]]:
        """End everything; what waited ends with no tokens."""
        out = [(row.request, _completion(row, Status.ABORTED, "abort")) for row in self.rows]
        for request in self.waiting:
            out += [(request, _completion(Row(request, i, 0), Status.ABORTED, "abort")) for i in range(request.n)]
        self.rows.clear()
        self.slots.clear()
        self.waiting.clear()
        self._settings = None
        return out

    @torch.inference_mode()
    def drop(self, requests: Collection[Request]) -> None:
        """Let requests leave that nobody waits for any more; those that have ended are passed over."""
        if not requests:
            return
        self.waiting = deque(request for request in self.waiting if request not in requests)
        for i in reversed(range(len(self.rows))):
            if self.rows[i].request in requests:
                self._remove_row(i)

    def free_store(self) -> None:
        """Free the memory of keys and values; it is allocated again when needed."""
        assert not self.rows, "samples are still running"
        self.store = None
        self.inference.release()
        self._prepared = None

    def _prepare(self) -> None:
        """Have the forward pass read the weights again if they have changed."""
        now = self.version, sum(p._version for p in self._parameters)
        if now != self._prepared:
            self.inference.refresh()
            self._prepared = now

    # Admission

    def _admit(self) -> list[Request]:
        if not self.waiting:
            return []
        if not self.rows:
            self._make_store()
        admitted: list[Request] = []
        tokens, rows = 0, len(self.rows)
        while self.waiting:
            request = self.waiting[0]
            heavy = bool(admitted) and tokens + len(request.token_ids) > MAX_PREFILL_TOKENS
            if heavy or not self._make_room(request, rows):
                break
            self.waiting.popleft()
            request.slot = len(self.slots)
            self.slots.append(request)
            admitted.append(request)
            tokens += len(request.token_ids)
            rows += request.n
        return admitted

    def _make_room(self, request: Request, rows: int) -> bool:
        """True where the store has room for a request beside `rows` others; it grows where the limits allow it.

        A later turn of a conversation is what grows it: a longer prompt, and a slot for each sample.
        """
        assert self.store is not None
        shape = self.store.shape
        wanted = replace(
            shape,
            slots=shape.slots if len(self.slots) < shape.slots else 2 * shape.slots,
            rows=shape.rows if rows + request.n <= shape.rows else rows + request.n,
            prefix_capacity=max(shape.prefix_capacity, round_up(len(request.token_ids))),
            row_capacity=max(shape.row_capacity, round_up(request.sampling.max_new_tokens)),
        )
        if wanted == shape:
            return True
        if wanted.rows > max(shape.rows, self.limits.max_rows) or wanted.num_bytes > self.limits.kv_bytes:
            return False
        self.store.grow(wanted)
        return True

    def _make_store(self) -> None:
        """With nothing running: a new store, unless the one there is is just what the waiting requests need.

        A larger one would do, but what ran before must not change how many enter and how sums are rounded: a run that
        is resumed would not be the same run.
        """
        wanted = self._wanted_shape()
        if self.store is not None and self.store.shape == wanted:
            return
        self.store = None  # free the old one before the new one is made
        self.store = KVStore(wanted, self.device)

    def _wanted_shape(self) -> KVShape:
        """Room for the waiting requests as far as the limits go, and always for the first one."""
        prefix = round_up(max(len(r.token_ids) for r in self.waiting))
        row = round_up(max(r.sampling.max_new_tokens for r in self.waiting))
        unit = replace(self._token, prefix_capacity=prefix, row_capacity=row)
        slots = rows = 0
        for request in self.waiting:
            more_bytes = (slots + 1) * unit.slot_bytes + (rows + request.n) * unit.row_bytes
            if slots and (rows + request.n > self.limits.max_rows or more_bytes > self.limits.kv_bytes):
                break
            slots, rows = slots + 1, rows + request.n
        return replace(unit, slots=slots, rows=rows)

    # One token for every row

    def _prefill(self, requests: list[Request]) -> list[tuple[Request, Completion]]:
        assert self.store is not None
        layout = PackedLayout.of_lengths([len(r.token_ids) for r in requests], self.device)
        tokens = torch.tensor([t for r in requests for t in r.token_ids], device=self.device)
        plan = PrefillAttention(self.store, layout, [r.slot for r in requests])
        hidden = self.inference.hidden_states(tokens, layout.position_ids, plan)
        last = torch.tensor(np.cumsum([len(r.token_ids) for r in requests]) - 1, device=self.device)
        fresh: list[Row] = []
        source: list[int] = []
        for i, request in enumerate(requests):
            request.running = request.n
            fresh += [Row(request, j, row_seed(request.sampling.seed, j)) for j in range(request.n)]
            source += [i] * request.n
        logits = self.inference.logits(hidden[last])[torch.tensor(source, device=self.device)]
        first = len(self.rows)
        self.rows += fresh
        self._settings = None
        return self._take_tokens(logits, range(first, len(self.rows)))

    def _decode(self) -> list[tuple[Request, Completion]]:
        assert self.store is not None
        slots = torch.tensor([row.request.slot for row in self.rows], device=self.device)
        places = torch.tensor([len(row.token_ids) - 1 for row in self.rows], device=self.device)
        prefix_lengths = torch.tensor([len(r.token_ids) for r in self.slots], device=self.device)
        tokens = torch.tensor([row.token_ids[-1] for row in self.rows], device=self.device)
        plan = DecodeAttention(self.store, slots, places, prefix_lengths, self.inference.kernels)
        hidden = self.inference.hidden_states(tokens, prefix_lengths[slots] + places, plan)
        return self._take_tokens(self.inference.logits(hidden), range(len(self.rows)))

    def _take_tokens(self, logits: torch.Tensor, indices: range) -> list[tuple[Request, Completion]]:
        """Sample for rows `indices` (logits are theirs, in order), then let those that ended leave."""
        rows = [self.rows[i] for i in indices]
        everyone = len(rows) == len(self.rows)
        settings = self._settings if everyone else None
        if settings is None:
            settings = SamplingTensors.of([row.request.sampling for row in rows], self.device)
        self._settings = settings if everyone else None
        seeds = np.array([row.seed for row in rows], dtype=np.uint64)
        uniform = uniforms(seeds, np.array([len(row.token_ids) for row in rows]))
        draws = torch.from_numpy(uniform).to(self.device)
        tokens, logprobs = sample(logits, settings, draws, self.inference.kernels, self._unused)
        ended: list[tuple[int, Status, str]] = []
        for i, row, token, logprob in zip(indices, rows, tokens.tolist(), logprobs.tolist(), strict=True):
            row.token_ids.append(token)
            row.logprobs.append(logprob)
            row.versions.append(self.version)
            end = self._end_of(row)
            if end is not None:
                ended.append((i, *end))
        done = [(self.rows[i].request, _completion(self.rows[i], status, why)) for i, status, why in ended]
        for i, _, _ in reversed(ended):
            self._remove_row(i)
        return done

    def _end_of(self, row: Row) -> tuple[Status, str] | None:
        sampling, token = row.request.sampling, row.token_ids[-1]
        if token in self.eos_token_ids and not sampling.ignore_eos:
            return Status.COMPLETED, "eos"
        if token in sampling.stop_token_ids:
            return Status.COMPLETED, f"stop token {token}"
        if sampling.stop:
            # A token is at least one byte of text, so a stop string is inside this many last tokens.
            window = max(len(s.encode()) for s in sampling.stop) + 4
            text = self.decode_text(row.token_ids[-window:])
            for stop in sampling.stop:
                if stop in text:
                    return Status.COMPLETED, f"stop string {stop!r}"
        if len(row.token_ids) >= sampling.max_new_tokens:
            return Status.TRUNCATED, "length"
        return None

    def _remove_row(self, i: int) -> None:
        """Let row i leave; the last row takes its place. The slot leaves with its last row, in the same way."""
        assert self.store is not None
        request, last = self.rows[i].request, len(self.rows) - 1
        if i != last:
            self.store.rows.move(last, i)
            self.rows[i] = self.rows[last]
        self.rows.pop()
        self._settings = None
        request.running -= 1
        if request.running:
            return
        moved = self.slots.pop()
        if moved is not request:
            self.store.prefixes.move(moved.slot, request.slot)
            moved.slot = request.slot
            self.slots[moved.slot] = moved


def _completion(row: Row, status: Status, reason: str) -> Completion:
    return Completion(
        index=row.index,
        token_ids=np.array(row.token_ids, dtype=np.int32),
        logprobs=np.array(row.logprobs, dtype=np.float32),
        weight_versions=np.array(row.versions, dtype=np.int32),
        status=status,
        stop_reason=reason,
    )
