"""Time the planner of ranks and micro-batches on a large rollout, and measure how good its plans are.

    python benches/bench_packing.py [--peer verl]

Log-normal prompts and responses, groups of 8. Prints a table, then one JSON line. `alone` is the same samples without
groups, each with its own prompt: what a planner that does not share prompts has to plan. The peer must be importable;
it is timed once, on the smallest size, without its copying of tensors. Seconds are of the processor, in one thread.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from treadle.models.layout import Family, PackedLayout
from treadle.training.load_balancing import RankPlan, Workload, plan_ranks

SIZES = (25_088, 50_176, 100_352)  # multiples of ranks × group: the peer deals out equal numbers of samples
RANKS, GROUP, MAX_TOKENS = 64, 8, 16_384
REPEATS = 5


@dataclass(frozen=True)
class Outcome:
    """Processor seconds of planning, and what the plan is like."""

    seconds: float
    heaviest_over_mean: float  # tokens of ranks
    micro_batches: int
    lower_bound: int  # all tokens, each prompt once, over the limit
    rank_lower_bound: int  # the same for each rank with what it feeds; the most of any rank where counts are equal
    empty: int
    repeated_prompts: float  # tokens fed again because a group was broken up, of all
    unfilled: float  # room below the limit, of all room: not fed, not computed
    padding: float  # of the tokens in rows
    tokens: int


def rollout(num_samples: int, seed: int = 0) -> Workload:
    """Prompts of about 290 tokens, responses of about 900, up to 8192."""
    generator = np.random.default_rng(seed)
    shared = np.clip(generator.lognormal(5.5, 0.6, num_samples // GROUP), 8, 4096).astype(np.int64)
    own = np.clip(generator.lognormal(6.5, 0.8, num_samples), 1, 8192).astype(np.int64)
    return Workload(np.arange(num_samples) // GROUP, shared, own)


def alone(work: Workload) -> Workload:
    """The same samples, each a group of its own."""
    return Workload(np.arange(len(work.own)), work.shared[work.groups], work.own)


def timed(work: Workload, same_count: bool) -> Outcome:
    """Best time of several, and the plan's measures."""
    seconds = []
    for _ in range(REPEATS):
        start = time.process_time()
        plans = plan_ranks(work, RANKS, MAX_TOKENS, same_count=same_count)
        seconds.append(time.process_time() - start)
    return measured(work, plans, min(seconds), same_count)


