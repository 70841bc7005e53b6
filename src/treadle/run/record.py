"""What a run writes and shows of its rollouts, evaluations and steps, whichever runtime made them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from treadle.config import Config
from treadle.errors import CheckpointError
from treadle.metrics import Metric, metric, reduce_metrics
from treadle.observe.progress import Progress
from treadle.observe.report import ShownSample
from treadle.observe.run_folder import RunFolder
from treadle.observe.samples import rollout_file, write_groups
from treadle.observe.sinks import MetricSink
from treadle.run.evaluate import eval_metrics
from treadle.run.loop import Schedule
from treadle.types import Group, Prompt


@dataclass(frozen=True, eq=False)
class Outputs:
    """Where a run writes and shows things; `checkpoints` is the save folder."""

    folder: RunFolder
    sink: MetricSink
    progress: Progress
    checkpoints: Path
    save_codec: Callable[[Path], None]


class Record:
    """Writes and shows; knows nothing of who generates or trains."""

    def __init__(self, config: Config, schedule: Schedule, outputs: Outputs):
        self.config, self.schedule, self.out = config, schedule, outputs

    def rollout(self, rollout_id: int, groups: Sequence[Group]) -> None:
        """Write the samples of a rollout, and warn of those that failed; raises `RunFolderLostError` if the folder is gone."""
        self.out.folder.check_there()
        failures = [s.failure for g in groups for s in g.samples if s.failure]
        if failures:
            self.out.progress.warn(
                f"rollout {rollout_id}: {len(failures)} samples failed and are not trained on; first: {failures[0]}"
            )
        if self.config.observe.save_samples:
            write_groups(self.out.folder.sample_file(rollout_id), groups)
        if self.config.debug.save_debug_rollout_data is not None:
            write_groups(rollout_file(Path(self.config.debug.save_debug_rollout_data), rollout_id), groups)

    def evaluation(self, done: int, found: Sequence[tuple[str, Sequence[Group]]], seconds: float) -> None:
        """Write the metrics of an evaluation; show answers of the first and of the last one."""
        metrics: list[Metric] = []
        for name, groups in found:
            metrics += eval_metrics(name, groups)
            if done == self.schedule.start_rollout_id or done >= self.schedule.num_rollout:
                self._show(name, "after" if done >= self.schedule.num_rollout else "before", groups)
        values = reduce_metrics([*metrics, metric("perf/eval_seconds", seconds)])
        self._write(done, values)
        self.out.progress.evaluation(done, values)

    def step(self, rollout_id: int, metrics: Sequence[Metric]) -> None:
        """Write and show the metrics of a finished rollout."""
        values = reduce_metrics(metrics)
        self._write(rollout_id, values)
        gap, most = values.get("train/rollout_logprob_abs_diff", 0.0), self.config.engine.max_logprob_diff
        if gap > most:
            self.out.progress.warn(
                f"rollout {rollout_id}: the engine's logprobs are {gap:.3g} nats from the trainer's on average, more than "
                f"max_logprob_diff = {most:g}; compare dtypes and the engine's arguments, or correct with rollout_correction"
            )
        self.out.progress.step(rollout_id, values)

    async def save(self, done: int, write: Callable[[], Awaitable[None]]) -> list[Metric]:
        """Have a checkpoint written; one that fails is warned of, and raised where no later one can make up for it."""
        self.out.progress.phase("saving")
        began = time.perf_counter()
        try:
            await write()
        except CheckpointError as error:
            if done >= self.schedule.num_rollout:
                raise
            self.out.progress.warn(f"{error}; training goes on, the next save tries again")
        return [metric("perf/save_seconds", time.perf_counter() - began)]

    def _write(self, rollout_id: int, values: Mapping[str, float]) -> None:
        self.out.sink.write(rollout_id, values)

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
