"""Compare finished runs of the recipes in recipes/algorithms: a table and one picture of their reward curves.

    for name in grpo dr_grpo …; do treadle train recipes/algorithms/$name.toml --run-dir runs/algorithms/$name; done
    python benches/compare_algorithms.py runs/algorithms --picture docs/algorithms/curves.png

Prints a Markdown table, then one JSON line with the same numbers.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean, median

ORDER = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_plus_plus", "ppo")
LAST = 5


def read(folder: Path) -> dict:
    """The numbers of one run: rewards by rollout, held-out accuracy before and after, median seconds of a step."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    evals = [v for row in rows for k, v in row.items() if k.startswith("eval/") and k.endswith("/accuracy")]
    steps = [row for row in rows if "rollout/reward_mean" in row]
    return {
        "rewards": [row["rollout/reward_mean"] for row in steps],
        "before": evals[0],
        "after": evals[-1],
        "entropy": [row["train/entropy"] for row in steps if "train/entropy" in row][-1],
        "seconds": median(row["perf/step_seconds"] for row in steps),
    }


def table(runs: dict[str, dict]) -> str:
    """A Markdown table; seconds are a ratio to GRPO's, for machines differ."""
    lines = [
        f"| algorithm | reward, first rollout | mean of the last {LAST} | best | held-out before → after | entropy at the end | time of a step, GRPO = 1 |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, run in runs.items():
        rewards, ratio = run["rewards"], run["seconds"] / runs["grpo"]["seconds"]
        lines.append(
            f"| [{name}]({name}.md) | {rewards[0]:.2f} | {mean(rewards[-LAST:]):.2f} | {max(rewards):.2f} "
            f"| {run['before']:.2f} → {run['after']:.2f} | {run['entropy']:.2f} | {ratio:.1f} |"
        )
    return "\n".join(lines)


def draw(runs: dict[str, dict], path: Path) -> None:
    """All reward curves, a mean of three rollouts each."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5.5), dpi=110)
    axes = figure.subplots()
    for name, run in runs.items():
        rewards = run["rewards"]
        smooth = [mean(rewards[max(0, i - 1) : i + 2]) for i in range(len(rewards))]
        axes.plot(smooth, label=f"{name}: held-out {run['before']:.2f} → {run['after']:.2f}", linewidth=2)
    axes.set(xlabel="rollout", ylabel="mean reward (of three rollouts)", ylim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, loc="lower right")
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folder", type=Path, help="folder with one run folder for each algorithm, named like its recipe"
    )
    parser.add_argument("--picture", type=Path, help="PNG to draw")
    given = parser.parse_args()
    runs = {name: read(given.folder / name) for name in ORDER if (given.folder / name / "summary.json").is_file()}
    if "grpo" not in runs:
        raise SystemExit(f"no finished run {given.folder / 'grpo'}: the others are compared with it")
    print(table(runs))
    if given.picture is not None:
        draw(runs, given.picture)
    short = {name: {"last": mean(run["rewards"][-LAST:]), "after": run["after"]} for name, run in runs.items()}
    print(json.dumps({"bench": "compare_algorithms", "runs": short}))


if __name__ == "__main__":
    main()
