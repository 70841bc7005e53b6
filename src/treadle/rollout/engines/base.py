"""The engine seam: what generates samples.

An engine takes token ids and returns token ids, with the logprob and the weight version of every sampled token.
Its methods are async. The caller keeps the deadline of every wait on an engine.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Literal, Protocol

from treadle.errors import EngineError
from treadle.types import Completion, SamplingParams
from treadle.weights import Offer

EnginePart = Literal["weights", "kv"]


class Engine(Protocol):
    """Generates samples with some version of the policy's weights."""

    @property
    def version(self) -> int:
        """Version of the weights that the next token is sampled with; -1 until the engine has the run's weights."""
        ...

    def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, n: int = 1
    ) -> AsyncGenerator[Completion, None]:
        """Continue a prompt n times; yield completions in the order they finish, each with its index.

        Sample `i` depends on the weights, the prompt, `sampling` and `i` only. If matmuls round differently for
        another number of rows (bfloat16), it also depends, through rounding, on what else is running.
        Raises `EngineError` for an empty prompt, n < 1, no new token, or a prompt that leaves no room for the
        response. A caller that stops iterating cancels its request; the others continue.
        """
        ...

    async def receive(self, offer: Offer) -> None:
        """Bring the engine to the offered weights, between two tokens. In-flight requests continue with the new weights.

        Raises `EngineError` if the offer is refused or the update fails. If it failed half-way, in-flight requests are
        aborted and the engine refuses to serve until a complete update has come.
        """
        ...

    async def set_version(self, version: int) -> None:
        """Name the weights that the engine has now."""
        ...

    async def num_receivers(self) -> int:
        """Return the number of processes that receive in a broadcast of weights."""
        ...

    async def abort(self) -> None:
        """End everything in flight: its samples are returned as `Status.ABORTED` with the tokens so far."""
        ...

    async def pause(self) -> None:
        """Stop between two tokens; requests keep their state. Returns when no forward pass is running."""
        ...

    async def resume(self) -> None:
        """Continue after a pause."""
        ...

    async def sleep(self) -> None:
        """Free the memory of keys and values, and of weights that the engine owns; nothing may be in flight."""
        ...

    async def wake(self, part: EnginePart) -> None:
        """Restore what `sleep` freed, weights first, then keys and values."""
        ...

    async def health(self) -> None:
        """Return if the engine can serve; raise `EngineError` with the cause if not."""
        ...

    async def close(self) -> None:
        """End the engine and free everything; in-flight requests are aborted."""
        ...


def check_request(token_ids: Sequence[int], sampling: SamplingParams, n: int, max_length: int) -> None:
    """Raise `EngineError` for a request that no engine of this context length can serve."""
    if not token_ids or n < 1 or sampling.max_new_tokens < 1:
        raise EngineError(
            "a request needs at least one token of prompt, one new token and n ≥ 1, "
            f"got {len(token_ids)} tokens, {sampling.max_new_tokens} new and n={n}"
        )
    if len(token_ids) + sampling.max_new_tokens > max_length:
        raise EngineError(
            f"a prompt of {len(token_ids)} tokens and {sampling.max_new_tokens} new ones do not fit the model's "
            f"context of {max_length}; lower --rollout-max-prompt-len or --rollout-max-response-len"
        )
