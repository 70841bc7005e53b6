"""Requests of vLLM's token-in, token-out endpoint, and its replies as completions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from treadle.errors import EngineError
from treadle.rollout.engines.reply_parts import checked_completion, seed_of, versions_of
from treadle.types import Completion, SamplingParams, Status

GENERATE = "/inference/v1/generate"


def request_of(
    token_ids: Sequence[int], sampling: SamplingParams, index: int, eos_token_ids: Collection[int], *, seeded: bool
) -> dict[str, Any]:
    """The body for sample `index` of a request. What ends it is said in full, so the server's own settings don't matter."""
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
        "ignore_eos": True,  # the ends above are all there are
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "detokenize": bool(sampling.stop),
        "logprobs": 0,  # of the sampled token alone
    }
    if seeded and sampling.temperature > 0:
        params["seed"] = seed_of(sampling.seed, index)
    return {"token_ids": list(token_ids), "sampling_params": params, "stream": False}


def completion_of(reply: Any, index: int, eos_token_ids: Collection[int], engine: str) -> Completion:
    """The one completion of a reply; raises `EngineError` naming what is wrong with it."""
    try:
        (choice,) = reply["choices"]
        tokens = [int(token) for token in choice["token_ids"] or ()]
        content = (choice.get("logprobs") or {}).get("content") or []
        logprobs = np.array([float(entry["logprob"]) for entry in content], dtype=np.float32)
        named = [int(entry["token_id"]) for entry in content]
        versions = versions_of(choice.get("weight_versions") or [], len(tokens))
        finish, reason = choice["finish_reason"], choice.get("stop_reason")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise EngineError(f"{engine} answered with a malformed reply ({error!r}): {str(reply)[:300]}") from error
    status, said = ending_of(finish, reason, eos_token_ids, engine)
    found = Completion(index, np.array(tokens, dtype=np.int32), logprobs, versions, status, said)
    return checked_completion(found, named, engine)


def ending_of(finish: str, reason: Any, eos_token_ids: Collection[int], engine: str) -> tuple[Status, str]:
    """Status and stop reason, in Treadle's words."""
    if finish == "length":
        return Status.TRUNCATED, "length"
    if finish == "abort":
        return Status.ABORTED, "abort"
    if finish != "stop":
        raise EngineError(f"{engine} ended a sample with {finish!r} ({reason!r}); see its log")
    if isinstance(reason, str):
        return Status.COMPLETED, f"stop string {reason!r}"
    if reason is None or reason in eos_token_ids:
        return Status.COMPLETED, "eos"
    return Status.COMPLETED, f"stop token {reason}"
