"""Score samples: one scorer for a run, one `GroupScoring` for each group.

    async with build_scorer(config.reward) as scorer:
        group = scorer.open_group(prompt, n=2)
        samples = await asyncio.gather(group.score(first), group.score(second))

A sample's reward is the sum of weight times value over the rewards given, and never depends on timing. A reward
that raises, hangs, crashes or returns nonsense marks its sample `Status.FAILED` and is counted; nothing it does
raises here.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Literal

from treadle.errors import RewardError
from treadle.registry import check_name
from treadle.rollout.isolation.fault import CallFault
from treadle.rollout.isolation.worker_pool import Work, WorkerPool
from treadle.rollout.rewards.builtin import BUILTIN_REWARDS, RewardSettings
from treadle.rollout.rewards.catalog import RewardSpec, load_reward, make_specs
from treadle.rollout.rewards.forms import Form, RewardFault, RewardFunction, evaluate
from treadle.rollout.rewards.inputs import RewardInput, RewardScore, prompt_view, sample_view
from treadle.rollout.rewards.serving import LOADER, describe_reward, request_of, scores_of
from treadle.types import Prompt, Sample, Status

if TYPE_CHECKING:
    from treadle.config.sections import RewardSection

Scores = list[RewardScore | None]


@dataclass(frozen=True, slots=True)
class PlacedReward:
    """One reward of the sum: its weight, its form, and where it runs.

    `place` is `inline` (here), `worker` (another process, one call at a time) or `loop` (another process with an event
    loop for all calls). Only an inline reward is loaded here and has its `function`.
    """

    spec: RewardSpec
    weight: float
    form: Form
    place: Literal["inline", "loop", "worker"]
    function: RewardFunction | None


def build_scorer(
    reward: RewardSection, *, group_wait_seconds: float = 3600.0, required: bool = True, needs_value: bool = False
) -> RewardScorer:
    """Build the scorer of a `[reward]` section; a worker process imports your own rewards to see their form.

    `group_wait_seconds` bounds how long a TRL-style reward waits for the rest of a group. Where no reward is
    `required` and none is given, every sample's is 0, but if `needs_value` a completed sample fails to which neither a
    reward nor its environment gave a value. Raises `RewardError` or `ConfigError` if a name, a path, a signature or the
    weights are wrong.
    """
    targets = reward.targets
    if not targets and required:
        raise RewardError(
            f"no reward is given; set --rm-type ({', '.join(sorted(BUILTIN_REWARDS))}) or --custom-rm-path"
        )
    weights = reward.rm_weights or (1.0,) * len(targets)
    if len(weights) != len(targets):
        raise RewardError(
            f"{len(weights)} --rm-weights for {len(targets)} rewards ({', '.join(targets)}); give one for each"
        )
    if "regex" in targets:
        _check_pattern(reward.rm_regex)
    specs = make_specs(targets, RewardSettings(reward.rm_regex, reward.rm_timeout_seconds))
    placed = [_place(spec, weight) for spec, weight in zip(specs, weights, strict=True)]
    return RewardScorer(placed, reward.rm_num_workers, reward.rm_timeout_seconds, group_wait_seconds, needs_value)


def _check_pattern(pattern: str | None) -> None:
    if pattern is None:
        raise RewardError("the regex reward needs a pattern; set --rm-regex")
    try:
        re.compile(pattern)
    except re.error as error:
        raise RewardError(f"--rm-regex {pattern!r} is not a regular expression: {error}") from error


def _place(spec: RewardSpec, weight: float) -> PlacedReward:
    if spec.builtin is not None and spec.builtin.inline:
        return PlacedReward(spec, weight, "sample", "inline", load_reward(spec))
    if spec.builtin is not None:
        return PlacedReward(spec, weight, "sample", "worker", None)
    check_name("reward", spec.target, BUILTIN_REWARDS)
    form, is_async = describe_reward(spec.name, spec.target)
    return PlacedReward(spec, weight, form, "loop" if is_async else "worker", None)


class RewardScorer:
    """The rewards of a run and what runs them; close it, or use it as an async context manager."""

    def __init__(
        self,
        rewards: Sequence[PlacedReward],
        num_workers: int,
        timeout_seconds: float,
        group_wait_seconds: float,
        needs_value: bool,
    ):
        self.rewards = tuple(rewards)
        self.group_wait_seconds = group_wait_seconds
        self.needs_value = needs_value
        self.failure_counts: Counter[str] = Counter()
        """Failed calls by reward name, one per sample, since the start."""
        self._pools: dict[str, WorkerPool] = {}
        self._numbers: dict[str, int] = {}  # of each reward in its pool
        for place in ("worker", "loop"):
            specs = [reward.spec for reward in self.rewards if reward.place == place]
            self._numbers |= {spec.name: number for number, spec in enumerate(specs)}
            work = Work(LOADER, [spec.to_json() for spec in specs], timeout_seconds, place == "loop", num_workers)
            self._pools[place] = WorkerPool(work)

    @property
    def reward_names(self) -> tuple[str, ...]:
        """Names of the rewards; each is a key of `Sample.reward_parts`."""
        return tuple(reward.spec.name for reward in self.rewards)

    def process_ids(self) -> list[int]:
        """Process ids of the workers that run now."""
        return [pid for pool in self._pools.values() for pid in pool.process_ids()]

    def open_group(self, prompt: Prompt, n: int) -> GroupScoring:
        """Begin to score the n samples of a prompt."""
        return GroupScoring(self, prompt, n)

    async def run(self, reward: PlacedReward, inputs: Sequence[RewardInput]) -> Scores:
        """Run one reward on one sample, or a TRL-style one on a group; raises `CallFault`."""
        if reward.place == "inline":
            assert reward.function is not None
            return evaluate(reward.function, inputs)
        future = self._pools[reward.place].submit(self._numbers[reward.spec.name], request_of(inputs))
        return scores_of(await asyncio.wrap_future(future))

    async def close(self) -> None:
        """End the workers; safe to call twice. Calls still running fail."""
        for pool in self._pools.values():
            await asyncio.to_thread(pool.close)

    async def __aenter__(self) -> RewardScorer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class GroupScoring:
    """The scoring of one group, on one event loop.

    Hand in each sample with `score` as soon as it is finished, and call `missing` for each that will not come:
    together n times. Only TRL-style rewards wait for the others.
    """

    def __init__(self, scorer: RewardScorer, prompt: Prompt, n: int):
        self._scorer = scorer
        self._shared = _shared_view(prompt)
        self._num_open = n
        self._samples: list[Sample] = []
        self._complete = asyncio.Event()
        self._group_calls: dict[str, asyncio.Task[dict[int, RewardScore | None]]] = {}

    def missing(self) -> None:
        """Say that one sample of the group will not come; a TRL-style reward is called without it."""
        self._count_down()

    async def score(self, sample: Sample) -> Sample:
        """Return the sample with `reward` and `reward_parts` set, or failed with a `failure` that says which reward and why.

        `reward_parts` has each reward's value before its weight under the reward's name, and the parts a reward
        gave itself under `name.part`. A sample that has failed already counts as missing and is given back.
        """
        if sample.status is Status.FAILED:
            self.missing()
            return sample
        self._samples.append(sample)
        self._count_down()
        outcomes = await asyncio.gather(*(self._outcome(reward, sample) for reward in self._scorer.rewards))
        return _join(sample, self._scorer.rewards, outcomes, self._scorer.needs_value)

    def _view(self, sample: Sample) -> RewardInput:
        if isinstance(self._shared, CallFault):
            raise self._shared
        return sample_view(self._shared, sample)

    def _count_down(self) -> None:
        assert self._num_open > 0, "more samples were handed in than the group was opened for"
        self._num_open -= 1
        if self._num_open == 0:
            self._complete.set()

    async def _outcome(self, reward: PlacedReward, sample: Sample) -> RewardScore | CallFault | None:
        try:
            if reward.form == "sample":
                return (await self._scorer.run(reward, [self._view(sample)]))[0]
            return await self._from_group(reward, sample)
        except CallFault as fault:
            self._scorer.failure_counts[reward.spec.name] += 1
            return fault

    async def _from_group(self, reward: PlacedReward, sample: Sample) -> RewardScore | None:
        seconds = self._scorer.group_wait_seconds
        try:
            async with asyncio.timeout(seconds):
                await self._complete.wait()
        except TimeoutError:
            if not self._complete.is_set():
                raise RewardFault(f"waited {seconds:g} s for the other samples of the group") from None
        name = reward.spec.name
        if name not in self._group_calls:
            self._group_calls[name] = asyncio.create_task(self._call_on_group(reward))
        return (await asyncio.shield(self._group_calls[name]))[id(sample)]

    async def _call_on_group(self, reward: PlacedReward) -> dict[int, RewardScore | None]:
        """Call a reward once for all samples, ordered by index whatever the order in which they came."""
        samples = sorted(self._samples, key=lambda s: (s.index, s.trajectory_id))
        scores = await self._scorer.run(reward, [self._view(s) for s in samples])
        return {id(s): score for s, score in zip(samples, scores, strict=True)}


def _shared_view(prompt: Prompt) -> RewardInput | CallFault:
    """Return what the samples of a prompt share, or why rewards can't be given it: its row may hold anything."""
    try:
        return prompt_view(prompt)
    except Exception as error:
        return RewardFault(f"can't be given row {prompt.row} of {prompt.data_name or 'the data'}: {error}")