def measured(work: Workload, plans: list[RankPlan], seconds: float, same_count: bool) -> Outcome:
    """Check that a plan is one, and measure it."""
    held = sorted(i for plan in plans for samples in plan.micro_batches for i in samples)
    assert held == list(range(len(work.own))), "not every sample once"
    loads = np.array([sum(plan.num_tokens) for plan in plans])
    needed = -(-loads // MAX_TOKENS)
    count = sum(len(plan.micro_batches) for plan in plans)
    once = int(work.shared.sum() + work.own.sum())
    in_rows = sum(row_of(work, samples).num_tokens for plan in plans for samples in plan.micro_batches)
    return Outcome(
        seconds=round(seconds, 4),
        heaviest_over_mean=round(float(loads.max() / loads.mean()), 5),
        micro_batches=count,
        lower_bound=-(-once // MAX_TOKENS),
        rank_lower_bound=int(needed.max() * len(plans) if same_count else needed.sum()),
        empty=sum(not samples for plan in plans for samples in plan.micro_batches),
        repeated_prompts=round(float(loads.sum() / once - 1), 5),
        unfilled=round(float(1 - loads.sum() / (count * MAX_TOKENS)), 5),
        padding=round(float(1 - loads.sum() / in_rows), 5),
        tokens=int(loads.sum()),
    )


def row_of(work: Workload, samples: tuple[int, ...]) -> PackedLayout:
    """The row a micro-batch is packed into."""
    groups: dict[int, list[int]] = {}
    for i in samples:
        groups.setdefault(int(work.groups[i]), []).append(int(work.own[i]))
    return PackedLayout(tuple(Family(int(work.shared[group]), tuple(own)) for group, own in groups.items()))


# Peers


def verl_planner() -> ModuleType | str:
    """verl's module, or why it can't be had."""
    try:
        from verl.utils import seqlen_balancing
    except ImportError as error:
        return f"not importable: {error}"
    return seqlen_balancing


def verl(planner: ModuleType, work: Workload) -> Outcome:
    """verl's trainer: Karmarkar–Karp with as many samples for each rank, then in each rank for micro-batches."""
    import torch
    from tensordict import TensorDict

    planner.tu.index_select_tensor_dict = lambda batch, indices: indices
    lengths = (work.shared[work.groups] + work.own).tolist()
    seconds = 0.0
    plans = []
    start = time.process_time()
    shares = planner.get_seqlen_balanced_partitions(lengths, RANKS, equal_size=True)
    seconds += time.process_time() - start
    for share in shares:
        rows = [torch.zeros(lengths[i], dtype=torch.uint8) for i in share]
        ids = torch.nested.nested_tensor(rows, layout=torch.jagged)
        batch = TensorDict({"input_ids": ids}, batch_size=[len(share)])
        start = time.process_time()
        _, parts = planner.rearrange_micro_batches(batch, MAX_TOKENS)
        seconds += time.process_time() - start
        held = tuple(tuple(share[i] for i in part) for part in parts)
        plans.append(RankPlan(held, tuple(sum(lengths[i] for i in samples) for samples in held)))
    return measured(work, plans, seconds, same_count=False)


# The bench


def line(name: str, found: Outcome) -> str:
    return (
        f"{name:34} {found.seconds:8.3f} s {found.heaviest_over_mean:9.4f} {found.micro_batches:7d} {found.lower_bound:7d} {found.rank_lower_bound:7d}"
        f" {found.repeated_prompts:9.2%} {found.unfilled:9.2%} {found.padding:8.2%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peer", action="append", default=[], choices=["verl"])
    peers = parser.parse_args().peer
    print(f"{RANKS} ranks, groups of {GROUP}, at most {MAX_TOKENS} tokens a micro-batch")
    print(
        f"{'samples':34} {'plan':>10} {'max/mean':>9} {'batches':>7} {'bound':>7} {'of ranks':>7} {'repeated':>9} {'unfilled':>9} padding"
    )
    ours: dict[str, dict[str, float]] = {}
    for size in SIZES:
        for name, work, same_count in (
            (f"{size}", rollout(size), False),
            (f"{size}, same count", rollout(size), True),
            (f"{size}, alone", alone(rollout(size)), False),
        ):
            found = timed(work, same_count)
            ours[name] = vars(found)
            print(line(name, found), flush=True)
    theirs: dict[str, dict[str, object]] = {}
    ratios: dict[str, dict[str, float]] = {}
    for peer in peers:
        planner = verl_planner()
        if isinstance(planner, str):
            theirs[peer] = {"skipped": planner}
            print(f"{peer}: {planner}")
            continue
        size = SIZES[0]
        found = verl(planner, alone(rollout(size)))
        print(line(f"{size}, {peer}", found))
        theirs[peer] = {"samples": size, **vars(found)}
        same, grouped = Outcome(**ours[f"{size}, alone"]), Outcome(**ours[f"{size}"])  # type: ignore[arg-type]
        ratios[peer] = {
            "plan_seconds": round(found.seconds / same.seconds, 1),
            "heaviest_over_mean": round(found.heaviest_over_mean / same.heaviest_over_mean, 4),
            "micro_batches": round(found.micro_batches / same.micro_batches, 4),
            "micro_batches_with_groups": round(found.micro_batches / grouped.micro_batches, 4),
            "heaviest_rank_tokens_with_groups": round(
                found.tokens * found.heaviest_over_mean / (grouped.tokens * grouped.heaviest_over_mean), 4
            ),
        }
    setting = {
        "sizes": SIZES,
        "ranks": RANKS,
        "group": GROUP,
        "max_tokens": MAX_TOKENS,
        "python": platform.python_version(),
    }
    print(json.dumps({"bench": "packing", "work": setting, "ours": ours, "peers": theirs, "ratios": ratios}))


if __name__ == "__main__":
    main()
