"""The display for log files and pipes: one aligned line a step, and a line when a slow phase begins."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from treadle.observe.progress_state import STEP_PHASES, Phase, RunState
from treadle.observe.report import Line, plain_block
from treadle.observe.safe_stream import SafeStream
from treadle.observe.show_text import clock, number

WIDTH = 110
HEADER_EVERY = 20
QUIET_SECONDS = 30.0
"""Seconds without output after which a phase prints its progress."""

COLUMNS = (
    ("step", 11),
    ("reward", 8),
    ("length", 8),
    ("entropy", 9),
    ("lp gap", 8),
    ("roll tok/s", 12),
    ("train tok/s", 13),
    ("seconds", 9),
    ("left", 9),
)
SHORT = {"truncated": "trunc", "failed": "fail", "skipped": "skip"}


def header() -> str:
    """Return the names of the columns of `step_line`."""
    return "".join(f"{name:>{width}}" for name, width in COLUMNS)


def step_line(state: RunState, now: float) -> str:
    """Return a finished step as a line of at most `WIDTH` columns."""
    values = state.latest
    cells = (
        f"{state.num_done}/{state.num_rollout}",
        number(values.get("rollout/reward_mean")),
        number(values.get("rollout/response_length_mean")),
        number(values.get("train/entropy")),
        number(values.get("train/rollout_logprob_abs_diff")),
        number(values.get("rollout/tokens_per_second")),
        number(values.get("train/tokens_per_second")),
        clock(state.step_seconds[-1] if state.step_seconds else None),
        clock(state.seconds_left(now)) if state.num_done < state.num_rollout else "done",
    )
    line = "".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, COLUMNS, strict=True))
    troubles = " ".join(f"{SHORT[word]} {count}" for word, count in state.troubles())
    return f"{line}  {troubles}".rstrip()[:WIDTH]


class PlainView:
    """Prints lines; a phase of a step has a line of its own only during the first step, or when it takes long."""

    def __init__(self, stream: SafeStream, clock_now: Callable[[], float] = time.monotonic):
        self._stream = stream
        self._now = clock_now
        self._lock = threading.Lock()
        self._started = clock_now()
        self._last_print = self._started
        self._num_steps = 0

    def _print(self, *lines: str) -> None:
        with self._lock:
            self._stream.write("".join(f"{line}\n" for line in lines))
            self._stream.flush()
            self._last_print = self._now()

    def _stamped(self, text: str) -> str:
        return f"[{clock(self._now() - self._started):>7}] {text}"

    def begin(self, state: RunState) -> None:
        if state.num_done:
            self._print(self._stamped(f"resumed: {state.num_done} of {state.num_rollout} steps are done"))

    def phase_began(self, state: RunState, phase: Phase, ended: Phase | None) -> None:
        if self._num_steps == 0 or phase.name not in STEP_PHASES:
            self._print(self._stamped(f"{phase.name} {phase.count}".rstrip() if phase.done else phase.name))

    def phase_moved(self, state: RunState, phase: Phase) -> None:
        now = self._now()
        if now - self._last_print >= QUIET_SECONDS:
            self._print(self._stamped(f"{phase.name} {phase.count}, {clock(now - phase.started)}"))

    def step(self, state: RunState) -> None:
        lines = [header()] if self._num_steps % HEADER_EVERY == 0 else []
        self._num_steps += 1
        self._print(*lines, step_line(state, self._now()))

    def evaluated(self, rollout_id: int, found: Mapping[str, float], first: Mapping[str, float]) -> None:
        for name, value in found.items():
            before = f"  (first {number(first[name])})" if first[name] != value else ""
            self._print(self._stamped(f"eval {name} accuracy {number(value)}{before}"))

    def note(self, text: str) -> None:
        self._print(text)

    def warn(self, text: str) -> None:
        self._print(f"warning: {text}")

    def block(self, title: str, parts: Sequence[Sequence[Line]]) -> None:
        lines = ["", title]
        for part in parts:
            lines += [*plain_block(part, WIDTH), ""]
        self._print(*lines)

    def close(self) -> None:
        self._stream.flush()
