"""The side of a run that generates: draw prompts, generate and score their samples, evaluate, and save the cursor."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treadle.config import Config, batch_arithmetic
from treadle.data import PromptSource
from treadle.errors import DataError
from treadle.metrics import Metric, metric
from treadle.observe.samples import read_groups, rollout_file
from treadle.rollout.filters import GroupFilter
from treadle.rollout.manager import Collect, RolloutManager
from treadle.rollout.measure import rollout_metrics
from treadle.rollout.rewards import RewardScorer
from treadle.run.evaluate import EvalSet
from treadle.run.loop import Collection
from treadle.types import Group, Prompt, SamplingParams

OnPhase = Callable[[str, int, int], None]
"""Called with the name of a phase, the number of samples that are done, and how many there will be."""


@dataclass(frozen=True, eq=False)
class Generation:
    """The manager that generates, with its prompts, rewards, evaluation sets and group filter."""

    manager: RolloutManager
    source: PromptSource | None  # None in a run that only evaluates
    scorer: RewardScorer
    eval_sets: Sequence[EvalSet]
    group_filter: GroupFilter | None = None


class Rollouts:
    """Collects rollouts and evaluations. Several collections may run at once, each on prompts of its own."""

    def __init__(self, config: Config, generation: Generation, on_phase: OnPhase):
        self.config, self.generation, self.on_phase = config, generation, on_phase
        self._drawn: dict[int, list[Prompt]] = {}  # by rollout: what it drew and did not put back

    @property
    def source(self) -> PromptSource:
        assert self.generation.source is not None
        return self.generation.source

    async def collect(self, rollout_id: int) -> Collection:
        """Draw, generate, score and filter the groups of one rollout."""
        section = self.config.rollout
        sampling = SamplingParams(
            max_new_tokens=section.rollout_max_response_len,
            temperature=section.rollout_temperature,
            top_p=section.rollout_top_p,
            top_k=section.rollout_top_k,
            min_p=section.rollout_min_p,
            stop=section.rollout_stop,
            stop_token_ids=section.rollout_stop_token_ids,
        )
        began = time.perf_counter()
        groups, dropped = await self._draw(rollout_id, sampling)
        metrics = rollout_metrics(groups, seconds=time.perf_counter() - began, version=rollout_id)
        return Collection(groups, [*metrics, *dropped, metric("rollout/epoch", self.source.epoch)])

    async def evaluate(self) -> list[tuple[str, list[Group]]]:
        """Return the answered and scored prompts of every evaluation set, by its name."""
        found = []
        for eval_set in self.generation.eval_sets:
            seed = self.config.rollout.rollout_seed + 1  # other samples than training draws of the same rows
            prompts: list[Prompt] = list(eval_set.prompts)
            job = Collect(f"evaluation of {eval_set.name}", prompts, eval_set.sampling, eval_set.n, seed)
            groups = await self._generate(job, f"evaluating {eval_set.name}", eval_set.scorer)
            found.append((eval_set.name, groups))
        return found

    async def state(self, done: int) -> dict[str, Any]:
        """Return where the stream of prompts stands for a run that resumes at rollout `done`, in JSON values.

        What rollouts from there on have drawn already (in flight, or collected and not trained) is drawn again first.
        """
        state = self.source.state()
        again = [p for rollout_id in sorted(self._drawn) if rollout_id >= done for p in self._drawn[rollout_id]]
        state["put_back"] = [[p.data_name, p.row, p.group_id] for p in again] + state["put_back"]
        return {"source": state}

    async def _draw(self, rollout_id: int, sampling: SamplingParams) -> tuple[list[Group], list[Metric]]:
        """Return the groups of a rollout; with a group filter, draw until enough are kept or the rounds are used up.

        Groups kept beyond what is needed go back to the source; dropped ones fill what is missing at the end.
        """
        section, keep = self.config.rollout, self.generation.group_filter
        wanted = section.rollout_batch_size
        size = wanted if keep is None else section.over_sampling_batch_size or wanted
        kept: list[Group] = []
        dropped: list[tuple[str, Group]] = []
        mine = self._open(rollout_id)
        for _ in range(1 if keep is None else section.max_filter_rounds):
            prompts = self.source.next_prompts(size)
            mine += prompts
            job = Collect(
                f"rollout {rollout_id}", prompts, sampling, section.n_samples_per_prompt, section.rollout_seed
            )
            for group in await self._generate(job, "rollout", self.generation.scorer):
                reason = None if keep is None else keep(group)
                if reason is None:
                    kept.append(group)
                else:
                    dropped.append((reason, group))
            if len(kept) >= wanted:
                break
        surplus = {group.group_id for group in kept[wanted:]}
        self.source.put_back(group.prompt for group in kept[wanted:])
        mine[:] = [prompt for prompt in mine if prompt.group_id not in surplus]
        filled = dropped[: max(0, wanted - len(kept))]
        counts = Counter(surplus=sum(len(group.samples) for group in kept[wanted:]))
        for reason, group in dropped[len(filled) :]:
            counts[reason] += len(group.samples)
        metrics = [metric(f"rollout/dropped/{reason}", count) for reason, count in sorted(counts.items()) if keep]
        return [*kept[:wanted], *(group for _, group in filled)], metrics

    def _open(self, rollout_id: int) -> list[Prompt]:
        """Return the list of what this rollout draws, and forget rollouts that no checkpoint can need."""
        oldest = rollout_id - self.config.cluster.max_lag - 1
        self._drawn = {known: prompts for known, prompts in self._drawn.items() if known >= oldest}
        return self._drawn.setdefault(rollout_id, [])

    async def _generate(self, job: Collect, phase: str, scorer: RewardScorer) -> list[Group]:
        self.on_phase(phase, 0, len(job.prompts) * job.n)
        return await self.generation.manager.collect(job, scorer, lambda done, total: self.on_phase(phase, done, total))


def saved_rollout(config: Config, rollout_id: int) -> Collection:
    """Return a rollout that an earlier run saved; raises `DataError` if it is missing or of another size."""
    folder = config.debug.load_debug_rollout_data
    assert folder is not None
    path = rollout_file(Path(folder), rollout_id)
    if not os.path.lexists(path):
        raise DataError(f"--load-debug-rollout-data has no {path}; lower --num-rollout to what was saved")
    groups = read_groups(path)
    found, wanted = sum(len(g.samples) for g in groups), batch_arithmetic(config).samples_per_rollout
    if found != wanted:
        raise DataError(
            f"{path} has {found} samples, rollout_batch_size × n_samples_per_prompt is {wanted}; "
            "give the batch sizes it was saved with"
        )
    return Collection(groups, rollout_metrics(groups, seconds=0.0, version=rollout_id))
