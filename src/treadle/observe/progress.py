"""The live display of a run: a panel on a terminal, one line a step elsewhere, or nothing."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Protocol, TextIO

from treadle.observe.progress_plain import PlainView
from treadle.observe.progress_rich import RichView
from treadle.observe.progress_state import Phase, RunState
from treadle.observe.report import Line, ShownSample, sample_lines, summary_lines
from treadle.observe.safe_stream import SafeStream
from treadle.printable_text import visible

Mode = Literal["auto", "rich", "plain", "off"]


class View(Protocol):
    """One way to show a run. Its methods are called from any thread, must be quick and must never raise."""

    def begin(self, state: RunState) -> None: ...
    def phase_began(self, state: RunState, phase: Phase, ended: Phase | None) -> None: ...
    def phase_moved(self, state: RunState, phase: Phase) -> None: ...
    def step(self, state: RunState) -> None: ...
    def evaluated(self, rollout_id: int, found: Mapping[str, float], first: Mapping[str, float]) -> None: ...
    def note(self, text: str) -> None: ...
    def warn(self, text: str) -> None: ...
    def block(self, title: str, parts: Sequence[Sequence[Line]]) -> None: ...
    def close(self) -> None: ...


class Progress:
    """Shows a run while it goes; safe to call from any thread.

    Use it as a context manager, so that the terminal is restored whatever happens. `mode` is that of
    `ObserveSection.progress`; `view` is None if nothing is shown, and warnings then go to stderr.

        with Progress("plain") as progress:
            progress.phase("loading the model")
            progress.start(num_rollout=20)
            progress.phase("rollout", done=12, total=256)
            progress.step(0, {"rollout/reward_mean": 0.25})
    """

    def __init__(self, mode: Mode = "auto", stream: TextIO | None = None, title: str = "treadle"):
        safe = SafeStream(sys.stdout if stream is None else stream)
        self._lock = threading.Lock()
        self._state = RunState(started=time.monotonic())
        self.mode = _pick(mode, safe)
        self.view: View | None = None
        if self.mode == "rich":
            self.view = RichView(safe, self._state, self._lock, title)
        elif self.mode == "plain":
            self.view = PlainView(safe)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def start(self, num_rollout: int, start_rollout_id: int = 0) -> None:
        """Begin the loop of rollouts `start_rollout_id` to `num_rollout` - 1."""
        with self._lock:
            self._state.begin(num_rollout, start_rollout_id, time.monotonic())
        if self.view is not None:
            self.view.begin(self._state)

    def phase(self, name: str, done: int | None = None, total: int | None = None) -> None:
        """Show what the run does now, such as `rollout` or `loading the model`, and its progress.

        It may be called often: a call costs a microsecond.
        """
        with self._lock:
            previous = self._state.phase
            ended = self._state.enter(name, done, total, time.monotonic())
            now = self._state.phase
        if self.view is None or now is None:
            return
        if now is previous:
            self.view.phase_moved(self._state, now)
        else:
            self.view.phase_began(self._state, now, ended)

    def step(self, rollout_id: int, values: Mapping[str, float]) -> None:
        """Show that rollout `rollout_id` was trained on; `values` are its metrics, with or without an evaluation's."""
        with self._lock:
            self._state.add_step(rollout_id, values, time.monotonic())
        if self.view is not None:
            self.view.step(self._state)
        self.evaluation(rollout_id, values)

    def evaluation(self, rollout_id: int, values: Mapping[str, float]) -> None:
        """Show the accuracy of each set among the metrics."""
        with self._lock:
            found = self._state.add_evaluation(values)
            first = dict(self._state.first_eval)
        if self.view is not None and found:
            self.view.evaluated(rollout_id, found, first)

    def note(self, text: str) -> None:
        """Show a line above the display."""
        if self.view is not None:
            self.view.note(_harmless(text))

    def warn(self, text: str) -> None:
        """Show a warning above the display, or on stderr if the display is off."""
        if self.view is not None:
            self.view.warn(_harmless(text))
        else:
            SafeStream(sys.stderr).write(f"warning: {_harmless(text)}\n")

    def show_samples(self, title: str, rows: Sequence[ShownSample]) -> None:
        """Show a few answers under a title."""
        if self.view is not None and rows:
            self.view.block(title, sample_lines(rows))

    def show_summary(self, summary: Mapping[str, Any]) -> None:
        """Show the outcome of the run; see `summary_lines`."""
        if self.view is not None:
            self.view.block("summary", [summary_lines(summary)])

    def close(self) -> None:
        """Stop the display and restore the terminal; may be called twice."""
        if self.view is not None:
            self.view.close()


def _pick(mode: Mode, stream: SafeStream) -> Mode:
    """Return the mode to use: `rich` needs a terminal that can draw, else it is `plain`."""
    can_draw = stream.isatty() and stream.holds_unicode and os.environ.get("TERM") != "dumb"
    return mode if mode in ("plain", "off") else "rich" if can_draw else "plain"


def _harmless(text: str) -> str:
    return "\n".join(visible(line) for line in text.splitlines())