def _join(
    sample: Sample,
    rewards: Sequence[PlacedReward],
    outcomes: Sequence[RewardScore | CallFault | None],
    needs_value: bool,
) -> Sample:
    """Add the rewards up by weight, and that of the environment; any fault, or no reward at all, fails the sample."""
    faults = [f"reward {r.spec.name}: {o}" for r, o in zip(rewards, outcomes, strict=True) if isinstance(o, CallFault)]
    parts: dict[str, float] = dict(sample.reward_parts)
    total = sample.reward or 0.0
    for reward, outcome in zip(rewards, outcomes, strict=True):
        if isinstance(outcome, RewardScore):
            total += reward.weight * outcome.value
            parts[reward.spec.name] = outcome.value
            parts |= {f"{reward.spec.name}.{key}": value for key, value in outcome.parts.items()}
    if not faults and rewards and not parts:
        faults.append("no reward gave this sample a value: all returned None")
    if needs_value and not faults and not parts and sample.status is Status.COMPLETED:
        faults.append("the environment gave no reward: return a Step with one at the end, or set --rm-type")
    if not faults and not math.isfinite(total):
        faults.append(f"the weighted sum of the rewards is {total}")
    if faults:
        return replace(sample, status=Status.FAILED, reward=None, reward_parts={}, failure="; ".join(faults))
    return replace(sample, reward=total, reward_parts=parts)
