"""What a run writes and shows of its rollouts, evaluations and steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from treadle.config import Config
from treadle.data.messages import content_text
from treadle.errors import FailedSamplesError
from treadle.metrics import Metric, metric, reduce_metrics
from treadle.observe.progress import Progress
from treadle.observe.report import ShownSample
from treadle.observe.run_folder import RunFolder
from treadle.observe.samples import rollout_file, write_groups
from treadle.observe.sinks import MetricSink
from treadle.rollout.measure import same_rewards
from treadle.run.evaluate import eval_metrics
from treadle.run.loop import Schedule
from treadle.types import Group, Status

_MAX_SAME_REWARDS = 3


@dataclass(frozen=True, eq=False)
class Outputs:
    """Where a run writes and shows things; `checkpoints` is the save folder."""

    folder: RunFolder
    sink: MetricSink
    progress: Progress
    checkpoints: Path


class Record:
    """Writes and shows what a run found, whichever runtime generates and trains."""

    def __init__(self, config: Config, schedule: Schedule, outputs: Outputs):
        self.config, self.schedule, self.out = config, schedule, outputs
        self.eval_fault = ""  # which evaluation had too many failed samples, and why
        self._same_rewards = 0  # rollouts in a row whose rewards tell no sample from another; -1 after the warning

    def rollout(self, rollout_id: int, groups: Sequence[Group]) -> None:
        """Write the samples of a rollout; warn of those that failed, and of rewards that are always the same.

        Raises:
            FailedSamplesError: if more than `max_failed_fraction` of the samples failed. They are written all the same.
            RunFolderLostError: if the run folder was removed.
        """
        self.out.folder.check_there()
        if self.config.observe.save_samples:
            write_groups(self.out.folder.sample_file(rollout_id), groups)
        if self.config.debug.save_debug_rollout_data is not None:
            write_groups(rollout_file(Path(self.config.debug.save_debug_rollout_data), rollout_id), groups)
        what, failures = f"rollout {rollout_id}", _failures(groups)
        if fault := self._too_many_failed(what, groups):
            raise FailedSamplesError(fault)
        if failures:
            self.out.progress.warn(
                f"{what}: {len(failures)} samples failed and are not trained on; first: {failures[0]}"
            )
        self._check_rewards(groups)

    def _too_many_failed(self, what: str, groups: Sequence[Group]) -> str:
        """Describe the failures if there are more than `max_failed_fraction` allows; empty if not."""
        failures, count = _failures(groups), sum(len(group.samples) for group in groups)
        most = self.config.rollout.max_failed_fraction
        if len(failures) <= most * count:
            return ""
        return (
            f"{what}: {len(failures)} of {count} samples failed, more than max_failed_fraction = {most:g} allows; "
            f"first: {failures[0]}; correct the reward or the environment, or raise --max-failed-fraction"
        )

    def _check_rewards(self, groups: Sequence[Group]) -> None:
        """Warn once if rewards have not differed for several rollouts in a row."""
        if self._same_rewards < 0:  # warned already
            return
        rule = self.config.algorithm.estimator
        reads_parts = rule is not None and rule.needs_parts  # equal sums may be of unequal parts
        if not self.config.reward.targets or self.config.debug.debug_rollout_only or reads_parts:
            return
        same = same_rewards(groups, compares_groups=rule is not None and rule.needs_group)
        self._same_rewards = self._same_rewards + 1 if same else 0
        if self._same_rewards == _MAX_SAME_REWARDS:
            self.out.progress.warn(
                f"in {_MAX_SAME_REWARDS} rollouts in a row {same}: no sample is better than another, so rewards teach the "
                "model nothing; compare samples/ with what the reward expects, or choose easier or harder prompts"
            )
            self._same_rewards = -1

    def evaluation(self, done: int, found: Sequence[tuple[str, Sequence[Group]]], seconds: float) -> None:
        """Write the metrics of an evaluation; show answers of the first and of the last one."""
        metrics: list[Metric] = []
        for name, groups in found:
            metrics += eval_metrics(name, groups)
            self._check_answers(name, groups)
            if done == self.schedule.start_rollout_id or done >= self.schedule.num_rollout:
                self._show(name, "after" if done >= self.schedule.num_rollout else "before", groups)
        values = reduce_metrics([*metrics, metric("perf/eval_seconds", seconds)])
        self.out.sink.write(done, values)
        self.out.progress.evaluation(done, values)

    def _check_answers(self, name: str, groups: Sequence[Group]) -> None:
        """Warn of answers that could not be scored: they count as reward 0."""
        what, failures = f"evaluation of {name}", _failures(groups)
        self.eval_fault = self.eval_fault or self._too_many_failed(what, groups)
        if failures:
            count = sum(len(group.samples) for group in groups)
            self.out.progress.warn(
                f"{what}: {len(failures)} of {count} samples failed and count as reward 0; first: {failures[0]}"
            )

    def step(self, rollout_id: int, metrics: Sequence[Metric]) -> None:
        """Write and show the metrics of a finished rollout."""
        values = reduce_metrics(metrics)
        self.out.sink.write(rollout_id, values)
        gap, most = values.get("train/rollout_logprob_abs_diff", 0.0), self.config.engine.max_logprob_diff
        if gap > most:
            self.out.progress.warn(
                f"rollout {rollout_id}: the engine's logprobs are {gap:.3g} nats from the trainer's on average, more than "
                f"max_logprob_diff = {most:g}; compare dtypes and the engine's arguments, or correct with rollout_correction"
            )
        self.out.progress.step(rollout_id, values)

    def _show(self, name: str, when: str, groups: Sequence[Group]) -> None:
        rows = []
        for group in groups[: self.config.observe.num_samples_shown]:
            prompt, sample = group.prompt, group.samples[0]
            question = content_text(prompt.messages[-1]) if prompt.messages else prompt.text
            rows.append(ShownSample(question, sample.text, prompt.label, sample.reward))
        self.out.progress.show_samples(f"{name} {when} training", rows)


def _failures(groups: Sequence[Group]) -> list[str]:
    """Return why each failed sample failed."""
    return [s.failure for group in groups for s in group.samples if s.status is Status.FAILED]
