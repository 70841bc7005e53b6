"""The local runtime: everything in one process, the engine on the trainer's own module."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from treadle.config import Config, batch_arithmetic
from treadle.data import PromptSource
from treadle.errors import CheckpointError, DataError
from treadle.metrics import Metric, metric, reduce_metrics
from treadle.observe.progress import Progress
from treadle.observe.report import ShownSample
from treadle.observe.run_folder import RunFolder
from treadle.observe.samples import read_groups, rollout_file, write_groups
from treadle.observe.sinks import MetricSink
from treadle.rollout.filters import GroupFilter
from treadle.rollout.manager import Collect, RolloutManager
from treadle.rollout.measure import rollout_metrics
from treadle.rollout.rewards import RewardScorer
from treadle.run.evaluate import EvalSet, eval_metrics
from treadle.run.loop import Collection, Schedule
from treadle.run.state import random_state
from treadle.training.checkpoint import save_checkpoint
from treadle.training.worker import Trainer
from treadle.types import Group, Prompt, SamplingParams
from treadle.weights import WeightTransport

GIB = 2**30


@dataclass(frozen=True, eq=False)
class Generation:
    """The rollout side; None in a run that only trains from saved rollouts."""

    manager: RolloutManager
    source: PromptSource | None  # None in a run that only evaluates
    scorer: RewardScorer
    transport: WeightTransport
    eval_sets: Sequence[EvalSet]
    group_filter: GroupFilter | None = None


@dataclass(frozen=True, eq=False)
class Outputs:
    """Where a run writes and shows things; `checkpoints` is the save folder."""

    folder: RunFolder
    sink: MetricSink
    progress: Progress
    checkpoints: Path
    save_codec: Callable[[Path], None]


class LocalParts:
    """What `train_loop` drives, for one process."""

    def __init__(
        self,
        config: Config,
        schedule: Schedule,
        outputs: Outputs,
        generation: Generation | None,
        trainer: Trainer | None,
    ):
        self.config, self.schedule, self.out = config, schedule, outputs
        self.generation, self.trainer = generation, trainer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trainer")
        self._peak_gib = 0.0
        self.rows: list[dict[str, Any]] = []

    @property
    def source(self) -> PromptSource:
        assert self.generation is not None
        assert self.generation.source is not None
        return self.generation.source

    # The loop's parts

    async def collect(self, rollout_id: int) -> Collection:
        loaded = self.config.debug.load_debug_rollout_data
        if self.config.debug.debug_train_only:
            assert loaded is not None
            path = rollout_file(Path(loaded), rollout_id)
            if not path.is_file():
                raise DataError(f"--load-debug-rollout-data has no {path}; lower --num-rollout to what was saved")
            groups = read_groups(path)
            found, wanted = sum(len(g.samples) for g in groups), batch_arithmetic(self.config).samples_per_rollout
            if found != wanted:
                raise DataError(
                    f"{path} has {found} samples, rollout_batch_size × n_samples_per_prompt is {wanted}; "
                    "give the batch sizes it was saved with"
                )
            return Collection(groups, rollout_metrics(groups, seconds=0.0, version=rollout_id))
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
        groups, dropped = await self._draw(f"rollout {rollout_id}", sampling)
        metrics = rollout_metrics(groups, seconds=time.perf_counter() - began, version=rollout_id)
        metrics += [*dropped, metric("rollout/epoch", self.source.epoch)]
        self._warn_of_failures(rollout_id, groups)
        if self.config.observe.save_samples:
            write_groups(self.out.folder.sample_file(rollout_id), groups)
        if self.config.debug.save_debug_rollout_data is not None:
            write_groups(rollout_file(Path(self.config.debug.save_debug_rollout_data), rollout_id), groups)
        return Collection(groups, metrics)

    async def train(self, rollout_id: int, groups: Sequence[Group]) -> Sequence[Metric]:
        if self.trainer is None:
            return []
        self.out.progress.phase("training")
        return await self._on_thread(self.trainer.train, groups, rollout_id)

    async def publish(self, version: int) -> Sequence[Metric]:
        if self.generation is None:
            return []
        began = time.perf_counter()
        self.generation.transport.push(version)
        return [metric("perf/publish_seconds", time.perf_counter() - began)]

    async def evaluate(self, done: int) -> None:
        assert self.generation is not None
        began = time.perf_counter()
        metrics: list[Metric] = []
        for eval_set in self.generation.eval_sets:
            groups = await self._evaluate_set(eval_set)
            metrics += eval_metrics(eval_set.name, groups)
            if done == self.schedule.start_rollout_id or done >= self.schedule.num_rollout:
                self._show(eval_set.name, "after" if done >= self.schedule.num_rollout else "before", groups)
        metrics.append(metric("perf/eval_seconds", time.perf_counter() - began))
        values = reduce_metrics(metrics)
        self._write(done, values)
        self.out.progress.evaluation(done, values)

    async def save(self, done: int) -> Sequence[Metric]:
        assert self.trainer is not None
        self.out.progress.phase("saving")
        began = time.perf_counter()
        try:
            await self._on_thread(self._save_now, done)
        except CheckpointError as error:
            if done >= self.schedule.num_rollout:
                raise
            self.out.progress.warn(f"{error}; training goes on, the next save tries again")
        return [metric("perf/save_seconds", time.perf_counter() - began)]

    def record(self, rollout_id: int, metrics: Sequence[Metric]) -> None:
        values = reduce_metrics([*metrics, *self._memory()])
        self._write(rollout_id, values)
        self.out.progress.step(rollout_id, values)

    # Their insides

    async def _draw(self, what: str, sampling: SamplingParams) -> tuple[list[Group], list[Metric]]:
        """The groups of a rollout; with a group filter, draw until enough are kept or the rounds are used up.

        Groups kept beyond what is needed go back to the source; dropped ones fill what is missing at the end.
        """
        section = self.config.rollout
        wanted, keep = section.rollout_batch_size, self.generation.group_filter if self.generation else None
        size = wanted if keep is None else section.over_sampling_batch_size or wanted
        kept: list[Group] = []
        dropped: list[tuple[str, Group]] = []
        for _ in range(1 if keep is None else section.max_filter_rounds):
            prompts = self.source.next_prompts(size)
            groups = await self._generate(
                Collect(what, prompts, sampling, section.n_samples_per_prompt, section.rollout_seed), "rollout"
            )
            reasons = [None if keep is None else keep(group) for group in groups]
            kept += [group for group, reason in zip(groups, reasons, strict=True) if reason is None]
            dropped += [(reason, group) for group, reason in zip(groups, reasons, strict=True) if reason is not None]
            if len(kept) >= wanted:
                break
        self.source.put_back(group.prompt for group in kept[wanted:])
        filled = dropped[: max(0, wanted - len(kept))]
        counts: dict[str, int] = {"surplus": sum(len(group.samples) for group in kept[wanted:])}
        for reason, group in dropped[len(filled) :]:
            counts[reason] = counts.get(reason, 0) + len(group.samples)
        metrics = [metric(f"rollout/dropped/{reason}", count) for reason, count in sorted(counts.items()) if keep]
        return [*kept[:wanted], *(group for _, group in filled)], metrics

    async def _on_thread(self, call: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *args)

    async def _generate(self, job: Collect, phase: str, scorer: RewardScorer | None = None) -> list[Group]:
        assert self.generation is not None
        progress = self.out.progress
        progress.phase(phase, 0, len(job.prompts) * job.n)
        chosen = scorer or self.generation.scorer
        return await self.generation.manager.collect(
            job, chosen, lambda done, total: progress.phase(phase, done, total)
        )

    async def _evaluate_set(self, eval_set: EvalSet) -> list[Group]:
        prompts: list[Prompt] = list(eval_set.prompts)
        seed = self.config.rollout.rollout_seed + 1  # not the samples of training, were the rows the same
        job = Collect(f"evaluation of {eval_set.name}", prompts, eval_set.sampling, eval_set.n, seed)
        return await self._generate(job, f"evaluating {eval_set.name}", eval_set.scorer)

    def _save_now(self, done: int) -> None:
        assert self.trainer is not None
        trainer = self.trainer

        def write_model(folder: Path) -> None:
            trainer.write_model(folder)
            self.out.save_codec(folder)

        state: dict[str, Any] = {
            **trainer.state(),
            "random": random_state(),
            "dtype": self.config.model.dtype,
        }
        if self.generation is not None:
            state["source"] = self.source.state()
        save_checkpoint(
            self.out.checkpoints,
            done,
            write_model=write_model,
            write_rest=trainer.write_rest,
            optimizer=trainer.optimizer.state_tensors(),
            state=state,
            config=self.config.model_dump(mode="json"),
            keep=self.config.checkpoint.keep_checkpoints,
        )

    def _write(self, rollout_id: int, values: Mapping[str, float]) -> None:
        self.rows.append({"rollout_id": rollout_id, **values})
        self.out.sink.write(rollout_id, values)

    def _memory(self) -> list[Metric]:
        if self.trainer is not None and self.trainer.device.type == "cuda":
            now, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        else:
            now = peak = psutil.Process().memory_info().rss
        self._peak_gib = max(self._peak_gib, peak / GIB)
        return [metric("perf/memory_gib", now / GIB), metric("perf/peak_memory_gib", self._peak_gib)]

    def _warn_of_failures(self, rollout_id: int, groups: Sequence[Group]) -> None:
        failures = [s.failure for g in groups for s in g.samples if s.failure]
        if failures:
            self.out.progress.warn(
                f"rollout {rollout_id}: {len(failures)} samples failed and are not trained on; first: {failures[0]}"
            )

    def _show(self, name: str, when: str, groups: Sequence[Group]) -> None:
        count = self.config.observe.num_samples_shown
        rows = [
            ShownSample(_question(g.prompt), g.samples[0].text, g.prompt.label, g.samples[0].reward)
            for g in groups[:count]
        ]
        self.out.progress.show_samples(f"{name} {when} training", rows)


def _question(prompt: Prompt) -> str:
    """What a person asked: the last message where there are messages, else the text the model saw."""
    if prompt.messages:
        return str(prompt.messages[-1].get("content", ""))
    return prompt.text
