"""Splitting a rollout into packed micro-batches, and running something over all of them.

In bfloat16 a token's numbers depend on the row it is computed in: a matmul rounds differently for another number of
rows, and formulas are compiled from some size on. A rollout is therefore split once, and numbers that are compared (old and new
logprobs, policy and reference, old and new values) are computed in the same rows.

Axis letters: `K` trained tokens of a micro-batch, `T` tokens of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from treadle.config import TrainSection
from treadle.training.batch import Batch
from treadle.training.packing import PackedBatch, empty_row, pack, plan_micro_batches
from treadle.training.ranks import ALONE, Ranks

Item = TypeVar("Item")


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Samples that are computed together; none if the rank runs an empty row to keep in step with other ranks.

    `samples` are their indices in the batch that was split, `row` is the packed row (on the CPU), and `places` are the indices
    of the row's trained tokens in that batch.
    """

    samples: tuple[int, ...]
    row: PackedBatch
    places: Int[Tensor, " K"]


@dataclass(frozen=True, eq=False)
class Passes:
    """The micro-batches of a rollout: those of each optimizer step, and those of samples that are scored only."""

    steps: tuple[tuple[MicroBatch, ...], ...]
    rest: tuple[MicroBatch, ...] = ()

    @property
    def all(self) -> tuple[MicroBatch, ...]:
        """All micro-batches, those of the first step first."""
        return (*chain.from_iterable(self.steps), *self.rest)


@dataclass(frozen=True)
class MicroBatches:
    """Splits a rank's batches as configured, for the device on which they are computed.

    Ranks that share a model run as many passes as the rank with the most; a rank with fewer micro-batches runs empty rows at
    the end. Every rank must split its share at the same time.
    """

    section: TrainSection
    device: torch.device
    ranks: Ranks = ALONE

    def plan(self, batch: Batch, steps: Sequence[Sequence[int]], *, with_rest: bool = False) -> Passes:
        """Split the samples of each step and, with `with_rest`, the samples that are in no step."""
        rest: tuple[MicroBatch, ...] = ()
        if with_rest:
            rest = self.split(batch, sorted(set(range(len(batch))).difference(*steps)))
        return Passes(tuple(self.split(batch, indices) for indices in steps), rest)

    def split(self, batch: Batch, indices: Sequence[int]) -> tuple[MicroBatch, ...]:
        """Split the samples at `indices`. A micro-batch without a trained token is left out, unless other ranks need the pass."""
        part = batch.select(indices)
        plan = self._plan(part, 0)
        count = self.ranks.max(len(plan))
        if len(plan) < count:
            plan = self._plan(part, count)
        plan += [[] for _ in range(count - len(plan))]
        found = (self._micro_batch(batch, [indices[i] for i in members]) for members in plan)
        return tuple(one for one in found if one is not None)

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

    def _micro_batch(self, batch: Batch, samples: Sequence[int]) -> MicroBatch | None:
        part = batch.select(samples)
        row = pack(part)
        if not row.tokens.shape[0]:
            return None if self.ranks.is_alone else MicroBatch((), empty_row(), row.tokens)
        of_sample = batch.offsets[torch.as_tensor(samples)] - part.offsets
        return MicroBatch(tuple(samples), row, row.tokens + of_sample[part.sample_index[row.tokens]])

    def per_token(
        self,
        batch: Batch,
        micro_batches: Iterable[MicroBatch],
        score: Callable[[PackedBatch], Sequence[Tensor]],
        count: int = 1,
    ) -> list[Float[Tensor, " T"]]:
        """Run `score` over micro-batches of a batch without gradients.

        Args:
            score: `count` numbers for each trained token of a row: as many tensors [K].
            count: how many.
        Returns:
            float32 [T] on the CPU for each, 0 at tokens that no micro-batch trains.
        """
        out = [torch.zeros(batch.token_ids.shape[0]) for _ in range(count)]
        with torch.no_grad():
            for part in micro_batches:
                for whole, found in zip(out, score(part.row.to(self.device)), strict=True):
                    whole[part.places] = found.float().cpu()
        return out


def with_last(items: Iterable[Item]) -> Iterator[tuple[Item, bool]]:
    """Yield each item with True for the last one.

    >>> list(with_last("ab"))
    [('a', False), ('b', True)]
    """
    held: list[Item] = []
    for item in items:
        yield from ((before, False) for before in held)
        held = [item]
    yield from ((last, True) for last in held)
