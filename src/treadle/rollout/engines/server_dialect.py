"""What differs between kinds of servers: their requests, and how their replies read."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from treadle.errors import EngineError
from treadle.rollout.engines.base import EnginePart
from treadle.rollout.engines.server_client import Call, ServerClient
from treadle.types import Completion, SamplingParams, Status
from treadle.weights import Offer


@dataclass(frozen=True)
class Commands:
    """The requests that a server of one kind understands; those of a tuple are sent in order.

    `generate` is the path for one sample. `ready` answers once the server serves, `health` only if its scheduler works.
    `pause` stops between two tokens, and paused requests can be aborted. `abort` ends every request that the server knows.
    `sleep` frees weights, keys and values.
    """

    generate: str
    ready: Call
    health: tuple[Call, ...]
    abort: Call
    pause: Call
    resume: Call
    sleep: tuple[Call, ...]
    wake: Mapping[EnginePart, Call]


@dataclass(frozen=True)
class Reply:
    """One sample as a server reports it.

    `logprob_ids` are the tokens that the logprobs belong to, `versions` spans `{version, start, end}` of tokens. `finish`
    is stop, length or abort; `matched` is the stop string or token. A `failure` says why an abort was not asked for.
    """

    token_ids: Sequence[Any]
    logprobs: Sequence[Any]
    logprob_ids: Sequence[Any]
    versions: Sequence[Mapping[str, Any]]
    finish: str
    matched: Any
    failure: str = ""


class Dialect(Protocol):
    """One kind of server. Methods that ask it raise `EngineError` if it refuses."""

    @property
    def commands(self) -> Commands: ...

    def request_of(
        self, token_ids: Sequence[int], sampling: SamplingParams, index: int, eos_token_ids: Collection[int], name: str
    ) -> dict[str, Any]:
        """Return the body of the request for sample `index`; `name` identifies the request."""
        ...

    def parse(self, reply: Any, sampling: SamplingParams) -> Reply:
        """Read a reply; any `LookupError`, `TypeError`, `ValueError` or `AttributeError` means that it is malformed."""
        ...

    def set_version(self, version: int) -> Call:
        """Return the request that names the weights of the server."""
        ...

    def give_up(self, name: str) -> Call | None:
        """Return the request that ends a request whose caller left, if closing its connection does not end it."""
        return None

    async def num_workers(self, client: ServerClient) -> int:
        """Return the number of ranks that the server is in a broadcast of weights."""
        ...

    async def check(self, client: ServerClient, offer: Offer, held: ExitStack) -> None:
        """Raise `EngineError` if the server can't load the offer; nothing has changed then.

        What must stay until the weights are loaded goes into `held`.
        """
        ...

    async def load(self, client: ServerClient, offer: Offer) -> None:
        """Load the checked offer and drop all keys and values. If this fails, the model may hold a mixture of weights."""
        ...

    def close(self) -> None:
        """Free what was kept between updates."""
        return


def completion_of(
    dialect: Dialect, reply: Any, index: int, sampling: SamplingParams, eos_token_ids: Collection[int], engine: str
) -> Completion:
    """Return the completion in a reply; raises `EngineError` that says what is wrong with it."""
    try:
        said = dialect.parse(reply, sampling)
        tokens = np.array([int(token) for token in said.token_ids], dtype=np.int32)
        logprobs = np.array([float(logprob) for logprob in said.logprobs], dtype=np.float32)
        logprob_ids = [int(token) for token in said.logprob_ids]
        versions = np.full(len(tokens), -2, dtype=np.int32)
        for span in said.versions:
            versions[int(span["start"]) : int(span["end"])] = int(span["version"])
        if (versions == -2).any():
            raise ValueError(f"weight versions {list(said.versions)} do not cover {len(tokens)} tokens")
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise EngineError(f"{engine} answered with a malformed reply ({error!r}): {str(reply)[:300]}") from error
    if logprob_ids != tokens.tolist() or len(logprobs) != len(tokens):
        raise EngineError(f"{engine} answered {len(tokens)} tokens with logprobs of {len(logprobs)} or of other ones")
    if not np.isfinite(logprobs).all():
        raise EngineError(f"{engine} answered with logprobs that are no numbers")
    found = Completion(index, tokens, logprobs, versions, *_ending(said, eos_token_ids, engine))
    return _cut_at_stop_token(found, sampling.stop_token_ids) if sampling.ignore_eos else found


def _ending(said: Reply, eos_token_ids: Collection[int], engine: str) -> tuple[Status, str]:
    """Return status and stop reason as the torch engine gives them."""
    if said.finish not in ("stop", "length", "abort") or said.failure:
        raise EngineError(
            f"{engine} ended a sample with {said.finish!r}: {said.failure or said.matched}; see the server's log"
        )
    if said.finish == "length":
        return Status.TRUNCATED, "length"
    if said.finish == "abort":
        return Status.ABORTED, "abort"
    if isinstance(said.matched, str):
        return Status.COMPLETED, f"stop string {said.matched!r}"
    if said.matched is None or said.matched in eos_token_ids:
        return Status.COMPLETED, "eos"
    return Status.COMPLETED, f"stop token {said.matched}"


def _cut_at_stop_token(found: Completion, stop_token_ids: Sequence[int]) -> Completion:
    """Return the sample up to its first stop token: a server that ignores the eos may ignore stop tokens as well."""
    (at,) = np.nonzero(np.isin(found.token_ids, stop_token_ids))
    if not len(at):
        return found
    kept = slice(0, int(at[0]) + 1)
    return replace(
        found,
        token_ids=found.token_ids[kept],
        logprobs=found.logprobs[kept],
        weight_versions=found.weight_versions[kept],
        status=Status.COMPLETED,
        stop_reason=f"stop token {found.token_ids[at[0]]}",
    )


def seed_of(seed: int, index: int) -> int:
    """Return the seed of sample `index` of a request, for servers that accept one."""
    return (seed + index * 0x9E3779B97F4A7C15) % 2**63
