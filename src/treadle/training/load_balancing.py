"""Which rank trains which samples, and which samples share a micro-batch.

Samples of a group share their prompt: it is fed once in each micro-batch that holds some of them. So groups are
spread whole, the largest first and each to the emptiest place (Graham's LPT), and only what does not fit is broken
up, which feeds its prompt again. The same procedure fills ranks and, within a rank, micro-batches; where it finds
no room, best fit decreasing does the same with the fullest place that has room.

Everything is decided by sizes alone: equal inputs in another order give equal loads.
Axis letters: `S` samples, `G` groups.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

TOLERANCE = 0.02
"""How far the heaviest rank may be over the mean before a better balance is searched for."""
SEARCH_STEPS = 8
"""How often the load asked of the heaviest rank is halved towards the mean."""


@dataclass(frozen=True)
class Workload:
    """The cost of samples: `shared` tokens of each group's prompt, `own` tokens of each sample, and each sample's group in `groups`."""

    groups: Int[np.ndarray, " S"]  # index into `shared`
    shared: Int[np.ndarray, " G"]
    own: Int[np.ndarray, " S"]


@dataclass(frozen=True)
class RankPlan:
    """The micro-batches of one rank, from large to small: the samples of each and the tokens it feeds."""

    micro_batches: tuple[tuple[int, ...], ...]
    num_tokens: tuple[int, ...]


class _Unit(NamedTuple):
    """Samples of one group that stay together, and their size in the measure at hand."""

    group: int
    samples: tuple[int, ...]
    size: float


class _Measure:
    """One measure of work (tokens, or an estimate of time): of each prompt and of each sample beyond it."""

    def __init__(self, heads: np.ndarray, parts: np.ndarray):
        self.heads, self.parts = heads.tolist(), parts.tolist()

    def unit(self, group: int, samples: tuple[int, ...]) -> _Unit:
        return _Unit(group, samples, self.heads[group] + sum([self.parts[i] for i in samples]))

    def of(self, units: list[_Unit]) -> float:
        """Return the size of units that are fed together; a prompt that they share counts once."""
        heads = sum([self.heads[group] for group in {unit.group for unit in units}])
        return heads + sum([self.parts[i] for unit in units for i in unit.samples])


def _descending(units: list[_Unit]) -> list[_Unit]:
    return sorted(units, key=itemgetter(2), reverse=True)  # by size; stable


def plan_ranks(
    work: Workload,
    num_ranks: int,
    max_tokens: int,
    *,
    same_count: bool = False,
    similar_lengths: bool = False,
    attention_cost: float = 0.0,
    at_least: int = 0,
) -> list[RankPlan]:
    """Give every sample to one rank, and cut each rank's share into few micro-batches of at most `max_tokens`.

    A micro-batch is over the limit only if a single sample is. With `same_count` every rank has as many
    micro-batches as the others, empty ones if it has too little to do: ranks that exchange gradients in every
    pass would wait for ever otherwise. With `similar_lengths` a micro-batch holds samples of like length (attention
    that lays them side by side has no padding) and there are more of them. Ranks are balanced in tokens;
    `attention_cost` adds what a pair of tokens costs that look at each other, in tokens: about 1 / (6 hidden size).
    With `at_least` a rank makes that many micro-batches, as far as it has samples for them.
    """
    assert num_ranks > 0
    assert max_tokens > 0
    tokens = _Measure(work.shared, work.own)
    cost = tokens
    if attention_cost:
        prompt = work.shared[work.groups]
        own = work.own * (1 + attention_cost * (prompt + work.own / 2))
        cost = _Measure(work.shared * (1 + attention_cost * work.shared / 2), own)
    units = [piece for unit in _whole_groups(work) for piece in _cut(unit, max_tokens, tokens)]
    shares = _shares(units, num_ranks, max_tokens, tokens, cost)
    kind = _similar_micro_batches if similar_lengths else _full_micro_batches

    def divide(share: list[_Unit], at_least: int = 0) -> list[list[_Unit]]:
        return kind(share, max_tokens, tokens, at_least)

    divided = [divide(share, at_least) for share in shares]
    loads = [sum(map(cost.of, found)) for found in divided]
    for rank, load in enumerate(loads):
        if load > sum(loads) / num_ranks * (1 + TOLERANCE):  # by prompts that are fed again; one more may spare them
            again = divide(shares[rank], len(divided[rank]) + 1)
            if sum(map(cost.of, again)) < load:
                divided[rank] = again
    if same_count:
        count = max(map(len, divided))
        divided = [
            divide(share, count) if len(found) < count else found for share, found in zip(shares, divided, strict=True)
        ]
        divided = [found + [[] for _ in range(count - len(found))] for found in divided]
    return [_rank_plan(micro_batches, tokens) for micro_batches in divided]


def _rank_plan(micro_batches: list[list[_Unit]], tokens: _Measure) -> RankPlan:
    sized = [(bool(units), int(tokens.of(units)), units) for units in micro_batches]
    sized.sort(key=lambda found: found[:2], reverse=True)  # empty ones last
    held = (tuple([i for unit in units for i in unit.samples]) for _, _, units in sized)
    return RankPlan(tuple(held), tuple(size for _, size, _ in sized))


# Units


def _whole_groups(work: Workload) -> list[_Unit]:
    """Return every group that has samples, in an order that depends on sizes only."""
    if not len(work.groups):
        return []
    order = np.lexsort((-work.own, work.groups))
    groups, own = work.groups[order], work.own[order]
    starts = np.flatnonzero(np.diff(groups, prepend=-1))
    bounds = [*starts.tolist(), len(order)]
    sizes = (work.shared[groups[starts]] + np.add.reduceat(own, starts)).tolist()
    samples, names = order.tolist(), groups[starts].tolist()
    # Big-endian bytes sort like the numbers, and a hundred thousand of them cost less than as many lists.
    heads, parts = work.shared.astype(">i8").tobytes(), own.astype(">i8").tobytes()
    found = [
        (heads[8 * group : 8 * group + 8] + parts[8 * a : 8 * b], _Unit(group, tuple(samples[a:b]), size))
        for group, a, b, size in zip(names, bounds, bounds[1:], sizes, strict=False)
    ]
    return [unit for _, unit in sorted(found, key=itemgetter(0), reverse=True)]


def _cut(unit: _Unit, limit: float, tokens: _Measure) -> list[_Unit]:
    """Return the unit, or pieces of it that fit into a micro-batch, with samples of similar length together."""
    if unit.size <= limit or len(unit.samples) == 1:
        return [unit]
    pieces: list[list[int]] = []
    room = 0.0
    for i in unit.samples:
        if not pieces or tokens.parts[i] > room:
            pieces.append([])
            room = limit - tokens.heads[unit.group]
        pieces[-1].append(i)
        room -= tokens.parts[i]
    return [tokens.unit(unit.group, tuple(piece)) for piece in pieces]


def _join(units: list[_Unit], max_tokens: int, tokens: _Measure, cost: _Measure) -> list[_Unit]:
    """Join units of the same group if the result fits into a micro-batch; sizes are costs."""
    if len({unit.group for unit in units}) == len(units):
        return units
    joined: list[_Unit] = []
    place: dict[int, int] = {}
    for unit in units:
        at = place.get(unit.group)
        both = unit.samples if at is None else joined[at].samples + unit.samples
        if at is not None and tokens.unit(unit.group, both).size <= max_tokens:
            joined[at] = cost.unit(unit.group, both)
        else:
            place[unit.group] = len(joined)
            joined.append(unit)
    return joined


def _dealt(unit: _Unit, num_pieces: int, measure: _Measure) -> list[_Unit]:
    """Deal a unit's samples round-robin, so that the pieces are about equal."""
    pieces = min(num_pieces, len(unit.samples))
    return [unit] if pieces == 1 else [measure.unit(unit.group, unit.samples[at::pieces]) for at in range(pieces)]


