"""What an SGLang server is asked, beside `/generate` (replies.py) and for new weights (updates.py).

It needs nothing of Treadle: what is offered is checked here, names, shapes and dtypes against the model's own files, and
every byte of a file against its checksum.
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
from treadle.rollout.engines.server_engine import Ask
from treadle.rollout.engines.sglang_engine.replies import GENERATE, completion_of, request_of
from treadle.rollout.engines.sglang_engine.updates import GroupUpdates, load_folder, load_handles
from treadle.types import Completion, SamplingParams
from treadle.weights import Offer, WeightSpec, check_specs, cuda_ipc, sglang_group
from treadle.weights.whole_offer import expected_specs, opened


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
        self._groups = GroupUpdates()

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
        """Ranks that the server divides its model among; each of them takes part in a broadcast."""
        return (await _division(ask))["tp_size"]

    async def check(self, ask: Ask, offer: Offer, held: ExitStack, seconds: float) -> None:
        if offer.transport == sglang_group.NAME:
            division, refusal = await _division(ask), None
            try:
                await self._check(offer, division)
            except EngineError as error:
                refusal = error  # for which it joins as well: trainer and other servers wait for this one
            await self._groups.join(ask, offer, division["tp_size"], refusal, seconds)
        elif offer.transport == cuda_ipc.NAME:
            await self._check(offer, await _division(ask))
        else:
            await self._check(offer)
            await asyncio.to_thread(held.enter_context, opened(offer, verify=True))

    async def _check(self, offer: Offer, division: Mapping[str, int] | None = None) -> None:
        """Raise `EngineError` where the weights do not fit the model, or can't reach all of this server's ranks."""
        copies = [name for name in ("pp_size", "dp_size") if division is not None and division[name] > 1]
        if copies:
            raise EngineError(
                f"the SGLang server runs with {copies[0]} > 1, and takes weights by {offer.transport} with tp_size alone; "
                "take --weight-transport shm or disk"
            )
        check_specs(offer.specs, await asyncio.to_thread(lambda: self.model.specs))

    async def load(self, ask: Ask, offer: Offer, seconds: float) -> None:
        if offer.transport == sglang_group.NAME:
            await self._groups.load(ask, offer, seconds)
        elif offer.transport == cuda_ipc.NAME:
            await load_handles(ask, offer, await self.num_workers(ask), seconds)
        else:
            await load_folder(ask, offer, seconds)

    def close(self) -> None:
        self._groups.close()


async def _division(ask: Ask) -> dict[str, int]:
    """What the server divides itself into."""
    reply = await ask("/server_info", method="GET")
    try:
        return {name: int(reply[name]) for name in ("tp_size", "pp_size", "dp_size")}
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(f"the SGLang server does not say how it is divided: {str(reply)[:300]}") from error
