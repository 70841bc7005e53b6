"""Samples as tensors.

A `Batch` is ragged: per-token fields of all samples lie end to end, and `lengths` holds the samples' lengths. Every field
declares its role, and `select`, `concat` and `to` are generic over the roles, so a new field is one line and cannot be lost
between stages.

Axis letters: `S` samples, `T` tokens of all samples, `P` parts of the reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from treadle.types import Sample

MAX_TRAJECTORIES = 1 << 20
"""Trajectories a group may have: their ids in a batch are unique over groups."""


class Role(StrEnum):
    """The meaning of a field's first axis."""

    PER_TOKEN = "per_token"
    PER_SAMPLE = "per_sample"


def _field(role: Role, optional: bool) -> Any:
    return field(metadata={"role": role}, default=None) if optional else field(metadata={"role": role})


def _per_token(optional: bool = False) -> Any:
    return _field(Role.PER_TOKEN, optional)


def _per_sample(optional: bool = False) -> Any:
    return _field(Role.PER_SAMPLE, optional)


@dataclass(frozen=True, eq=False)
class Batch:
    """Samples to train on; optional fields are None until they are computed."""

    lengths: Int[Tensor, " S"] = _per_sample()
    group_ids: Int[Tensor, " S"] = _per_sample()
    trajectory_ids: Int[Tensor, " S"] = _per_sample()
    temperatures: Float[Tensor, " S"] = _per_sample()
    rewards: Float[Tensor, " S"] = _per_sample()
    token_ids: Int[Tensor, " T"] = _per_token()
    loss_mask: Bool[Tensor, " T"] = _per_token()  # True if the token is trained
    rollout_logprobs: Float[Tensor, " T"] = _per_token()
    reward_parts: Float[Tensor, "S P"] | None = _per_sample(optional=True)  # the rewards one by one, before weights
    shaped: Float[Tensor, " S"] | None = _per_sample(optional=True)  # rewards as compared within whole groups
    advantages: Float[Tensor, " T"] | None = _per_token(optional=True)
    loss_weights: Float[Tensor, " T"] | None = _per_token(optional=True)  # of each token in the reduction
    old_logprobs: Float[Tensor, " T"] | None = _per_token(optional=True)
    ref_logprobs: Float[Tensor, " T"] | None = _per_token(optional=True)
    teacher_logprobs: Float[Tensor, " T"] | None = _per_token(optional=True)  # of the teacher of distillation
    entropy: Float[Tensor, " T"] | None = _per_token(optional=True)  # the policy's, before the step
    correction: Float[Tensor, " T"] | None = _per_token(optional=True)  # factor on the policy loss
    values: Float[Tensor, " T"] | None = _per_token(optional=True)  # the critic's, before the step
    returns: Float[Tensor, " T"] | None = _per_token(optional=True)  # what the critic should have said

    def __len__(self) -> int:
        return self.lengths.shape[0]

    @property
    def offsets(self) -> Int[Tensor, " S"]:
        """Index of each sample's first token in the per-token fields."""
        return torch.cumsum(self.lengths, 0) - self.lengths

    @property
    def sample_index(self) -> Int[Tensor, " T"]:
        """Index of the sample to which each token belongs."""
        return torch.repeat_interleave(torch.arange(len(self), device=self.lengths.device), self.lengths)

    @property
    def trained_lengths(self) -> Int[Tensor, " S"]:
        """Number of trained tokens of each sample."""
        lengths = torch.zeros(len(self), dtype=torch.int64, device=self.lengths.device)
        return lengths.index_add_(0, self.sample_index, self.loss_mask.long())

    def select(self, indices: Sequence[int]) -> Batch:
        """Return the samples at `indices`, in that order."""
        picked = torch.as_tensor(list(indices), dtype=torch.int64, device=self.lengths.device)
        lengths = self.lengths[picked]
        starts = torch.repeat_interleave(self.offsets[picked] - (torch.cumsum(lengths, 0) - lengths), lengths)
        tokens = starts + torch.arange(int(lengths.sum()), device=lengths.device)
        chosen = {Role.PER_SAMPLE: picked, Role.PER_TOKEN: tokens}
        return replace(self, **{name: value[chosen[role]] for name, role, value in self._present()})

    def to(self, device: torch.device) -> Batch:
        """Return the same batch with every tensor on `device`."""
        return replace(self, **{name: value.to(device) for name, _, value in self._present()})

    def _present(self) -> list[tuple[str, Role, Tensor]]:
        named = ((f.name, f.metadata["role"], getattr(self, f.name)) for f in fields(self))
        return [(name, role, value) for name, role, value in named if value is not None]


def concat(batches: Sequence[Batch]) -> Batch:
    """Concatenate batches along the samples; an optional field must be set in all of them or in none."""
    joined: dict[str, Tensor] = {}
    for item in fields(Batch):
        parts = [getattr(batch, item.name) for batch in batches]
        absent = [part is None for part in parts]
        assert all(absent) or not any(absent), f"field {item.name} is in some of the batches only"
        if not absent[0]:
            joined[item.name] = torch.cat(parts)
    return replace(batches[0], **joined)


def batch_of(samples: Sequence[Sample], part_names: Sequence[str] = ()) -> Batch:
    """Return scored samples as one batch, in their order.

    `part_names` are the reward parts to keep separately, in the order of the columns; every sample must have all of them.
    """
    assert all(sample.reward is not None for sample in samples), "a sample without a reward reached the trainer"

    def per_token(name: str, dtype: torch.dtype) -> Tensor:
        parts = [getattr(sample, name) for sample in samples]
        return torch.from_numpy(np.concatenate(parts) if parts else np.zeros(0)).to(dtype)

    def per_sample(values: list[Any], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype)

    return Batch(
        lengths=per_sample([len(s.token_ids) for s in samples], torch.int64),
        group_ids=per_sample([s.group_id for s in samples], torch.int64),
        trajectory_ids=per_sample([s.group_id * MAX_TRAJECTORIES + s.trajectory_id for s in samples], torch.int64),
        temperatures=per_sample([s.temperature for s in samples], torch.float32),
        rewards=per_sample([s.reward for s in samples], torch.float32),
        token_ids=per_token("token_ids", torch.int64),
        loss_mask=per_token("loss_mask", torch.bool),
        rollout_logprobs=per_token("rollout_logprobs", torch.float32),
        reward_parts=torch.tensor(
            [[s.reward_parts[name] for name in part_names] for s in samples], dtype=torch.float32
        ).reshape(len(samples), len(part_names))
        if part_names
        else None,
    )
