"""The seam between rollouts and whatever generates.

An engine takes token ids and gives token ids back, with the logprob and the weight version of every sampled token.
Its side of the loop is async; a wait on an engine always has a deadline, kept by the caller.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Literal, Protocol

from treadle.errors import EngineError
from treadle.types import Completion, SamplingParams

EnginePart = Literal["weights", "kv"]


class Engine(Protocol):
    """Generates samples with some version of the policy's weights."""

    @property
    def version(self) -> int:
        """Version of the weights that the next token is sampled with."""
        ...

    def generate(self, token_ids: Sequence[int], sampling: SamplingParams, n: int = 1) -> AsyncIterator[Completion]:
        """Continue a prompt n times; completions come in the order they finish, each with its index.

        Sample `i` depends on the weights, the prompt, `sampling` and `i` only; where matmuls round differently for
        another number of rows (bfloat16) also, by rounding, on what else is running.
        Raises `EngineError` for an empty prompt, n < 1, no new token, or a prompt that leaves no room for the
        response. A caller that stops iterating (cancelled, say) gives its request up; the others go on.
        """
        ...

    async def abort(self) -> None:
        """End everything in flight: its samples are returned as `Status.ABORTED` with the tokens so far."""
        ...

    async def pause(self) -> None:
        """Stop between two tokens; requests keep their state. Returns when no forward pass is running."""
        ...

    async def resume(self) -> None:
        """Go on after a pause."""
        ...

    async def sleep(self) -> None:
        """Free the memory of keys and values (and of weights the engine owns); nothing may be in flight."""
        ...

    async def wake(self, part: EnginePart) -> None:
        """Bring back what `sleep` freed, weights first, then keys and values."""
        ...

    async def health(self) -> None:
        """Return if the engine can serve; raise `EngineError` with the cause if not."""
        ...

    async def close(self) -> None:
        """End the engine and free everything; requests in flight are aborted."""
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
