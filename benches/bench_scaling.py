"""How time and memory grow: generation and a train step at 1×, 2× and 4× the samples, and at 1×, 2× and 4× the tokens.

    python benches/bench_scaling.py [--repeats 3]

Each size runs in a process of its own, so that its peak memory is its own. Prints a table (the one in docs/performance.md), then one
JSON line: what 4× the work costs in time over 1×, for each row of the table.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from sides import Side, Work, median

HERE = Path(__file__).parent
GENERATE, TRAIN = HERE / "bench_generate.py", HERE / "bench_train_step.py"


def measure(script: Path, work: Work, env: dict[str, str], repeats: int) -> dict[str, float]:
    side = Side("treadle", script, env=env)
    answers = [side.run({**work, "seed": seed}) for seed in range(repeats + 1)][1:]  # the first one warms up
    side.close()
    return {"seconds": median(answers), "peak_gib": median(answers, "peak_gib")}


def works(base: int) -> dict[str, tuple[Path, list[Work]]]:
    """The rows of the table: what grows, and its three sizes."""
    return {
        "generate, samples": (GENERATE, [{"prompts": base * k, "samples": 8, "new": 48} for k in (1, 2, 4)]),
        "generate, new tokens": (GENERATE, [{"prompts": base, "samples": 8, "new": 48 * k} for k in (1, 2, 4)]),
        "train, samples": (TRAIN, [{"groups": base * k, "prompt": 54, "responses": [28, 64]} for k in (1, 2, 4)]),
        "train, response tokens": (
            TRAIN,
            [{"groups": base, "prompt": 54, "responses": [28 * k, 64 * k]} for k in (1, 2, 4)],
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="bundled name or model folder")
    parser.add_argument("--base", type=int, default=8, help="prompts at 1×")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    from treadle.models.bundled import resolve

    env = {"BENCH_MODEL": str(resolve(args.model)), "BENCH_DTYPE": "bfloat16"}
    growth = {}
    print("| what grows | seconds at 1×, 2×, 4× | peak GiB at 1×, 2×, 4× |\n|---|---|---|")
    for name, (script, sizes) in works(args.base).items():
        found = [measure(script, work, env, args.repeats) for work in sizes]
        growth[name] = round(found[-1]["seconds"] / found[0]["seconds"], 2)
        cells = [", ".join(f"{one[key]:.2f}" for one in found) for key in ("seconds", "peak_gib")]
        print(f"| {name} | {cells[0]} | {cells[1]} |", flush=True)
    print(
        json.dumps({"bench": "scaling", "work": f"{args.base} prompts × 8 samples at 1×", "time of 4x over 1x": growth})
    )


if __name__ == "__main__":
    main()
