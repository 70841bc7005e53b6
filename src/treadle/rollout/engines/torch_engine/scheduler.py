"""Decide what runs: which requests are admitted, which rows get a token, and which samples have ended.

Continuous batching: requests wait in line, a request is admitted as soon as there is memory for its prompt and all its
samples, and a sample leaves the moment it ends. The scheduler computes nothing and imports no torch. The engine runs what
`schedule` returns and gives the sampled tokens to `postprocess`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from treadle.types import Completion, SamplingParams, Status

MAX_PREFILL_TOKENS = 8192


@dataclass(eq=False)
class Request:
    """A prompt to continue n times; `slot` is where its keys and values are."""

    token_ids: Sequence[int]
    sampling: SamplingParams
    n: int
    slot: int = -1
    running: int = 0


@dataclass(eq=False)
class Row:
    """One running sample and its tokens so far; the model has not seen the last one yet."""

    request: Request
    index: int
    seed: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def completion(self, status: Status, reason: str) -> Completion:
        return Completion(
            index=self.index,
            token_ids=np.array(self.token_ids, dtype=np.int32),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            weight_versions=np.array(self.versions, dtype=np.int32),
            status=status,
            stop_reason=reason,
        )


Ended = list[tuple[Request, Completion]]


@dataclass(frozen=True)
class Batch:
    """The rows that get a token in one step: those of admitted requests, or, if none were admitted, all."""

    rows: list[Row]
    admitted: list[Request]


@dataclass(frozen=True)
class EngineLimits:
    """Most rows at once, bytes for keys and values, and whether the fused forward pass may be used."""

    max_rows: int
    kv_bytes: int
    fused: bool = True


class KVMemory(Protocol):
    """The memory for keys and values of prompts (slots) and of rows, which are in the order of the scheduler's rows."""

    def admit(self, waiting: Sequence[Request], num_rows: int) -> bool:
        """Give the first of the waiting requests its slot beside `num_rows` rows; False if it must wait.

        If nothing is held, the first request always gets one.
        """
        ...

    def move_row(self, source: int, target: int) -> None:
        """Overwrite row `target` with row `source`."""
        ...

    def release(self, request: Request) -> None:
        """Free the slot of a request whose last row has left."""
        ...

    def clear(self) -> None:
        """Free all slots."""
        ...


class Scheduler:
    """The waiting requests and the running rows."""

    def __init__(self, memory: KVMemory, eos_token_ids: frozenset[int], decode_text: Callable[[Sequence[int]], str]):
        self.memory, self.eos_token_ids, self.decode_text = memory, eos_token_ids, decode_text
        self.waiting: deque[Request] = deque()
        self.rows: list[Row] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.rows)

    def schedule(self) -> Batch:
        """Admit the requests that fit and return their rows, which get their first tokens, or else all running rows."""
        admitted: list[Request] = []
        fresh: list[Row] = []
        tokens = 0
        while self.waiting:
            request = self.waiting[0]
            tokens += len(request.token_ids)
            too_many = admitted and tokens > MAX_PREFILL_TOKENS
            if too_many or not self.memory.admit(self.waiting, len(self.rows) + len(fresh)):
                break
            admitted.append(self.waiting.popleft())
            request.running = request.n
            fresh += [Row(request, i, row_seed(request.sampling.seed, i)) for i in range(request.n)]
        self.rows += fresh
        return Batch(fresh or self.rows.copy(), admitted)

    def postprocess(self, batch: Batch, tokens: Sequence[int], logprobs: Sequence[float], version: int) -> Ended:
        """Append a token to each row of the batch; remove and return the samples that ended."""
        done: Ended = []
        ended: list[int] = []
        places = range(len(self.rows) - len(batch.rows), len(self.rows))
        for i, row, token, logprob in zip(places, batch.rows, tokens, logprobs, strict=True):
            row.token_ids.append(token)
            row.logprobs.append(logprob)
            row.versions.append(version)
            if (end := self._end_of(row)) is not None:
                done.append((row.request, row.completion(*end)))
                ended.append(i)
        for i in reversed(ended):
            self._remove_row(i)
        return done

    def abort(self) -> Ended:
        """End everything; a sample of a waiting request ends without tokens."""
        waiting = [Row(request, i, 0) for request in self.waiting for i in range(request.n)]
        out = [(row.request, row.completion(Status.ABORTED, "abort")) for row in self.rows + waiting]
        self.rows.clear()
        self.waiting.clear()
        self.memory.clear()
        return out

    def drop(self, requests: Collection[Request]) -> None:
        """Remove requests whose callers have left; those that have ended are ignored."""
        if requests:
            self.waiting = deque(request for request in self.waiting if request not in requests)
            for i in reversed(range(len(self.rows))):
                if self.rows[i].request in requests:
                    self._remove_row(i)

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
        """Remove row i; the last row takes its place. The slot is freed with the request's last row."""
        request, last = self.rows[i].request, self.rows.pop()
        if i != len(self.rows):
            self.memory.move_row(len(self.rows), i)
            self.rows[i] = last
        request.running -= 1
        if not request.running:
            self.memory.release(request)


def row_seed(seed: int, index: int) -> int:
    """Return the seed of sample `index` of a request with `seed`: a 64-bit hash of both."""
    mixed = (seed * 0x9E3779B97F4A7C15 + (index + 1) * 0xD1B54A32D192ED03) & (2**64 - 1)
    mixed = ((mixed ^ (mixed >> 32)) * 0xD6E8FEB86659FD93) & (2**64 - 1)
    return mixed ^ (mixed >> 32)
