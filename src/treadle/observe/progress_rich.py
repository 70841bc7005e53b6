"""The display for terminals: one panel that stays at the bottom and is redrawn a few times a second."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from treadle.observe.progress_state import STEP_PHASES, Phase, RunState
from treadle.observe.report import Line
from treadle.observe.safe_stream import SafeStream
from treadle.observe.show_text import clock, number, sparkline
from treadle.printable_text import visible

if TYPE_CHECKING:
    from rich.text import Text

REFRESH_PER_SECOND = 3
MAX_WIDTH = 92
"""Maximum width of the panel in columns, because longer lines are hard to read."""
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_NAME, _VALUE, _QUIET, _WARN = "cyan", "bold", "dim", "yellow"


def panel(state: RunState, now: float, width: int, title: str) -> Any:
    """Return the panel of the current state; drawing it takes well under a millisecond."""
    from rich import box
    from rich.panel import Panel
    from rich.text import Text

    inner = max(20, min(width, MAX_WIDTH) - 4)
    rows: list[Text] = []
    if state.num_rollout:
        rows.append(_steps_row(state, now, inner))
    if state.latest:
        rows += _value_rows(state, inner)
    if state.last_eval:
        rows.append(_eval_row(state))
    if state.phase is not None:
        rows.append(_phase_row(state.phase, now))
    body = Text("\n", no_wrap=True, overflow="ellipsis").join(rows)
    body.no_wrap, body.overflow = True, "ellipsis"
    heading = Text(f" {title} ", style="bold")
    foot = Text(f" {clock(now - state.started)} ", style=_QUIET)
    return Panel(
        body,
        box=box.ROUNDED,
        width=inner + 4,
        title=heading,
        title_align="left",
        subtitle=foot,
        subtitle_align="right",
        border_style="blue",
    )


def _steps_row(state: RunState, now: float, inner: int) -> Text:
    from rich.text import Text

    share = state.num_done / state.num_rollout
    left = state.seconds_left(now)
    head = f"step {state.num_done}/{state.num_rollout} "
    tail = f" {100 * share:3.0f}%" + ("" if left is None or share >= 1 else f"  {clock(left)} left")
    size = max(5, inner - len(head) - max(len(tail), 18))
    full = round(share * size)
    row = Text(head, style="bold")
    row.append("━" * full, "green" if share >= 1 else "blue")
    row.append("━" * (size - full), "bright_black")
    row.append(tail, "" if left is None else _VALUE)
    return row


def _value_rows(state: RunState, inner: int) -> list[Text]:
    from rich.text import Text

    values = state.latest
    reward = Text()
    _cell(reward, "reward", number(values.get("rollout/reward_mean")), 18)
    best = state.best_reward
    if best is not None:
        tail = f"  best {number(best)}"
        reward.append(sparkline(state.rewards, max(5, inner - 18 - len(tail) - 2)), "green")
        reward.append(tail, _QUIET)
    policy = Text()
    _cell(policy, "length", f"{number(values.get('rollout/response_length_mean'))} tokens", 24)
    _cell(policy, "entropy", number(values.get("train/entropy")), 24)
    _cell(policy, "logprob gap", number(values.get("train/rollout_logprob_abs_diff")), 20)
    speed = Text()
    _cell(speed, "rollout", f"{number(values.get('rollout/tokens_per_second'))} tok/s", 24)
    _cell(speed, "training", f"{number(values.get('train/tokens_per_second'))} tok/s", 24)
    _cell(speed, "step", clock(state.step_seconds[-1] if state.step_seconds else None), 20)
    memory = values.get("perf/memory_gib")
    if memory is not None and inner >= 84:
        _cell(speed, "memory", f"{memory:.1f} GiB", 16)
    rows = [reward, policy, speed]
    troubles = state.troubles()
    if troubles:
        row = Text()
        for word, count in troubles:
            row.append(f"{word} {count}   ", _WARN)
        rows.append(row)
    return rows


def _cell(row: Text, name: str, value: str, width: int) -> None:
    """Add `name value`, filled up to `width` columns, so that the cells of all rows line up."""
    row.append(f"{name} ", _NAME)
    row.append(value, _VALUE)
    row.append(" " * max(2, width - len(name) - 1 - len(value)))


def _eval_row(state: RunState) -> Text:
    from rich.text import Text

    row = Text("eval", _NAME)
    for name, last in state.last_eval.items():
        first = state.first_eval[name]
        row.append(f"  {visible(name)} ")
        if first != last:
            row.append(f"{number(first)} → ", _QUIET)
        row.append(number(last), "bold green" if last > first else "bold red" if last < first else _VALUE)
    return row


def _phase_row(phase: Phase, now: float) -> Text:
    from rich.text import Text

    elapsed = now - phase.started
    row = Text(f"{SPINNER[int(elapsed * REFRESH_PER_SECOND) % len(SPINNER)]} ", "green")
    row.append(visible(phase.name), "bold")
    if phase.count:
        row.append(f" {phase.count}")
    if phase.done is not None and phase.total:
        full = min(20, round(20 * phase.done / phase.total))
        row.append("  " + "━" * full, "green")
        row.append("━" * (20 - full), "bright_black")
    row.append(f"  {clock(elapsed)}", _QUIET)
    return row


class RichView:
    """Draws the panel from a thread of its own; notes appear above it.

    rich's lock is always taken before `state_lock`: nothing here prints while holding the latter.
    """

    def __init__(self, stream: SafeStream, state: RunState, state_lock: threading.Lock, title: str):
        from rich.console import Console
        from rich.live import Live

        self._state, self._lock, self._title = state, state_lock, title
        self._num_steps = 0
        self._closed = False
        self._console = Console(file=stream, highlight=False, markup=False, emoji=False)  # type: ignore[arg-type]
        self._live = Live(
            console=self._console,
            get_renderable=self._draw,
            refresh_per_second=REFRESH_PER_SECOND,
            vertical_overflow="crop",
        )

    def _draw(self) -> Any:
        with self._lock:
            return panel(self._state, time.monotonic(), self._console.width, self._title)

    def _show_panel(self) -> None:
        if not self._closed and not self._live.is_started:
            atexit.register(self.close)  # the cursor is hidden while the panel is up
            self._live.start(refresh=True)

    def _print(self, text: str, style: str = "") -> None:
        from rich.text import Text

        self._console.print(Text(text, style=style))

    def begin(self, state: RunState) -> None:
        if state.num_done:
            self._print(f"resumed: {state.num_done} of {state.num_rollout} steps are done", _QUIET)
        self._show_panel()

    def phase_began(self, state: RunState, phase: Phase, ended: Phase | None) -> None:
        self._show_panel()
        if ended is not None and self._num_steps == 0 and ended.name not in STEP_PHASES:
            self._print(f"✓ {visible(ended.name)}  {clock(phase.started - ended.started)}", _QUIET)

    def phase_moved(self, state: RunState, phase: Phase) -> None:
        return

    def step(self, state: RunState) -> None:
        self._num_steps += 1

    def evaluated(self, rollout_id: int, found: Mapping[str, float], first: Mapping[str, float]) -> None:
        return

    def note(self, text: str) -> None:
        self._print(text)

    def warn(self, text: str) -> None:
        self._print(f"warning: {text}", _WARN)

    def block(self, title: str, parts: Sequence[Sequence[Line]]) -> None:
        """Print blocks of named lines, each name in the margin."""
        from rich.padding import Padding
        from rich.rule import Rule
        from rich.table import Table
        from rich.text import Text

        width = min(self._console.width, MAX_WIDTH)
        self._console.print()
        self._console.print(Rule(Text(title, style="bold"), align="left", style="blue"), width=width)
        for part in parts:
            table = Table.grid(padding=(0, 2))
            for line in part:
                table.add_row(Text(line.name, style=_NAME), Text(line.text, style=line.style, overflow="fold"))
            self._console.print(Padding(table, (0, 0, 1, 1)), width=width)

    def close(self) -> None:
        """Leave the last panel on the screen, and the terminal as it was."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        with self._lock:
            self._state.phase = None
        self._live.stop()
