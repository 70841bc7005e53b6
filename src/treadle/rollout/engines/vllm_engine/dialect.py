"""The requests of a vLLM server, tokens in and tokens out, and its replies."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from treadle.errors import EngineError
from treadle.rollout.engines.server_client import Call, ServerClient
from treadle.rollout.engines.server_dialect import Commands, Dialect, Reply, seed_of
from treadle.types import SamplingParams
from treadle.weights import Offer

_COMMANDS = Commands(
    generate="/inference/v1/generate",
    ready=Call("/health", method="GET"),
    health=(Call("/health", method="GET"), Call("/is_paused", method="GET")),  # `/health` does not ask the scheduler
    abort=Call("/abort_requests", {}),
    pause=Call("/pause", params={"mode": "keep", "clear_cache": "false"}),
    resume=Call("/resume"),
    sleep=(Call("/sleep", params={"level": 1}, slow=True),),
    wake={
        "weights": Call("/wake_up", params={"tags": "weights"}, slow=True),
        "kv": Call("/wake_up", params={"tags": "kv_cache"}, slow=True),
    },
)


@dataclass(frozen=True)
class VllmDialect(Dialect):
    """`seeded`: the server can draw each sample from a seed of its own, which its CPU build can't."""

    seeded: bool = False
    commands: Commands = _COMMANDS

    def request_of(
        self, token_ids: Sequence[int], sampling: SamplingParams, index: int, eos_token_ids: Collection[int], name: str
    ) -> dict[str, Any]:
        ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(eos_token_ids))
        params: dict[str, Any] = {
            "n": 1,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "stop": list(sampling.stop),
            "stop_token_ids": sorted(ends),
            "ignore_eos": True,  # `ends` are all there are, whatever the server's own settings
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "detokenize": bool(sampling.stop),
            "logprobs": 0,  # of the sampled token alone
        }
        if self.seeded and sampling.temperature > 0:
            params["seed"] = seed_of(sampling.seed, index)
        return {"token_ids": list(token_ids), "sampling_params": params, "stream": False}

    def parse(self, reply: Any, sampling: SamplingParams) -> Reply:
        (choice,) = reply["choices"]
        content = (choice.get("logprobs") or {}).get("content") or []
        return Reply(
            token_ids=choice["token_ids"] or (),
            logprobs=[entry["logprob"] for entry in content],
            logprob_ids=[entry["token_id"] for entry in content],
            versions=choice.get("weight_versions") or [],
            finish=choice["finish_reason"],
            matched=choice.get("stop_reason"),
        )

    def set_version(self, version: int) -> Call:
        return Call("/update_weight_version", {"new_version": str(version)})

    async def num_workers(self, client: ServerClient) -> int:
        return (await client.ask_numbers("/get_world_size", "world_size"))["world_size"]

    async def check(self, client: ServerClient, offer: Offer, held: ExitStack) -> None:
        """Treadle's plugin in the server checks, in every worker its own part."""
        await client.ask(Call("/start_weight_update", slow=True))
        update = {"offer": offer.to_json(), "check_only": True}
        await client.ask(Call("/update_weights", {"update_info": update}, slow=True))

    async def load(self, client: ServerClient, offer: Offer) -> None:
        await client.ask(Call("/update_weights", {"update_info": {"offer": offer.to_json()}}, slow=True))
        await client.ask(Call("/finish_weight_update", {"weight_version": str(offer.version)}, slow=True))
        reply = await client.ask(Call("/reset_prefix_cache", params={"reset_running_requests": "true"}))
        if not (reply or {}).get("success"):
            raise EngineError(f"{client.name} can't drop keys and values of the old weights")
