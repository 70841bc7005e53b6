"""The picture of a run: reward and evaluation accuracy over rollouts, entropy and length below."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from treadle.observe.metric_lines import read_metrics
from treadle.observe.summary import accuracies, series
from treadle.storage.atomic_file import write_atomically

Points = Sequence[tuple[int, float]]

INK, MUTED, GRID = "#1f2933", "#7b8794", "#e4e7eb"
REWARD = "#2563eb"
EVAL_COLOURS = ("#d9480f", "#2b8a3e", "#9c36b5", "#b8860b", "#0b7285", "#c2255c")
SMALL = (
    ("train/entropy", "entropy (nats)", "#6741d9"),
    ("rollout/response_length_mean", "response length (tokens)", "#0b7285"),
)


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Return the mean over the `window` values around each value.

    Near the ends the window shrinks on both sides, so that the curve is not shifted.

    >>> smoothed([0.0, 3.0, 9.0, 9.0], 3)
    [1.5, 4.0, 7.0, 9.0]
    """
    found = []
    for at in range(len(values)):
        half = min(window // 2, min(at, len(values) - 1 - at) + 1)
        part = values[max(0, at - half) : at + half + 1]
        found.append(math.fsum(part) / len(part))
    return found


def with_gaps(points: Points) -> tuple[list[float], list[float]]:
    """Return x and y of a line that breaks at missing rollouts.

    >>> with_gaps([(0, 1.0), (1, 2.0), (4, 3.0)])
    ([0.0, 1.0, 2.0, 4.0], [1.0, 2.0, nan, 3.0])
    """
    xs: list[float] = []
    ys: list[float] = []
    for x, y in points:
        if xs and x > xs[-1] + 1:
            xs.append(xs[-1] + 1)
            ys.append(math.nan)
        xs.append(float(x))
        ys.append(y)
    return xs, ys


def draw_curve(metrics_path: Path, out_png: Path, title: str = "") -> Path | None:
    """Draw the metrics of a run and return the picture's path.

    Returns None, and writes nothing, if there is neither a reward nor an evaluation to draw.
    """
    rows = read_metrics(metrics_path)
    rewards, evals = series(rows, "rollout/reward_mean"), accuracies(rows)
    if not rewards and not evals:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    small = [(label, colour, points) for name, label, colour in SMALL if (points := series(rows, name))]
    figure = Figure(
        figsize=(8, 5.6 if small else 4),
        dpi=140,
        layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1),
        facecolor="white",
    )
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2 if small else 1, max(1, len(small)), height_ratios=[2.3, 1] if small else [1])
    main = figure.add_subplot(grid[0, :])
    _draw_main(main, rewards, evals, title or metrics_path.resolve().parent.name)
    last = max(x for points in (rewards, *evals.values()) for x, _ in points)
    for column, (label, colour, points) in enumerate(small):
        axes = figure.add_subplot(grid[1, column])
        _line(axes, points, colour)
        _dress(axes, last)
        axes.set_title(label, fontsize=9, color=INK, loc="left")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    write_atomically(out_png, [buffer.getvalue()])
    return out_png


def _draw_main(axes: Any, rewards: Points, evals: Mapping[str, Points], title: str) -> None:
    from matplotlib.patheffects import withStroke

    if rewards:
        xs, ys = with_gaps(rewards)
        window = min(25, max(5, len(rewards) // 10 * 2 + 1))
        is_long = len(rewards) >= 6
        faint = {"color": REWARD, "alpha": 0.35, "linewidth": 1.1} if is_long else {"color": REWARD, "linewidth": 2}
        axes.plot(xs, ys, marker="o", markersize=3.5 if len(rewards) <= 60 else 0, label="reward", **faint)
        if is_long:
            flat = smoothed([y for _, y in rewards], window)
            xs, ys = with_gaps([(x, y) for (x, _), y in zip(rewards, flat, strict=True)])
            axes.plot(xs, ys, color=REWARD, linewidth=2.4, label=f"reward, mean of {window}")
    for number, (name, points) in enumerate(evals.items()):
        colour = EVAL_COLOURS[number % len(EVAL_COLOURS)]
        dashed = {"color": colour, "linewidth": 1.4, "linestyle": (0, (4, 2)), "zorder": 4}
        diamond = {"marker": "D", "markersize": 6, "markeredgecolor": "white"}
        axes.plot(*zip(*points, strict=True), label=f"accuracy on {_plain(name)}", **dashed, **diamond)
        for x, y in {points[0], points[-1]}:
            look = {"color": colour, "fontsize": 8.5, "fontweight": "bold", "ha": "center", "zorder": 5}
            halo = [withStroke(linewidth=2.5, foreground="white")]
            axes.annotate(f"{y:.2f}", (x, y), xytext=(0, 8), textcoords="offset points", path_effects=halo, **look)
    every = [y for points in (rewards, *evals.values()) for _, y in points]
    _dress(axes, max(x for points in (rewards, *evals.values()) for x, _ in points))
    if min(every) >= 0 and max(every) <= 1:
        axes.set_ylim(0, min(1.05, max(every) * 1.15 + 0.03))
    else:
        axes.margins(y=0.12)
    axes.set_title(_plain(title), fontsize=11, color=INK, loc="left", fontweight="bold")
    axes.set_xlabel("rollout", fontsize=9, color=MUTED)
    axes.legend(frameon=False, fontsize=8.5, labelcolor=INK, loc="best")


def _line(axes: Any, points: Points, colour: str) -> None:
    xs, ys = with_gaps(points)
    axes.plot(xs, ys, color=colour, linewidth=1.5, marker="o", markersize=2.5 if len(points) <= 60 else 0)
    axes.margins(y=0.15)


def _dress(axes: Any, last: int) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlim(-0.03 * max(1, last) - 0.2, last + 0.03 * max(1, last) + 0.2)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, labelsize=8.5, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(MUTED)


def _plain(text: str) -> str:
    """Escape dollar signs, which begin a formula in matplotlib."""
    return text.replace("$", r"\$")
