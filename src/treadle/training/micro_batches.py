"""Splitting a batch into packed micro-batches, and running something over all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from treadle.config import TrainSection
from treadle.training.batch import Batch
from treadle.training.packing import PackedBatch, empty_row, pack, plan_micro_batches
from treadle.training.ranks import ALONE, Ranks

Item = TypeVar("Item")


@dataclass(frozen=True)
class MicroBatches:
    """How the run splits a rank's batches, and the device they are computed on.

    Ranks that share a model run as many passes as the one with most: a rank with less to do ends with empty ones.
    """

    section: TrainSection
    device: torch.device
    ranks: Ranks = ALONE

    def plan(self, batch: Batch) -> list[list[int]]:
        """The sample indices of each micro-batch; some may be empty. Every rank must ask at the same time."""
        plan = self._plan(batch, 0)
        count = self.ranks.max(len(plan))
        if len(plan) < count:
            plan = self._plan(batch, count)
        return plan + [[] for _ in range(count - len(plan))]

    def _plan(self, batch: Batch, at_least: int) -> list[list[int]]:
        if not self.section.use_dynamic_batch_size:
            return plan_micro_batches(batch, max_tokens=None, micro_batch_size=self.section.micro_batch_size)
        return plan_micro_batches(
            batch,
            max_tokens=self.section.max_tokens_per_gpu,
            micro_batch_size=None,
            similar_lengths=self.device.type != "cuda",  # only there is attention computed sequence by sequence
            at_least=at_least,
        )

    def packed(self, batch: Batch) -> Iterator[tuple[PackedBatch, Batch]]:
        """Each micro-batch, packed, with the samples it holds; both on the device.

        One that trains nothing is left out, or one token without a target where other ranks wait for this one.
        """
        for indices in self.plan(batch):
            part = batch.select(indices)
            packed = self._row(part)
            if packed is not None:
                yield packed, part.to(self.device)

    def _row(self, part: Batch) -> PackedBatch | None:
        packed = pack(part)
        if not packed.tokens.shape[0]:
            if self.ranks.is_alone:
                return None
            packed = empty_row()
        return packed.to(self.device)

    def per_token(self, batch: Batch, score: Callable[[PackedBatch], Tensor]) -> Float[Tensor, " T"]:
        """Run `score` (packed → [K]) over a batch without gradients; float32 [T] on the CPU, 0 at untrained tokens."""
        out = torch.zeros(batch.token_ids.shape[0])
        offsets = batch.offsets
        with torch.no_grad():
            for indices in self.plan(batch):
                part = batch.select(indices)
                packed = self._row(part)
                if packed is None:
                    continue
                found, tokens = score(packed).float().cpu(), packed.tokens.cpu()
                sample = part.sample_index[tokens]
                out[tokens - part.offsets[sample] + offsets[torch.tensor(indices, dtype=torch.int64)][sample]] = found
        return out


def with_last(items: Iterable[Item]) -> Iterator[tuple[Item, bool]]:
    """Each item, and True with the last one.

    >>> list(with_last("ab"))
    [('a', False), ('b', True)]
    """
    held: list[Item] = []
    for item in items:
        yield from ((before, False) for before in held)
        held = [item]
    yield from ((last, True) for last in held)
