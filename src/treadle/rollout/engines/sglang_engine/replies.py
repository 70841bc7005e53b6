"""Requests of SGLang's own endpoint `/generate`, token ids in and out, and its replies as completions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from treadle.errors import EngineError
from treadle.rollout.engines.reply_parts import checked_completion, seed_of, versions_of
from treadle.types import Completion, SamplingParams, Status

GENERATE = "/generate"
_ASKED_ABORTS = ("Aborted", "Abort in waiting queue")
"""What the server says of a request that it was told to end; other messages are failures."""


def request_of(
    token_ids: Sequence[int], sampling: SamplingParams, index: int, eos_token_ids: Collection[int], name: str
) -> dict[str, Any]:
    """The body for sample `index` of a request.

    With `ignore_eos` SGLang ignores stop tokens as well: they are looked for in the reply then.
    """
    ends = set(sampling.stop_token_ids) | set(eos_token_ids)
    params: dict[str, Any] = {
        "n": 1,
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "stop": list(sampling.stop),
        "stop_token_ids": sorted(ends),
        "ignore_eos": sampling.ignore_eos,
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }
    if sampling.temperature > 0:
        params["sampling_seed"] = seed_of(sampling.seed, index)
    body = {"rid": name, "input_ids": list(token_ids), "sampling_params": params, "return_logprob": True}
    if _is_cut(sampling):
        body["return_sampling_mask"] = True  # with it come logprobs of what the cut leaves
    return body


def _is_cut(sampling: SamplingParams) -> bool:
    cut = sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0
    return cut and sampling.temperature > 0


def completion_of(
    reply: Any, index: int, sampling: SamplingParams, eos_token_ids: Collection[int], engine: str
) -> Completion:
    """The completion of a reply; raises `EngineError` naming what is wrong with it."""
    try:
        about = reply["meta_info"]
        tokens = [int(token) for token in reply["output_ids"] or ()]
        entries = about.get("output_token_logprobs") or []
        logprobs = np.array([float(entry[0]) for entry in entries], dtype=np.float32)
        named = [int(entry[1]) for entry in entries]
        if _is_cut(sampling) and tokens:
            logprobs = np.array([float(value) for value in about["output_token_sampling_logprobs"]], dtype=np.float32)
        versions = versions_of(about.get("weight_versions") or [], len(tokens))
        finish = about["finish_reason"]
        status, said = _ending_of(finish["type"], finish, eos_token_ids, engine)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise EngineError(f"{engine} answered with a malformed reply ({error!r}): {str(reply)[:300]}") from error
    found = checked_completion(
        Completion(index, np.array(tokens, dtype=np.int32), logprobs, versions, status, said), named, engine
    )
    return _cut_at_stop_tokens(found, sampling.stop_token_ids) if sampling.ignore_eos else found


def _ending_of(kind: str, finish: dict[str, Any], eos_token_ids: Collection[int], engine: str) -> tuple[Status, str]:
    """Status and stop reason, in Treadle's words."""
    if kind == "length":
        return Status.TRUNCATED, "length"
    if kind == "abort" and finish.get("message") in (None, *_ASKED_ABORTS):
        return Status.ABORTED, "abort"
    if kind != "stop":
        raise EngineError(f"{engine} ended a sample with {kind!r}: {finish.get('message')}")
    matched = finish.get("matched")
    if isinstance(matched, str):
        return Status.COMPLETED, f"stop string {matched!r}"
    if matched is None or matched in eos_token_ids:
        return Status.COMPLETED, "eos"
    return Status.COMPLETED, f"stop token {matched}"


def _cut_at_stop_tokens(found: Completion, stop_token_ids: Sequence[int]) -> Completion:
    """The sample up to its first stop token, where there is one."""
    (at,) = np.nonzero(np.isin(found.token_ids, stop_token_ids))
    if not len(at):
        return found
    end = int(at[0]) + 1
    return Completion(
        found.index,
        found.token_ids[:end],
        found.logprobs[:end],
        found.weight_versions[:end],
        Status.COMPLETED,
        f"stop token {found.token_ids[end - 1]}",
    )
