"""Time the pure functions at the size of a large rollout: GAE, whitening, group statistics; against plain loops.

    python benches/bench_algorithms.py

Prints one line each, then one JSON line: best of the repeats in milliseconds, and the ratio to a Python loop on the same
numbers (a tenth of them, scaled up).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import torch

from treadle.algorithms.advantages import whiten, whitening_sums
from treadle.algorithms.gae import gae
from treadle.algorithms.shaping import grpo_rewards

TOKENS, LENGTH, SAMPLES, GROUP = 65_536, 1024, 100_000, 8
REPEATS = 20


def best_ms(run: Callable[[], object], repeats: int = REPEATS) -> float:
    """Milliseconds of the fastest of several runs."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def loop_gae(rewards: list[float], values: list[float], length: int, gamma: float, lambd: float) -> list[float]:
    out = [0.0] * len(rewards)
    for start in range(0, len(rewards), length):
        carry = 0.0
        for t in range(min(start + length, len(rewards)) - 1, start - 1, -1):
            following = values[t + 1] if t + 1 < min(start + length, len(rewards)) else 0.0
            carry = rewards[t] + gamma * following - values[t] + gamma * lambd * carry
            out[t] = carry
    return out


def loop_groups(rewards: list[float]) -> list[float]:
    out = []
    for start in range(0, len(rewards), GROUP):
        group = rewards[start : start + GROUP]
        mean = sum(group) / len(group)
        std = (sum((r - mean) ** 2 for r in group) / (len(group) - 1)) ** 0.5
        out += [(r - mean) / (std + 1e-6) for r in group]
    return out


def loop_whiten(values: list[float]) -> list[float]:
    mean = sum(values) / len(values)
    scale = (sum((v - mean) ** 2 for v in values) / (len(values) - 1) + 1e-8) ** -0.5
    return [(v - mean) * scale for v in values]


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, TOKENS, generator=generator)
    index = torch.arange(TOKENS) // LENGTH
    scores = torch.rand(SAMPLES, generator=generator)
    groups = torch.randperm(SAMPLES, generator=generator) // GROUP
    work: dict[str, tuple[Callable[[], object], Callable[[], object], float]] = {
        f"gae, {TOKENS} tokens in samples of {LENGTH}": (
            lambda: gae(rewards, values, index, None, 0.99, 0.95),
            lambda: loop_gae(rewards[: TOKENS // 8].tolist(), values[: TOKENS // 8].tolist(), LENGTH, 0.99, 0.95),
            8.0,
        ),
        f"group statistics, {SAMPLES} samples": (
            lambda: grpo_rewards(scores, groups),
            lambda: loop_groups(scores[: SAMPLES // 10].tolist()),
            10.0,
        ),
        f"whitening, {SAMPLES} numbers": (
            lambda: whiten(scores, whitening_sums(scores)),
            lambda: loop_whiten(scores[: SAMPLES // 10].tolist()),
            10.0,
        ),
    }
    found: dict[str, dict[str, float]] = {}
    for name, (ours, loop, scale) in work.items():
        fast, slow = best_ms(ours), best_ms(loop, 3) * scale
        found[name] = {"ms": round(fast, 2), "loop_ms": round(slow, 1), "ratio": round(slow / fast, 1)}
        print(f"{name}: {fast:.2f} ms, a Python loop {slow:.0f} ms")
    print(json.dumps({"bench": "algorithms", "work": found}))


if __name__ == "__main__":
    main()
