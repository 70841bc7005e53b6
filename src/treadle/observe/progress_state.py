"""The state of a run that the live display shows, and the numbers derived from it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

from treadle.observe.show_text import percent

RECENT_STEPS = 10
STEP_PHASES = ("rollout", "training", "publishing")
"""Phases that every step has; all others (loading, evaluating, saving) are rare enough for a line of their own."""


@dataclass(slots=True)
class Phase:
    """What the run does now; `done` and `total` count the phase's items, such as samples."""

    name: str
    started: float
    done: int | None = None
    total: int | None = None

    @property
    def count(self) -> str:
        """`12/256`, or nothing if the phase does not count."""
        if self.done is None:
            return ""
        return str(self.done) if self.total is None else f"{self.done}/{self.total}"


@dataclass(slots=True)
class RunState:
    """Filled by `Progress` under its lock. All times are of one monotonic clock, in seconds."""

    started: float
    num_rollout: int = 0
    num_done: int = 0
    phase: Phase | None = None
    step_began: float | None = None
    step_seconds: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    latest: dict[str, float] = field(default_factory=dict)
    num_failed: int = 0
    num_skipped: int = 0
    first_eval: dict[str, float] = field(default_factory=dict)
    last_eval: dict[str, float] = field(default_factory=dict)

    def begin(self, num_rollout: int, start_rollout_id: int, now: float) -> None:
        """Begin the loop; `num_rollout` counts from rollout 0, also in a resumed run."""
        self.num_rollout, self.num_done, self.step_began = num_rollout, start_rollout_id, now

    def enter(self, name: str, done: int | None, total: int | None, now: float) -> Phase | None:
        """Enter a phase or move within it; returns the phase that ended, or None."""
        if self.phase is not None and self.phase.name == name:
            self.phase.done, self.phase.total = done, total
            return None
        ended, self.phase = self.phase, Phase(name, now, done, total)
        return ended

    def add_step(self, rollout_id: int, values: Mapping[str, float], now: float) -> None:
        """Add the metrics of one finished rollout."""
        seconds = values.get("perf/step_seconds")
        if seconds is None and self.step_began is not None:
            seconds = now - self.step_began
        if seconds is not None and math.isfinite(seconds):
            self.step_seconds.append(seconds)
        self.step_began = now
        self.num_done = rollout_id + 1
        self.num_rollout = max(self.num_rollout, self.num_done)
        self.latest = dict(values)
        if "rollout/reward_mean" in values:
            self.rewards.append(values["rollout/reward_mean"])
        self.num_failed += int(values.get("rollout/failed_count", 0))
        self.num_skipped += int(values.get("train/skipped_steps", 0))

    def add_evaluation(self, values: Mapping[str, float]) -> dict[str, float]:
        """Add evaluation metrics; returns the accuracy of each set that is among them."""
        found = {name.split("/")[1]: value for name, value in values.items() if is_accuracy(name)}
        self.last_eval.update(found)
        self.first_eval = {**found, **self.first_eval}
        return found

    def seconds_left(self, now: float) -> float | None:
        """Return an estimate from the median of recent steps and the time of the current one; None before the first."""
        if not self.step_seconds:
            return None
        usual = statistics.median(self.step_seconds[-RECENT_STEPS:])
        running = 0.0 if self.step_began is None else min(usual, now - self.step_began)
        return max(0.0, usual * (self.num_rollout - self.num_done) - running)

    @property
    def best_reward(self) -> float | None:
        return max((r for r in self.rewards if math.isfinite(r)), default=None)

    def troubles(self) -> list[tuple[str, str]]:
        """Return what went wrong as (word, number), such as `("failed", "3")`.

        Failed samples and skipped steps are those of the whole run, truncated samples those of the last rollout.
        """
        found = []
        truncated = self.latest.get("rollout/truncated_fraction", 0.0)
        if truncated > 0:
            found.append(("truncated", percent(truncated)))
        if self.num_failed:
            found.append(("failed", str(self.num_failed)))
        if self.num_skipped:
            found.append(("skipped", str(self.num_skipped)))
        return found


def is_accuracy(name: str) -> bool:
    """Return whether a metric's name is `eval/<set>/accuracy`."""
    parts = name.split("/")
    return len(parts) == 3 and parts[0] == "eval" and parts[2] == "accuracy"