# Ranks


def _shares(units: list[_Unit], num_ranks: int, max_tokens: int, tokens: _Measure, cost: _Measure) -> list[list[_Unit]]:
    """Return the units of each rank: whole if that is balanced, else with the lightest heaviest rank that was found.

    The search asks for less and less (MULTIFIT) of whole units, of halves, of quarters, …
    """
    if num_ranks == 1:
        return [units]
    if cost is not tokens:
        units = [cost.unit(unit.group, unit.samples) for unit in units]
    units = _descending(units)
    mean = sum([unit.size for unit in units]) / num_ranks

    def joined(shares: list[list[_Unit]]) -> tuple[float, list[list[_Unit]]]:
        whole = [_join(share, max_tokens, tokens, cost) for share in shares]
        return max(sum([unit.size for unit in share]) for share in whole), whole

    spread = _spread(units, num_ranks, mean * (1 + TOLERANCE / 2), cost, strict=False)
    assert spread is not None
    heaviest, best = joined(spread)
    members = max((len(unit.samples) for unit in units), default=1)
    for halvings in range((members - 1).bit_length() + 1):
        if heaviest <= mean * (1 + TOLERANCE):
            break
        pieces = _descending([piece for unit in units for piece in _dealt(unit, 2**halvings, cost)])
        low, high = mean, heaviest
        for _ in range(SEARCH_STEPS):
            limit = (low + high) / 2
            spread = _spread_or_fit(pieces, num_ranks, limit, cost)
            if spread is None:
                low = limit
            else:
                high = limit
                heaviest, best = min((heaviest, best), joined(spread), key=itemgetter(0))
    return best if cost is tokens else [[tokens.unit(u.group, u.samples) for u in share] for share in best]


