"""What a vLLM server is asked, beside its token-in, token-out endpoint (replies.py)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from treadle.errors import EngineError
from treadle.rollout.engines.base import EnginePart
from treadle.rollout.engines.server_engine import Ask
from treadle.rollout.engines.vllm_engine.replies import GENERATE, completion_of, request_of
from treadle.types import Completion, SamplingParams
from treadle.weights import Offer

_STOP = {"mode": "keep", "clear_cache": "false"}


@dataclass(frozen=True)
class VllmDialect:
    """`seeded`: the server can draw each sample from a seed of its own (its CPU build can't)."""

    seeded: bool = False
    generate_path: str = GENERATE
    ready_path: str = "/health"

    def request_of(
        self, token_ids: Sequence[int], sampling: SamplingParams, index: int, eos_token_ids: Collection[int], name: str
    ) -> dict[str, Any]:
        return request_of(token_ids, sampling, index, eos_token_ids, seeded=self.seeded)

    def completion_of(
        self, reply: Any, index: int, sampling: SamplingParams, eos_token_ids: Collection[int], engine: str
    ) -> Completion:
        return completion_of(reply, index, eos_token_ids, engine)

    async def give_up(self, ask: Ask, name: str) -> None:
        """Nothing to do: a request whose connection is closed is given up by the server."""

    async def abort(self, ask: Ask) -> None:
        await ask("/abort_requests", {})

    async def pause(self, ask: Ask) -> None:
        await ask("/pause", params=_STOP)

    async def resume(self, ask: Ask) -> None:
        await ask("/resume")

    async def sleep(self, ask: Ask, seconds: float) -> None:
        await ask("/sleep", params={"level": 1}, seconds=seconds)

    async def wake(self, ask: Ask, part: EnginePart, seconds: float) -> None:
        await ask("/wake_up", params={"tags": "kv_cache" if part == "kv" else part}, seconds=seconds)

    async def set_version(self, ask: Ask, version: int) -> None:
        await ask("/update_weight_version", {"new_version": str(version)})

    async def health(self, ask: Ask) -> None:
        await ask("/health", method="GET")
        await ask("/is_paused", method="GET")  # goes through to the scheduler, which `/health` does not ask

    async def num_workers(self, ask: Ask) -> int:
        """Processes that the server divides its model among; each of them receives weights."""
        reply = await ask("/get_world_size", method="GET")
        try:
            return int((reply or {})["world_size"])
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"the vLLM server does not say how many workers it has: {reply}") from error

    async def check(self, ask: Ask, offer: Offer, held: ExitStack, seconds: float) -> None:
        """Treadle's plugin in the server checks, in every worker its own part."""
        await ask("/start_weight_update", seconds=seconds)
        update = {"offer": offer.to_json(), "check_only": True}
        await ask("/update_weights", {"update_info": update}, seconds=seconds)

    async def load(self, ask: Ask, offer: Offer, seconds: float) -> None:
        await ask("/update_weights", {"update_info": {"offer": offer.to_json()}}, seconds=seconds)
        await ask("/finish_weight_update", {"weight_version": str(offer.version)}, seconds=seconds)
        reply = await ask("/reset_prefix_cache", params={"reset_running_requests": "true"})
        if not (reply or {}).get("success"):
            raise EngineError("the vLLM server can't let go of keys and values of the old weights")

    def close(self) -> None:
        """Nothing is kept."""
