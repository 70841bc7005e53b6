"""Sampled answers and the outcome of a run, as lines of plain text."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treadle.observe.show_text import clock, number, shorten_middle
from treadle.printable_text import visible

MAX_TEXT = 320


@dataclass(frozen=True, slots=True)
class ShownSample:
    """One answer to show; `reward` is None if it could not be scored."""

    prompt: str
    answer: str
    label: Any = None
    reward: float | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """One row of a report: a name and its text. `style` is a rich style, used on terminals only."""

    name: str
    text: str
    style: str = ""


def sample_lines(samples: Sequence[ShownSample]) -> list[list[Line]]:
    """Return each sample as a block of lines, with its texts shortened in the middle and escaped."""
    blocks = []
    for sample in samples:
        good = sample.reward is not None and sample.reward > 0
        block = [
            Line("prompt", visible(shorten_middle(sample.prompt.strip(), MAX_TEXT)), "dim"),
            Line("answer", visible(shorten_middle(sample.answer.strip(), MAX_TEXT)) or "(empty)", "bold"),
        ]
        if sample.label is not None:
            block.append(Line("label", visible(shorten_middle(str(sample.label).strip(), MAX_TEXT))))
        reward = "failed" if sample.reward is None else number(sample.reward)
        block.append(Line("reward", reward, "green" if good else "red"))
        blocks.append(block)
    return blocks


def summary_lines(summary: Mapping[str, Any]) -> list[Line]:
    """Return the outcome of a run as lines.

    Args:
        summary: what `summarize` returns, and the paths `curve` and `run_folder` if there are any.
    """
    lines = []
    after = summary.get("eval_after") or {}
    for name, before in (summary.get("eval_before") or {}).items():
        last = after.get(name)
        text = number(before) if last is None else f"{number(before)} → {number(last)}"
        style = "" if last is None or last == before else "bold green" if last > before else "bold red"
        lines.append(Line(f"eval {visible(name)}", text, style))
    first, last, best = (summary.get(f"reward_{which}") for which in ("first", "last", "best"))
    if first is not None:
        lines.append(Line("reward", f"{number(first)} → {number(last)}   best {number(best)}"))
    if summary.get("seconds") is not None:
        lines.append(Line("time", f"{clock(summary['seconds'])} for {summary.get('num_rollout', 0)} rollouts"))
    speeds = [
        f"{part} {number(summary[key])} tokens/s"
        for part, key in (("rollout", "rollout_tokens_per_second"), ("training", "train_tokens_per_second"))
        if summary.get(key) is not None
    ]
    if speeds:
        lines.append(Line("speed", "   ".join(speeds)))
    if summary.get("peak_memory_gib") is not None:
        lines.append(Line("peak memory", f"{summary['peak_memory_gib']:.1f} GiB"))
    for kind, (awake, asleep) in (summary.get("turn_memory_gib") or {}).items():
        lines.append(Line(f"{kind} memory", f"{awake:.1f} GiB at most in its turn, {asleep:.1f} GiB asleep"))
    for key, what in COUNTS:
        if summary.get(key):
            lines.append(Line(what, str(summary[key]), "yellow"))
    for key in ("curve", "run_folder"):
        if summary.get(key) is not None:
            lines.append(Line(key.replace("_", " "), visible(str(summary[key])), "cyan"))
    return lines


COUNTS = (
    ("num_failed_samples", "failed samples"),
    ("num_dropped_samples", "dropped samples"),
    ("num_failed_eval_answers", "failed answers"),
    ("num_skipped_steps", "skipped steps"),
)


def plain_block(lines: Sequence[Line], width: int) -> list[str]:
    """Return lines as aligned plain text, wrapped to `width` characters."""
    margin = max((len(line.name) for line in lines), default=0) + 4
    out = []
    for line in lines:
        rows = textwrap.wrap(line.text, max(20, width - margin), break_long_words=True) or [""]
        if line.style == "cyan":
            rows = [line.text]  # a path is for copying: never broken
        out += [f"  {line.name if row == 0 else '':<{margin - 2}}{text}" for row, text in enumerate(rows)]
    return out