def _spread(
    units: list[_Unit], num_bins: int, limit: float, measure: _Measure, *, strict: bool
) -> list[list[_Unit]] | None:
    """Put each unit, large ones first, into the emptiest bin; units over the limit are broken up at the end.

    If `strict`, None if the limit can't be kept like that; only a single sample may be over it, alone.
    """
    bins: list[list[_Unit]] = [[] for _ in range(num_bins)]
    loads: list[tuple[float, int]] = [(0, b) for b in range(num_bins)]  # a heap
    left: list[_Unit] = []
    for unit in units:
        load, b = loads[0]
        if load + unit.size > limit and (bins[b] or len(unit.samples) > 1):
            left.append(unit)
        else:
            bins[b].append(unit)
            heapq.heapreplace(loads, (load + unit.size, b))
    return _with_rest(bins, loads, left, limit, measure, strict=strict)


def _spread_or_fit(units: list[_Unit], num_bins: int, limit: float, measure: _Measure) -> list[list[_Unit]] | None:
    """All units in that many bins within the limit, None if that is not found: about equal bins, or full ones if
    those break up less."""
    spread = _spread(units, num_bins, limit, measure, strict=True)
    if spread is not None and sum(map(len, spread)) == len(units):
        return spread
    fitted = _fit(units, num_bins, limit, measure)
    if spread is None and fitted is None:  # what is left at the end must be small samples
        units = sorted(units, key=lambda unit: max([measure.parts[i] for i in unit.samples]), reverse=True)
        return _fit(units, num_bins, limit, measure)
    found = [bins for bins in (spread, fitted) if bins is not None]
    return min(found, key=lambda bins: sum([unit.size for held in bins for unit in held]))


def _fit(units: list[_Unit], num_bins: int, limit: float, measure: _Measure) -> list[list[_Unit]] | None:
    """Put each unit, large ones first, into the fullest bin with room for it; units that fit nowhere are broken up at the end.

    None if the limit can't be kept like that.
    """
    bins: list[list[_Unit]] = []
    loads: list[tuple[float, int]] = []  # sorted
    left: list[_Unit] = []
    for unit in units:
        at = bisect_right(loads, (limit - unit.size, num_bins)) - 1
        if at >= 0:
            load, b = loads.pop(at)
        elif len(bins) < num_bins and (unit.size <= limit or len(unit.samples) == 1):
            load, b = 0.0, len(bins)
            bins.append([])
        else:
            left.append(unit)
            continue
        bins[b].append(unit)
        insort(loads, (load + unit.size, b))
    loads = sorted([*loads, *((0.0, b) for b in range(len(bins), num_bins))])  # a sorted list is a heap
    bins += [[] for _ in range(len(bins), num_bins)]
    return _with_rest(bins, loads, left, limit, measure, strict=True)


