"""The engine's end of the weight transports inside a vLLM server, which gets the offer over HTTP.

An update is a start request, `update_weights` twice with the same offer, and a finish request. The first
`update_weights` only checks the offer, in every worker, and the second one loads it. If the check fails, the old
weights are still complete. If loading fails, the model must not serve until a complete update has succeeded. For a
broadcast, all ranks report that they are ready in the first request and receive the buckets in the second.

If a server divides its model among several workers, each of them receives all weights and is a rank of its own. vLLM's
own loader is given the weights, because it fuses projections, splits them for tensor parallelism and packs them for CPU
kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from treadle.errors import EngineError
from treadle.weights import broadcast
from treadle.weights.base import Offer, WeightSpec, check_specs
from treadle.weights.whole_offer import expected_specs, opened


@dataclass
class NoInit(WeightTransferInitInfo):
    """The initial handshake, which carries nothing."""


@dataclass
class OfferedWeights(WeightTransferUpdateInfo):
    """An offer as JSON; with `check_only` nothing is changed."""

    offer: dict[str, Any] = field(default_factory=dict)
    check_only: bool = False


class TreadleWeights(WeightTransferEngine[NoInit, OfferedWeights]):
    """Loads offered weights into the model of one worker."""

    init_info_cls = NoInit
    update_info_cls = OfferedWeights
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module):
        super().__init__(config, vllm_config, device, model)
        self._expected: Mapping[str, WeightSpec] | None = None
        self._intake = broadcast.BroadcastIntake()

    def init_transfer_engine(self, init_info: NoInit) -> None:
        """Do nothing: each offer says all that is needed."""

    def start_weight_update(self) -> None:
        """Do nothing: the offer must be checked first."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Do what vLLM's own method does, without waiting for an accelerator if there is none."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: OfferedWeights) -> None:
        """Check the offer, or load it."""
        offer = Offer.from_json(update_info.offer)
        if offer.transport != broadcast.NAME:
            check_specs(offer.specs, self._specs())
            with opened(offer, verify=update_info.check_only) as tensors:
                if not update_info.check_only:
                    self._load(iter(tensors.items()))
        elif update_info.check_only:
            self._intake.enter(offer, self.device, self._refusal(offer))
        else:
            self._load(self._intake.weights(offer, self.device))

    def _refusal(self, offer: Offer) -> EngineError | None:
        try:
            check_specs(offer.specs, self._specs())
        except EngineError as error:
            return error
        return None

    def _load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        with torch.no_grad():
            initialize_layerwise_reload(self.model)
            try:
                self.model.load_weights(weights)
                if (left := next(weights, None)) is not None:  # the iterator must be exhausted, which ends a broadcast
                    raise EngineError(f"vLLM's loader stopped before {left[0]!r}; can it load this model?")
            finally:  # otherwise vLLM keeps a partial layer and adds the next update to it
                finalize_layerwise_reload(self.model, self.model_config)
            refresh_prepacked_heads(self.model)

    def _specs(self) -> Mapping[str, WeightSpec]:
        if self._expected is None:
            tied = bool(getattr(self.model_config.hf_text_config, "tie_word_embeddings", False))
            self._expected = expected_specs(Path(self.model_config.model), self.model_config.dtype, tied)
        return self._expected

    def finish_weight_update(self) -> None:
        """Do nothing: `update_weights` left a complete model or raised."""

    def shutdown(self) -> None:
        self._intake.leave()


def refresh_prepacked_heads(model: torch.nn.Module) -> None:
    """Pack again the output heads of which CPU kernels keep a packed copy.

    vLLM packs the matrix of a head when it loads it. A head that is tied to the embeddings gets no weights of its own
    in a reload, so it would keep the packed copy of the old weights.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)
