"""Prompts to scored groups: what is in flight, what it may cost, and what happens to what goes wrong."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial

from treadle.chat import Codec
from treadle.errors import DeadlineError
from treadle.rollout.conversation import Conversation
from treadle.rollout.engines.base import Engine
from treadle.rollout.rewards import RewardScorer
from treadle.rollout.rewards.scorer import GroupScoring
from treadle.rollout.trajectory import Trajectory, failed
from treadle.types import Completion, Group, Prompt, Sample, SamplingParams

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
        conversation: Conversation | None = None,
    ):
        self.engine, self.codec = engine, codec
        self.timeout_seconds = timeout_seconds
        self.max_concurrent_prompts = max_concurrent_prompts
        self.conversation = conversation

    async def collect(self, job: Collect, scorer: RewardScorer, on_sample: OnSample | None = None) -> list[Group]:
        """Generate and score n samples of every prompt; groups come back in the order of the prompts.

        Raises `DeadlineError` naming what is missing where it takes longer than the rollout's deadline, and
        `EngineError` where the engine fails. A reward that fails marks its sample only.
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
        tasks: list[asyncio.Task[Sample]] = []
        try:
            async with slots, aclosing(self.engine.generate(prompt.token_ids, sampling, job.n)) as completions:
                async for completion in completions:
                    finish = partial(self._finish, prompt, completion, sampling)
                    tasks.append(asyncio.create_task(self._score(scoring, finish, count)))
            samples = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            raise
        return Group(prompt, tuple(sorted(samples, key=lambda s: s.index)))

    async def _finish(self, prompt: Prompt, completion: Completion, sampling: SamplingParams) -> Sample:
        """The sample of a completion, with whatever an environment makes of it.

        A server may sample an id that stands for no token, from padding of the model's embeddings: such a sample fails.
        """
        trajectory = Trajectory(prompt, completion.index, sampling.temperature)
        if self.conversation is not None:
            sample = await self.conversation.finish(trajectory, completion, sampling)
        else:
            trajectory.add_sampled(completion)
            text = self.codec.response_text(completion.token_ids, sampling.stop_token_ids)
            sample = trajectory.finish(completion.status, text)
        strangers = self.codec.strangers(sample.token_ids[sample.loss_mask])
        if not len(strangers):
            return sample
        return failed(sample, f"the engine sampled id {strangers[0]}, which is no token of the tokenizer")

    @staticmethod
    async def _score(
        scoring: GroupScoring, finish: Callable[[], Awaitable[Sample]], count: Callable[[], None]
    ) -> Sample:
        scored = await scoring.score(await finish())
        count()
        return scored


def prompt_seed(seed: int, prompt: Prompt) -> int:
    """Seed of a prompt's samples: the same for the same run seed and draw, whatever else runs."""
    text = f"{seed}:{prompt.data_name}:{prompt.row}:{prompt.group_id}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