def _with_rest(
    bins: list[list[_Unit]],
    loads: list[tuple[float, int]],
    left: list[_Unit],
    limit: float,
    measure: _Measure,
    *,
    strict: bool,
) -> list[list[_Unit]] | None:
    """Return the bins with the samples of the remaining units; `loads` is a heap of (load, bin)."""
    for unit in left:
        pieces = _broken(unit, loads, limit, measure, strict=strict)
        if pieces is None:
            return None
        for b, samples in pieces.items():
            bins[b].append(measure.unit(unit.group, tuple(samples)))
    return bins


def _broken(
    unit: _Unit, loads: list[tuple[float, int]], limit: float, measure: _Measure, *, strict: bool
) -> dict[int, list[int]] | None:
    """Return which bins take which samples of a unit: the emptiest takes what fits, and so on; `loads` (a heap) is updated."""
    pieces: dict[int, list[int]] = {}
    rest = list(unit.samples)
    while rest:
        load, b = loads[0]
        load += 0 if b in pieces else measure.heads[unit.group]
        taken: list[int] = []
        kept: list[int] = []
        for i in rest:
            fits = load + measure.parts[i] <= limit
            (taken if fits else kept).append(i)
            load += measure.parts[i] if fits else 0
        if not taken:
            break
        rest = kept
        pieces.setdefault(b, []).extend(taken)
        heapq.heapreplace(loads, (load, b))
    if rest and strict:
        return None
    for i in rest:  # no bin has room: each to the emptiest
        load, b = loads[0]
        load += measure.parts[i] + (0 if b in pieces else measure.heads[unit.group])
        pieces.setdefault(b, []).append(i)
        heapq.heapreplace(loads, (load, b))
    return pieces


# Micro-batches


def _full_micro_batches(units: list[_Unit], max_tokens: int, measure: _Measure, at_least: int) -> list[list[_Unit]]:
    """Return as few micro-batches as can be found (but `at_least`), about equal if that is possible."""
    units = _descending(units)
    best = _best_fit(units, max_tokens)
    fewest = -int(-sum([unit.size for unit in units]) // max_tokens)
    low = min(max(fewest, at_least, 1), len(units))
    high = max(len(best), low)
    best = _spread_or_fit(units, high, max_tokens, measure) or best
    while low < high:
        middle = (low + high) // 2
        found = _spread_or_fit(units, middle, max_tokens, measure)
        if found is None:
            low = middle + 1
        else:
            best, high = found, middle
    return [held for held in best if held]


def _best_fit(units: list[_Unit], max_tokens: int) -> list[list[_Unit]]:
    """Put each unit, large ones first, into the fullest micro-batch that has room for it (best fit decreasing)."""
    bins: list[list[_Unit]] = []
    rooms: list[tuple[float, int]] = []  # sorted
    for unit in units:
        at = bisect_left(rooms, (unit.size, -1))
        room, b = rooms.pop(at) if at < len(rooms) else (max_tokens, len(bins))
        if b == len(bins):
            bins.append([])
        bins[b].append(unit)
        insort(rooms, (room - unit.size, b))
    return bins


def _similar_micro_batches(units: list[_Unit], max_tokens: int, measure: _Measure, at_least: int) -> list[list[_Unit]]:
    """Cut the units, ordered by length, into as few runs within the limit as there can be, and level them.

    A unit over the limit is a run of its own. The fewest runs stay as few under a lower limit; the lowest such
    limit makes the largest run as small as it can be.
    """
    units = sorted(units, key=lambda unit: (max([measure.parts[i] for i in unit.samples]), unit.size))
    runs = _runs(units, max_tokens)
    count = max(len(runs), at_least)
    low, high = 1, max_tokens
    while low < high:
        middle = (low + high) // 2
        tighter = _runs(units, middle)
        if len(tighter) > count:
            low = middle + 1
        else:
            runs, high = tighter, middle
    return runs


def _runs(units: list[_Unit], max_tokens: int) -> list[list[_Unit]]:
    """Fill runs one after another up to the limit."""
    runs: list[list[_Unit]] = []
    room = 0.0
    for unit in units:
        if not runs or unit.size > room:
            runs.append([])
            room = max_tokens
        runs[-1].append(unit)
        room -= unit.size
    return runs
