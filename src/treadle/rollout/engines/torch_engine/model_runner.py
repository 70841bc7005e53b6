"""Compute what the scheduler decided: prefill or decode, then one sampled token for each row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from treadle.models.cpu.inference import inference_model
from treadle.rollout.engines.torch_engine.attention import decode, prefill
from treadle.rollout.engines.torch_engine.check import check_decode
from treadle.rollout.engines.torch_engine.kv_store import KVStore
from treadle.rollout.engines.torch_engine.sampler import SamplingTensors, sample, uniforms
from treadle.rollout.engines.torch_engine.scheduler import Batch, EngineLimits, Request, Row
from treadle.types import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ModelRunner:
    """The model, its store of keys and values, and the `version` of its weights.

    Args:
        unused_ids: ids of the vocabulary that are no token, never sampled.
    Raises:
        ModelError: if the model's logits differ token by token from those of a whole sequence.
    """

    def __init__(self, model: PreTrainedModel, limits: EngineLimits, unused_ids: Sequence[int] = ()):
        self.version = 0
        self.inference = inference_model(model, fused=limits.fused)
        self._parameters = tuple(model.parameters())  # a walk over all modules costs 1 % of a small step
        self.device = self._parameters[0].device
        self.store = KVStore(check_decode(model, self.inference), self.device, limits)
        self._prepared: tuple[int, int] | None = None
        self._unused = torch.tensor(unused_ids, dtype=torch.int64, device=self.device) if unused_ids else None
        self._params: list[SamplingParams] = []
        self._settings: SamplingTensors | None = None

    def run(self, batch: Batch) -> tuple[list[int], list[float]]:
        """Return one token and its logprob for each row of the batch."""
        # torch counts the writes to a parameter in `_version`: changes without a new version of ours are noticed too.
        weights = self.version, sum(p._version for p in self._parameters)
        if weights != self._prepared:
            self.inference.refresh()
            self._prepared = weights
        return self._sample(self._prefill(batch.admitted) if batch.admitted else self._decode(batch.rows), batch.rows)

    def release(self) -> None:
        """Free the memory of keys and values and of prepared weights; it is allocated again when needed."""
        self.store.free()
        self.inference.release()
        self._prepared = None

    def _prefill(self, requests: list[Request]) -> Tensor:
        tokens = self._tensor([token for request in requests for token in request.token_ids])
        lengths, slots = [len(r.token_ids) for r in requests], [r.slot for r in requests]
        logits = prefill(self.inference, self.store, tokens, lengths, slots)
        return logits[self._tensor([i for i, request in enumerate(requests) for _ in range(request.n)])]

    def _decode(self, rows: list[Row]) -> Tensor:
        slots = self._tensor([row.request.slot for row in rows])
        places = self._tensor([len(row.token_ids) - 1 for row in rows])
        prefix_lengths = self._tensor([len(request.token_ids) for request in self.store.slots])
        tokens = self._tensor([row.token_ids[-1] for row in rows])
        return decode(self.inference, self.store, tokens, slots, places, prefix_lengths)

    def _sample(self, logits: Tensor, rows: list[Row]) -> tuple[list[int], list[float]]:
        params = [row.request.sampling for row in rows]
        if self._settings is None or params != self._params:
            self._settings = SamplingTensors.of(params, self.device)
        self._params = params
        seeds = np.array([row.seed for row in rows], dtype=np.uint64)
        uniform = uniforms(seeds, np.array([len(row.token_ids) for row in rows]))
        draws = torch.from_numpy(uniform).to(self.device)
        tokens, logprobs = sample(logits, self._settings, draws, self.inference.kernels, self._unused)
        return tokens.tolist(), logprobs.tolist()

    def _tensor(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, device=self.device)
