"""Splitting a batch into packed micro-batches, and running something over all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from treadle.config import TrainSection
from treadle.training.batch import Batch
from treadle.training.packing import PackedBatch, pack, plan_micro_batches


@dataclass(frozen=True)
class MicroBatches:
    """How the run splits its batches, and the device they are computed on."""

    section: TrainSection
    device: torch.device

    def plan(self, batch: Batch) -> list[list[int]]:
        """The sample indices of each micro-batch."""
        if not self.section.use_dynamic_batch_size:
            return plan_micro_batches(batch, max_tokens=None, micro_batch_size=self.section.micro_batch_size)
        return plan_micro_batches(
            batch,
            max_tokens=self.section.max_tokens_per_gpu,
            micro_batch_size=None,
            similar_lengths=self.device.type != "cuda",  # only there is attention computed sequence by sequence
        )

    def packed(self, batch: Batch) -> Iterator[tuple[PackedBatch, Batch]]:
        """Each micro-batch that trains something, packed, with the samples it holds; both on the device."""
        for indices in self.plan(batch):
            part = batch.select(indices)
            packed = pack(part)
            if packed.tokens.shape[0]:
                yield packed.to(self.device), part.to(self.device)

    def per_token(self, batch: Batch, score: Callable[[PackedBatch], Tensor]) -> Float[Tensor, " T"]:
        """Run `score` (packed → [K]) over a batch without gradients; float32 [T] on the CPU, 0 at untrained tokens."""
        out = torch.zeros(batch.token_ids.shape[0])
        offsets = batch.offsets
        with torch.no_grad():
            for indices in self.plan(batch):
                part = batch.select(indices)
                packed = pack(part)
                if not packed.tokens.shape[0]:
                    continue
                found = score(packed.to(self.device)).float().cpu()
                sample = part.sample_index[packed.tokens]
                out[packed.tokens - part.offsets[sample] + offsets[torch.tensor(indices)][sample]] = found
        return out
