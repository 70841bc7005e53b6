"""What samples cost that share a micro-batch, and how a micro-batch lies in one packed row.

Samples of a group that are in the same micro-batch share their common prompt: it is computed once. The last token
of a sequence predicts nothing and is not fed at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from treadle.models.layout import Family, PackedLayout
from treadle.training.batch import Batch
from treadle.training.load_balancing import Workload, plan_ranks


@dataclass(frozen=True)
class PackedBatch:
    """A micro-batch as the model sees it; `K` counts trained tokens, `N` tokens fed.

    `predictors[k]` is the place in the row whose hidden state predicts trained token k, `tokens[k]` that token's
    place in the per-token fields of the batch.
    """

    layout: PackedLayout
    token_ids: Int[Tensor, " N"]
    predictors: Int[Tensor, " K"]
    tokens: Int[Tensor, " K"]
    targets: Int[Tensor, " K"]
    sample_index: Int[Tensor, " K"]
    temperatures: Float[Tensor, " K"]

    def to(self, device: torch.device) -> PackedBatch:
        """Return the same micro-batch with every tensor on `device`; itself if they are there already."""
        if device == self.layout.device:
            return self
        moved = {f.name: getattr(self, f.name).to(device) for f in fields(self) if f.name != "layout"}
        return replace(self, layout=PackedLayout(self.layout.families, device), **moved)


def pack(batch: Batch) -> PackedBatch:
    """Lay a batch out in one row; groups are found by id, wherever their samples are."""
    lengths, offsets = batch.lengths.tolist(), batch.offsets.tolist()
    token_ids, mask = batch.token_ids.numpy(), batch.loss_mask.numpy()
    families: list[Family] = []
    fed: list[np.ndarray] = []
    predictors: list[np.ndarray] = []
    trained: list[np.ndarray] = []
    at = 0
    for members in _groups(batch.group_ids.tolist()):
        shared = _shared_prefix(members, lengths, offsets, token_ids, mask)
        first = offsets[members[0]]
        fed.append(token_ids[first : first + shared])
        suffixes = []
        start = at + shared
        for i in members:
            own = max(0, lengths[i] - 1 - shared)
            fed.append(token_ids[offsets[i] + shared : offsets[i] + shared + own])
            places = np.flatnonzero(mask[offsets[i] : offsets[i] + lengths[i]])
            before = places - 1
            predictors.append(np.where(before < shared, at + before, start + before - shared))
            trained.append(offsets[i] + places)
            suffixes.append(own)
            start += own
        families.append(Family(shared, tuple(suffixes)))
        at = start
    tokens = torch.from_numpy(_joined(trained))
    sample_index = batch.sample_index[tokens]
    return PackedBatch(
        layout=PackedLayout(tuple(families)),
        token_ids=torch.from_numpy(_joined(fed)),
        predictors=torch.from_numpy(_joined(predictors)),
        tokens=tokens,
        targets=batch.token_ids[tokens],
        sample_index=sample_index,
        temperatures=batch.temperatures[sample_index],
    )


def empty_row() -> PackedBatch:
    """Return a row of one token without a target, which a rank runs to keep in step with the others."""
    none = torch.zeros(0, dtype=torch.int64)
    return PackedBatch(
        PackedLayout((Family(1, ()),)), torch.zeros(1, dtype=torch.int64), none, none, none, none, torch.zeros(0)
    )


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)


def _groups(group_ids: Sequence[int]) -> list[list[int]]:
    """Return the indices of each group's samples, groups in order of first appearance."""
    members: dict[int, list[int]] = {}
    for i, group in enumerate(group_ids):
        members.setdefault(group, []).append(i)
    return list(members.values())


def _shared_prefix(
    members: list[int], lengths: list[int], offsets: list[int], token_ids: np.ndarray, mask: np.ndarray
) -> int:
    """Tokens that all members begin with and none of them trains; the last token of a sequence is none of them."""
    for i in members:
        if lengths[i] and mask[offsets[i]]:
            raise ValueError(f"sample {i} trains its first token, which nothing predicts; begin it with a masked token")
    limit = max(0, min(lengths[i] for i in members) - 1)
    head = token_ids[offsets[members[0]] : offsets[members[0]] + limit]
    for i in members:
        part = slice(offsets[i], offsets[i] + limit)
        differs = np.flatnonzero((token_ids[part] != head[:limit]) | mask[part])
        limit = min(limit, int(differs[0]) if len(differs) else limit)
    return limit


def workload_of(batch: Batch) -> Workload:
    """Return the cost of a batch's samples, for the planner of ranks and micro-batches."""
    lengths, offsets = batch.lengths.tolist(), batch.offsets.tolist()
    token_ids, mask = batch.token_ids.numpy(), batch.loss_mask.numpy()
    shared: list[int] = []
    groups = np.zeros(len(batch), np.int64)
    for at, members in enumerate(_groups(batch.group_ids.tolist())):
        groups[members] = at
        shared.append(_shared_prefix(members, lengths, offsets, token_ids, mask))
    prompts = np.array(shared, np.int64)
    return Workload(groups, prompts, np.maximum(0, batch.lengths.numpy() - 1 - prompts[groups]))


def plan_micro_batches(
    batch: Batch,
    *,
    max_tokens: int | None,
    micro_batch_size: int | None,
    similar_lengths: bool = True,
    at_least: int = 0,
) -> list[list[int]]:
    """Split a batch's samples into micro-batches; returns the sample indices of each.

    With `max_tokens`, groups stay whole if they fit, micro-batches are balanced and none is over the limit unless
    a single sample is; `similar_lengths` and `at_least` as in `plan_ranks`. With `micro_batch_size`, that many samples each, in order.
    """
    assert (max_tokens is None) != (micro_batch_size is None)
    if micro_batch_size is not None:
        return [list(range(i, min(i + micro_batch_size, len(batch)))) for i in range(0, len(batch), micro_batch_size)]
    assert max_tokens is not None
    (plan,) = plan_ranks(workload_of(batch), 1, max_tokens, similar_lengths=similar_lengths, at_least=at_least)
    return [list(indices) for indices in plan.micro_batches]
