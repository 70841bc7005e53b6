"""What an SGLang server is asked, beside `/generate` (replies.py).

New weights go through `/update_weights_from_disk`: the server reads a folder of safetensors as it did at its start. So it
needs nothing of Treadle, and what is offered is checked here: names, shapes and dtypes against the model's own files,
and every byte against its checksum. What comes as a broadcast is taken here and made into such a folder.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from treadle.errors import EngineError
from treadle.rollout.engines.base import EnginePart
from treadle.rollout.engines.http_calls import RefusedError
from treadle.rollout.engines.server_engine import Ask
from treadle.rollout.engines.sglang_engine.replies import GENERATE, completion_of, request_of
from treadle.types import Completion, SamplingParams
from treadle.weights import Offer, WeightSpec, broadcast, check_specs
from treadle.weights.offered import expected_specs, folder_of, opened
from treadle.weights.relay import Relay


@dataclass(frozen=True)
class ServedModel:
    """The model that the server was started with: its folder, the dtype it computes in, whether its head is tied."""

    folder: Path
    dtype: torch.dtype
    tied: bool

    @cached_property
    def specs(self) -> Mapping[str, WeightSpec]:
        return expected_specs(self.folder, self.dtype, self.tied)


class SglangDialect:
    """The dialect of one server, whose model this is."""

    generate_path = GENERATE
    ready_path = "/ready"

    def __init__(self, model: ServedModel):
        self.model = model
        self._relay: Relay | None = None

    def request_of(
        self, token_ids: Sequence[int], sampling: SamplingParams, index: int, eos_token_ids: Collection[int], name: str
    ) -> dict[str, Any]:
        return request_of(token_ids, sampling, index, eos_token_ids, name)

    def completion_of(
        self, reply: Any, index: int, sampling: SamplingParams, eos_token_ids: Collection[int], engine: str
    ) -> Completion:
        return completion_of(reply, index, sampling, eos_token_ids, engine)

    async def give_up(self, ask: Ask, name: str) -> None:
        await ask("/abort_request", {"rid": name})

    async def abort(self, ask: Ask) -> None:
        await ask("/abort_request", {"abort_all": True})

    async def pause(self, ask: Ask) -> None:
        # Requests go back to the queue: there they can be aborted and their keys and values dropped ("in_place" allows neither).
        await ask("/pause_generation", {"mode": "retract"})

    async def resume(self, ask: Ask) -> None:
        await ask("/continue_generation", {})

    async def sleep(self, ask: Ask, seconds: float) -> None:
        # Returns when the server has no request left, not even one whose caller is gone: freeing memory under one ends it.
        await ask("/pause_generation", {"mode": "abort"}, seconds=seconds)
        await ask("/release_memory_occupation", {"tags": ["kv_cache", "weights"]}, seconds=seconds)

    async def wake(self, ask: Ask, part: EnginePart, seconds: float) -> None:
        await ask("/resume_memory_occupation", {"tags": ["kv_cache" if part == "kv" else part]}, seconds=seconds)

    async def set_version(self, ask: Ask, version: int) -> None:
        await ask("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    async def health(self, ask: Ask) -> None:
        await ask("/server_info", method="GET")  # asks the scheduler; `/health` would generate, which a pause forbids

    async def num_workers(self, ask: Ask) -> int:
        """One, whatever the server divides its model among: the relay here."""
        return 1

    async def check(self, ask: Ask, offer: Offer, held: ExitStack, seconds: float) -> Offer:
        specs = await asyncio.to_thread(lambda: self.model.specs)
        if (
            offer.transport == broadcast.NAME
        ):  # it says to all ranks what does not fit: no other one sends or waits then
            if self._relay is None:
                self._relay = await asyncio.to_thread(Relay, specs)
            offer = await asyncio.to_thread(self._relay.receive, offer)
        check_specs(offer.specs, specs)
        await asyncio.to_thread(held.enter_context, opened(offer, verify=True))
        return offer

    async def load(self, ask: Ask, offer: Offer, seconds: float) -> None:
        update = {
            "model_path": str(folder_of(offer)),
            "load_format": "safetensors",
            "weight_version": str(offer.version),
            "flush_cache": True,
        }
        try:
            reply = await ask("/update_weights_from_disk", update, seconds=seconds)
        except RefusedError as error:
            raise EngineError(f"{error}; see the server's log") from error
        if not (isinstance(reply, Mapping) and reply.get("success") is True):
            raise EngineError(f"the SGLang server did not load version {offer.version}: {str(reply)[:300]}")

    def close(self) -> None:
        if self._relay is not None:
            self._relay.close()
            self._relay = None
