"""The turns of the model and of its environment as one trajectory: one sample, or several if the context starts fresh."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from treadle.chat import Codec
from treadle.errors import TreadleError
from treadle.registry import describe_error
from treadle.rollout.engines.base import Engine
from treadle.rollout.envs import Environment, Opening, Step
from treadle.rollout.isolation.fault import CallFault
from treadle.rollout.rewards.inputs import RewardScore
from treadle.rollout.trajectory import Trajectory, failed
from treadle.types import Completion, Message, Prompt, Sample, SamplingParams, Status

ENVIRONMENT_REWARD = "env"
"""Name of the environment's reward among the parts of a sample's reward."""


class SingleTurn:
    """The trivial environment, and its trivial episode: the model has one turn."""

    opens = keeps_state = False

    def episode(self) -> SingleTurn:
        return self

    async def resumed(self, prompt: Prompt, turns: Sequence[str]) -> SingleTurn:
        return self

    async def open(self, prompt: Prompt) -> Opening:
        return Opening()

    async def step(self, turn: str) -> Step:
        return Step()

    async def close(self) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class TurnLimits:
    """How long a conversation may be; `max_length` is the model's context in tokens."""

    max_turns: int
    max_length: int


ONE_TURN = TurnLimits(1, 1 << 30)
"""No bound but the sampling's own."""


@dataclass(frozen=True)
class Table:
    """What the conversations of a run share."""

    engine: Engine
    codec: Codec
    environment: Environment
    limits: TurnLimits


class Conversation:
    """One sample of a prompt: its episode, from `open` to the end.

    `sampling.max_new_tokens` bounds what is sampled over all turns. A turn that did not end by itself ends the sample, with
    its status. A limit ends it as truncated.
    """

    def __init__(self, shared: Table, prompt: Prompt, index: int, sampling: SamplingParams):
        self._shared, self._index, self._sampling = shared, index, sampling
        self._episode = shared.environment.episode()
        self.prompt = prompt
        self.failure = ""
        """Why the episode did not open, if it did not."""
        self._decoded: tuple[list[int], str] = ([], "")

    async def open(self) -> None:
        """Have the episode begin; `prompt` is then what the model reads first."""
        try:
            opening = await self._episode.open(self.prompt)
            messages = self.prompt.messages if opening.messages is None else opening.messages
            if opening.messages is None and opening.tools is None:
                return
            if messages is None:
                raise CallFault("opened with tools, but the prompt is text; open with messages too")
            text = self._shared.codec.render_messages(messages, opening.tools)
            tokens = tuple(self._shared.codec.encode_rendered(text))
            room = self._shared.limits.max_length - len(tokens)
            if room < 1:
                raise CallFault(
                    f"opened with {len(tokens)} tokens, which leave the model's context no room for an answer"
                )
            self._sampling = replace(self._sampling, max_new_tokens=min(self._sampling.max_new_tokens, room))
            self.prompt = replace(self.prompt, token_ids=tokens, text=text, messages=tuple(messages))
        except Exception as error:  # an environment is the user's code: it may raise or return anything
            self.failure = _why(error)

    @property
    def first_sampling(self) -> SamplingParams:
        """The sampling of the first turn of this sample and of those of higher index that have the same prompt."""
        return self._of_turn(self._sampling, 0)

    async def finish(self, first: Completion | None) -> list[Sample]:
        """Play the episode to its end and return the samples of its trajectory, the last one with the episode's reward.

        `first` is the model's first turn, None if the episode did not open.
        """
        trajectory = Trajectory(self.prompt, self._index, self._sampling.temperature)
        try:
            if first is None:
                return [failed(trajectory.finish(Status.FAILED, ""), self.failure)]
            return await self._play(trajectory, first)
        finally:
            await self._episode.close()

    async def _play(self, trajectory: Trajectory, completion: Completion) -> list[Sample]:
        done: list[Sample] = []
        turns, score = 0, None
        while True:
            trajectory.add_sampled(completion)
            turns, status = turns + 1, completion.status
            if status is not Status.COMPLETED:
                break
            text = self._text(completion.token_ids.tolist())
            try:
                step = await self._episode.step(text)
                given = None if step.reply is None else self._tokens(step, completion)
            except Exception as error:
                return [failed(sample, _why(error)) for sample in (*done, self._sample(trajectory, Status.FAILED))]
            if given is None:
                score = step.reward
                break
            sampled = trajectory.num_sampled + sum(sample.response_length for sample in done)
            held = 0 if step.fresh else len(trajectory.token_ids)
            left = min(self._sampling.max_new_tokens - sampled, self._shared.limits.max_length - held - len(given))
            if left < 1 or turns >= self._shared.limits.max_turns:  # the reply would have no answer: it is left out
                status = Status.TRUNCATED
                break
            if step.fresh:
                done.append(self._sample(trajectory, Status.COMPLETED))
                trajectory = Trajectory(
                    replace(self.prompt, token_ids=tuple(given)), self._index, trajectory.temperature
                )
            else:
                trajectory.add_given(given)
            completion = await self._turn(trajectory, replace(self._sampling, max_new_tokens=left), turns)
        return [*done, _rewarded(self._sample(trajectory, status), score)]

    def _tokens(self, step: Step, turn: Completion) -> list[int]:
        codec, reply = self._shared.codec, step.reply
        if isinstance(reply, str):
            return codec.encode_rendered(reply)
        messages: Sequence[Message] = reply or ()
        return (
            codec.encode_rendered(codec.render_messages(messages))
            if step.fresh
            else codec.encode_reply(turn.token_ids.tolist(), messages)
        )

    async def _turn(self, trajectory: Trajectory, sampling: SamplingParams, turn: int) -> Completion:
        own = self._of_turn(sampling, turn)
        async with aclosing(self._shared.engine.generate(trajectory.token_ids, own, 1)) as completions:
            return await anext(completions)

    def _of_turn(self, sampling: SamplingParams, turn: int) -> SamplingParams:
        return replace(sampling, seed=sampling.seed + 1_000_003 * turn + self._index)

    def _sample(self, trajectory: Trajectory, status: Status) -> Sample:
        said = trajectory.token_ids[len(trajectory.prompt.token_ids) :]
        return trajectory.finish(status, self._text(said))

    def _text(self, token_ids: list[int]) -> str:
        """Return the text of a response; that of the only turn, which the episode has just read, is not decoded again."""
        if token_ids != self._decoded[0]:
            text = self._shared.codec.response_text(token_ids, self._sampling.stop_token_ids)
            self._decoded = token_ids, text
        return self._decoded[1]


def _why(error: Exception) -> str:
    return f"environment: {str(error) if isinstance(error, CallFault | TreadleError) else describe_error(error)}"


def _rewarded(sample: Sample, score: object) -> Sample:
    if not isinstance(score, RewardScore):
        return sample
    parts = {f"{ENVIRONMENT_REWARD}.{name}": value for name, value in score.parts.items()}
    return replace(sample, reward=score.value, reward_parts={ENVIRONMENT_REWARD: score.value, **parts})
