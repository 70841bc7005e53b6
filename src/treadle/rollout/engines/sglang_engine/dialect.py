"""The requests of an SGLang server, tokens in and tokens out, and its replies.

The server contains no code of Treadle. Offers are checked here: names, shapes and dtypes against the model's own files,
and every byte of a file against its checksum.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from treadle.errors import EngineError
from treadle.rollout.engines.server_client import Call, ServerClient
from treadle.rollout.engines.server_dialect import Commands, Dialect, Reply, seed_of
from treadle.rollout.engines.sglang_engine.updates import GroupUpdates, load_folder, load_handles
from treadle.types import SamplingParams
from treadle.weights import Offer, WeightSpec, check_specs, cuda_ipc, sglang_group
from treadle.weights.whole_offer import expected_specs, opened

_ASKED_ABORTS = (None, "Aborted", "Abort in waiting queue")
"""What the server says of a request that it was told to end; other messages are failures."""


class SglangDialect(Dialect):
    """The dialect of one server.

    Args:
        folder: the model that the server was started with.
        dtype: what it computes in.
        tied: whether its head is its embeddings.
    """

    commands = Commands(
        generate="/generate",
        ready=Call("/ready", method="GET"),
        health=(Call("/server_info", method="GET"),),  # asks the scheduler; `/health` would generate
        abort=Call("/abort_request", {"abort_all": True}),
        # Requests go back to the queue, where they can be aborted and their keys and values dropped.
        pause=Call("/pause_generation", {"mode": "retract"}),
        resume=Call("/continue_generation", {}),
        sleep=(
            # Returns when the server has no request left: it would die if memory were freed under one.
            Call("/pause_generation", {"mode": "abort"}, slow=True),
            Call("/release_memory_occupation", {"tags": ["kv_cache", "weights"]}, slow=True),
        ),
        wake={
            "weights": Call("/resume_memory_occupation", {"tags": ["weights"]}, slow=True),
            "kv": Call("/resume_memory_occupation", {"tags": ["kv_cache"]}, slow=True),
        },
    )

    def __init__(self, folder: Path, dtype: torch.dtype, tied: bool):
        self.folder, self.dtype, self.tied = folder, dtype, tied
        self._group = GroupUpdates()

    def request_of(
        self, token_ids: Sequence[int], sampling: SamplingParams, index: int, eos_token_ids: Collection[int], name: str
    ) -> dict[str, Any]:
        params: dict[str, Any] = {
            "n": 1,
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "stop": list(sampling.stop),
            "stop_token_ids": sorted({*sampling.stop_token_ids, *eos_token_ids}),
            "ignore_eos": sampling.ignore_eos,  # stop tokens are ignored too; they are looked for in the reply
            "no_stop_trim": True,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
        }
        if sampling.temperature > 0:
            params["sampling_seed"] = seed_of(sampling.seed, index)
        body = {"rid": name, "input_ids": list(token_ids), "sampling_params": params, "return_logprob": True}
        if _is_cut(sampling):
            body["return_sampling_mask"] = True  # with it come the logprobs of the cut distribution
        return body

    def parse(self, reply: Any, sampling: SamplingParams) -> Reply:
        about, tokens = reply["meta_info"], reply["output_ids"] or ()
        entries, finish = about.get("output_token_logprobs") or [], about["finish_reason"]
        logprobs = [entry[0] for entry in entries]
        if _is_cut(sampling) and tokens:
            logprobs = about["output_token_sampling_logprobs"]
        message = finish.get("message")
        return Reply(
            token_ids=tokens,
            logprobs=logprobs,
            logprob_ids=[entry[1] for entry in entries],
            versions=about.get("weight_versions") or [],
            finish=finish["type"],
            matched=finish.get("matched"),
            failure="" if message in _ASKED_ABORTS else str(message),
        )

    def set_version(self, version: int) -> Call:
        return Call("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    def give_up(self, name: str) -> Call:
        return Call("/abort_request", {"rid": name})

    async def num_workers(self, client: ServerClient) -> int:
        return (await client.ask_numbers("/server_info", "tp_size"))["tp_size"]

    @cached_property
    def _specs(self) -> Mapping[str, WeightSpec]:
        return expected_specs(self.folder, self.dtype, self.tied)

    async def check(self, client: ServerClient, offer: Offer, held: ExitStack) -> None:
        by_group, refusal, division = offer.transport == sglang_group.NAME, None, {}
        if by_group or offer.transport == cuda_ipc.NAME:
            division = await client.ask_numbers("/server_info", "tp_size", "pp_size", "dp_size")
        try:
            if copies := [name for name in ("pp_size", "dp_size") if division.get(name, 1) > 1]:
                raise EngineError(
                    f"{client.name} runs with {copies[0]} > 1, and takes weights by {offer.transport} with tp_size alone; "
                    "take --weight-transport shm or disk"
                )
            check_specs(offer.specs, await asyncio.to_thread(lambda: self._specs))
        except EngineError as error:
            if not by_group:
                raise
            refusal = error  # it joins all the same: trainer and other servers wait for this one
        if by_group:
            await self._group.join(client, offer, division["tp_size"], refusal)
        elif not division:
            await asyncio.to_thread(held.enter_context, opened(offer, verify=True))

    async def load(self, client: ServerClient, offer: Offer) -> None:
        if offer.transport == sglang_group.NAME:
            await self._group.load(client, offer)
        elif offer.transport == cuda_ipc.NAME:
            await load_handles(client, offer, await self.num_workers(client))
        else:
            await load_folder(client, offer)

    def close(self) -> None:
        self._group.close()


def _is_cut(sampling: SamplingParams) -> bool:
    cut = sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0
    return cut and sampling.temperature > 0
