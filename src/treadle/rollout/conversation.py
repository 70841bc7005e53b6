"""Several turns of model and environment as one trajectory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from treadle.chat import Codec
from treadle.errors import TreadleError
from treadle.registry import describe_error
from treadle.rollout.engines.base import Engine
from treadle.rollout.envs import Environment, read_reply
from treadle.rollout.isolation.fault import CallFault
from treadle.rollout.trajectory import Trajectory, failed
from treadle.types import Completion, Message, Sample, SamplingParams, Status


@dataclass(frozen=True)
class TurnLimits:
    """How long a conversation may be; `max_length` is the model's context in tokens."""

    max_turns: int
    max_length: int


class Conversation:
    """Lets an environment answer until it, the model or a limit ends the sample."""

    def __init__(self, engine: Engine, codec: Codec, environment: Environment, limits: TurnLimits):
        self.engine, self.codec, self.environment, self.limits = engine, codec, environment, limits

    async def finish(self, trajectory: Trajectory, first: Completion, sampling: SamplingParams) -> Sample:
        """Go on from the model's first turn; `sampling.max_new_tokens` bounds what is sampled over all turns.

        A turn that did not end by itself ends the sample, with its status. So do the limits: the sample is truncated.
        """
        turns = [self.codec.response_text(first.token_ids, sampling.stop_token_ids)]
        trajectory.add_sampled(first)
        completion, status = first, first.status
        while status is Status.COMPLETED:
            try:
                reply = read_reply(await self.environment.reply(trajectory.prompt, tuple(turns)))
                given = None if reply is None else self._tokens(reply, completion)
            except Exception as error:  # an environment is the user's code: it may raise or return anything
                why = str(error) if isinstance(error, CallFault | TreadleError) else describe_error(error)
                return failed(self._sample(trajectory, Status.FAILED, sampling), f"environment: {why}")
            if given is None:
                break
            left = sampling.max_new_tokens - trajectory.num_sampled
            left = min(left, self.limits.max_length - len(trajectory.token_ids) - len(given))
            if left < 1 or len(turns) >= self.limits.max_turns:  # the reply would have no answer: it is left out
                status = Status.TRUNCATED
                break
            trajectory.add_given(given)
            completion = await self._next_turn(trajectory, replace(sampling, max_new_tokens=left), len(turns))
            turns.append(self.codec.response_text(completion.token_ids, sampling.stop_token_ids))
            status = completion.status
        return self._sample(trajectory, status, sampling)

    def _tokens(self, reply: str | Sequence[Message], turn: Completion) -> list[int]:
        if isinstance(reply, str):
            return self.codec.encode_rendered(reply)
        return self.codec.encode_reply(turn.token_ids, reply)

    async def _next_turn(self, trajectory: Trajectory, sampling: SamplingParams, turn: int) -> Completion:
        own = replace(sampling, seed=sampling.seed + 1_000_003 * turn + trajectory.index)
        async with aclosing(self.engine.generate(trajectory.token_ids, own, 1)) as completions:
            completion = await anext(completions)
        trajectory.add_sampled(completion)
        return completion

    def _sample(self, trajectory: Trajectory, status: Status, sampling: SamplingParams) -> Sample:
        said = trajectory.token_ids[len(trajectory.prompt.token_ids) :]
        text = self.codec.response_text(said, sampling.stop_token_ids)
        return trajectory.finish(status, text)
