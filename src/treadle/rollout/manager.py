"""Prompts to scored groups: how many are in flight, their deadline, and what happens if something fails."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from treadle.chat import Codec
from treadle.errors import DeadlineError
from treadle.rollout.conversation import ONE_TURN, Conversation, SingleTurn, Table, TurnLimits
from treadle.rollout.engines.base import Engine
from treadle.rollout.envs import Environment
from treadle.rollout.rewards import RewardScorer
from treadle.rollout.rewards.scorer import GroupScoring
from treadle.rollout.trajectory import failed
from treadle.types import Completion, Group, Prompt, Sample, SamplingParams, Status

OnSample = Callable[[int, int], None]
"""Called with how many samples are done and how many there will be."""


@dataclass(frozen=True)
class Collect:
    """One batch of prompts to turn into groups; `what` names it in messages, `seed` makes its samples."""

    what: str
    prompts: Sequence[Prompt]
    sampling: SamplingParams
    n: int
    seed: int


class RolloutManager:
    """Runs prompts through an engine and scores samples as they finish."""

    def __init__(
        self,
        engine: Engine,
        codec: Codec,
        *,
        timeout_seconds: float,
        max_concurrent_prompts: int | None = None,
        environment: Environment | None = None,
        limits: TurnLimits = ONE_TURN,
    ):
        self.engine, self.codec = engine, codec
        self.timeout_seconds = timeout_seconds
        self.max_concurrent_prompts = max_concurrent_prompts
        self._shared = Table(engine, codec, environment or SingleTurn(), limits)

    async def collect(self, job: Collect, scorer: RewardScorer, on_sample: OnSample | None = None) -> list[Group]:
        """Generate and score n samples of every prompt; return groups in the order of the prompts.

        Raises `DeadlineError`, which says what is missing, after the rollout's deadline, and `EngineError` if the engine
        fails. A reward or an environment that fails marks its sample only.
        """
        total = len(job.prompts) * job.n
        done = 0

        def count() -> None:
            nonlocal done
            done += 1
            if on_sample is not None:
                on_sample(done, total)

        slots = asyncio.Semaphore(self.max_concurrent_prompts or max(1, len(job.prompts)))
        tasks = [asyncio.create_task(self._group(job, prompt, scorer, slots, count)) for prompt in job.prompts]
        try:
            _, missing = await asyncio.wait(tasks, timeout=self.timeout_seconds, return_when=asyncio.FIRST_EXCEPTION)
            for task in tasks:
                if task.done():
                    task.result()
            if missing:
                raise DeadlineError(
                    f"{job.what}: waited {self.timeout_seconds:g} s for {total} samples and {total - done} are missing; "
                    "raise --rollout-timeout-seconds"
                )
            return [task.result() for task in tasks]
        except BaseException:
            for task in tasks:
                task.cancel()
            await self.engine.abort()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def _group(
        self, job: Collect, prompt: Prompt, scorer: RewardScorer, slots: asyncio.Semaphore, count: Callable[[], None]
    ) -> Group:
        sampling = replace(job.sampling, seed=prompt_seed(job.seed, prompt))
        scoring = scorer.open_group(prompt, job.n)
        plays = [Conversation(self._shared, prompt, index, sampling) for index in range(job.n)]
        begins: list[asyncio.Task[None]] = []
        tasks: list[asyncio.Task[list[Sample]]] = []

        def start(play: Conversation, first: Completion | None) -> None:
            tasks.append(asyncio.create_task(self._finish(play, first, scoring, count)))

        async def begin(alike: Sequence[Conversation]) -> None:
            token_ids, sampling = alike[0].prompt.token_ids, alike[0].first_sampling
            async with aclosing(self.engine.generate(token_ids, sampling, len(alike))) as completions:
                async for completion in completions:
                    start(alike[completion.index], completion)

        try:
            async with slots:
                await self._open(plays)
                alike: dict[tuple[int, ...], list[Conversation]] = {}  # by prompt: an episode may open with its own
                for play in plays:
                    if play.failure:
                        start(play, None)
                    else:
                        alike.setdefault(play.prompt.token_ids, []).append(play)
                begins += [asyncio.create_task(begin(same)) for same in alike.values()]
                await asyncio.gather(*begins)
            trajectories = await asyncio.gather(*tasks)
        except BaseException:
            for task in (*begins, *tasks):
                task.cancel()
            raise
        samples = [sample for trajectory in trajectories for sample in trajectory]
        return Group(prompt, tuple(sorted(samples, key=lambda s: s.index)))

    async def _open(self, plays: Sequence[Conversation]) -> None:
        """Begin the episodes of a group, side by side if that takes time."""
        if self._shared.environment.opens:
            await asyncio.gather(*(play.open() for play in plays))
            return
        for play in plays:
            await play.open()

    async def _finish(
        self, play: Conversation, first: Completion | None, scoring: GroupScoring, count: Callable[[], None]
    ) -> list[Sample]:
        """Play a sample to its end and score it; all samples of its trajectory get the reward of the last one.

        A server may sample an id that stands for no token, from padding of the model's embeddings: such a sample fails.
        """
        *earlier, last = [self._checked(sample) for sample in await play.finish(first)]
        broken = next((sample for sample in earlier if sample.status is Status.FAILED), None)
        if broken is not None and last.status is not Status.FAILED:
            last = failed(last, broken.failure)
        last = await scoring.score(last)
        count()
        if last.status is Status.FAILED:
            return [*(failed(sample, last.failure) for sample in earlier), last]
        return [*(replace(s, reward=last.reward, reward_parts=last.reward_parts) for s in earlier), last]

    def _checked(self, sample: Sample) -> Sample:
        strangers = self.codec.strangers(sample.token_ids[sample.loss_mask])
        if not len(strangers):
            return sample
        return failed(sample, f"the engine sampled id {strangers[0]}, which is no token of the tokenizer")


def prompt_seed(seed: int, prompt: Prompt) -> int:
    """Return the seed of a prompt's samples: the same for the same run seed and draw, whatever else runs."""
    text = f"{seed}:{prompt.data_name}:{prompt.row}:{prompt.group_id}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
