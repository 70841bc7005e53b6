"""From groups of samples to each rank's share: everything that needs whole groups and no model.

The driver plans; a rank receives a `RankShare`. Rewards are compared within groups here, and loss weights get their
denominators, so that a group's samples may go to different ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treadle.algorithms.shaping import RunningMoments
from treadle.config import BatchArithmetic, Config
from treadle.errors import CheckpointError
from treadle.metrics import Metric, metric
from treadle.training.batch import Batch, batch_of
from treadle.training.conditioning import condition_rewards
from treadle.training.load_balancing import plan_ranks
from treadle.training.objective import Objective, build_objective
from treadle.training.packing import workload_of
from treadle.types import Group, Sample, Status


@dataclass(frozen=True, eq=False)
class RankShare:
    """One rank's part of a rollout: tensors and numbers only, so that it can be sent to another process.

    `batch` holds the rank's samples in the order of the rollout, with shaped rewards and weights in the loss.
    `steps[k]` are the indices of those that optimizer step k has, `trained[k]` of those that add to its policy loss.
    `metrics` are on the first rank only.
    """

    batch: Batch
    steps: tuple[tuple[int, ...], ...]
    trained: tuple[tuple[int, ...], ...]
    num_trajectories: int  # of the whole rollout, as the next one
    num_tokens: int  # prompts counted with every sample
    places: tuple[int, ...]  # of its samples, among all of the rollout
    metrics: tuple[Metric, ...] = ()


@dataclass(frozen=True, eq=False)
class PlannedRollout:
    """All samples of a rollout, before they are assigned to ranks.

    `steps[k]` are the indices of those that optimizer step k has, `trained[k]` of those that add to its policy loss.
    """

    batch: Batch
    steps: tuple[tuple[int, ...], ...]
    trained: tuple[tuple[int, ...], ...]
    num_trajectories: int
    metrics: tuple[Metric, ...]


@dataclass(frozen=True, eq=False)
class TokenNumbers:
    """One number for each token of some samples, float32 [T], as one rank computed them; groups of ranks exchange these.

    `places` are those of the samples in the rollout, `lengths` [S] their tokens.
    """

    places: tuple[int, ...]
    lengths: Tensor
    numbers: Tensor


def numbers_at(places: Sequence[int], parts: Sequence[TokenNumbers]) -> Tensor:
    """Return the numbers of the samples at these places, end to end; the parts together must hold all of them."""
    found = {
        place: numbers
        for part in parts
        for place, numbers in zip(part.places, part.numbers.split(part.lengths.tolist()), strict=True)
    }
    return torch.cat([torch.zeros(0), *(found[place] for place in places)])


def objective_of(config: Config) -> Objective:
    """Return the objective of a run's first rollout."""
    return build_objective(config.algorithm, config.rollout.rollout_max_response_len, config.reward.part_weights)


class Planner:
    """Plans rollouts one after another; its state between rollouts goes into the checkpoint."""

    def __init__(
        self,
        config: Config,
        arithmetic: BatchArithmetic,
        num_ranks: int = 1,
        warn: Callable[[str], None] = warnings.warn,
    ):
        self.config, self.arithmetic, self.num_ranks, self.warn = config, arithmetic, num_ranks, warn
        self.objective: Objective = objective_of(config)
        self.reward_moments = RunningMoments()

    def plan(self, groups: Sequence[Group]) -> list[RankShare]:
        """Return each rank's share; failed samples are left out and counted."""
        return self.deal(self.prepare(groups), self.num_ranks)

    def prepare(self, groups: Sequence[Group]) -> PlannedRollout:
        """Return the samples to train on, with rewards and loss weights. Call it once per rollout, in order: it updates the state."""
        samples, steps, metrics = self._choose([sample for group in groups for sample in group.samples])
        batch = batch_of(samples, tuple(self.objective.part_weights))
        rewards, self.reward_moments = condition_rewards(
            batch.rewards, self.config.reward, self.reward_moments, batch.trajectory_ids
        )
        batch = replace(batch, rewards=rewards)
        batch = replace(batch, shaped=self.objective.shaped(batch))
        num_trajectories = batch.trajectory_ids.unique().numel()
        if self.config.algorithm.mask_truncated:  # they count in their group's statistics and in nothing after that
            kept = [i for i, sample in enumerate(samples) if sample.status is not Status.TRUNCATED]
            if len(kept) < len(samples):
                metrics.append(metric("rollout/dropped/truncated", len(samples) - len(kept)))
            batch, steps = batch.select(kept), [steps[i] for i in kept]
        of_step = tuple(
            tuple(i for i, of in enumerate(steps) if of == step)
            for step in range(self.arithmetic.num_steps_per_rollout)
        )
        batch = replace(batch, loss_weights=self._loss_weights(batch, of_step))
        return PlannedRollout(batch, of_step, self._trained(batch, of_step), num_trajectories, tuple(metrics))

    def deal(self, planned: PlannedRollout, num_ranks: int) -> list[RankShare]:
        """Return one share for each of `num_ranks` ranks; a rollout may be dealt to several groups of ranks."""
        batch = planned.batch
        return [
            RankShare(
                batch.select(held) if num_ranks > 1 else batch,
                tuple(_places(held, indices) for indices in planned.steps),
                tuple(_places(held, indices) for indices in planned.trained),
                num_trajectories=planned.num_trajectories,
                num_tokens=int(batch.lengths.sum()),
                places=tuple(held),
                metrics=planned.metrics if rank == 0 else (),
            )
            for rank, held in enumerate(self._ranks_of(batch, planned.steps, num_ranks))
        ]

    def state(self) -> dict[str, Any]:
        """Return the state that the next rollout needs, in JSON values."""
        return {"reward_moments": astuple(self.reward_moments)} if self.config.reward.normalize_rewards_running else {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state; raises `CheckpointError` if it is malformed."""
        match state.get("reward_moments"):
            case None:
                pass
            case [int() | float(), int() | float(), int() | float()] as moments:
                self.reward_moments = RunningMoments(*moments)
            case other:
                raise CheckpointError(
                    f"the saved reward_moments are damaged ({str(other)[:40]}); load another checkpoint"
                )

    def _choose(self, samples: Sequence[Sample]) -> tuple[list[Sample], list[int], list[Metric]]:
        """Return the samples to train on, and the optimizer step of each.

        A step is a fixed share of the rollout whatever was left out, so its denominators do not change.
        """
        kept: list[Sample] = []
        steps: list[int] = []
        dropped: dict[str, int] = {}
        places: dict[tuple[int, int], int] = {}  # of each trajectory: all its samples belong to one step
        for sample in samples:
            places.setdefault((sample.group_id, sample.trajectory_id), len(places))
        for sample in samples:
            reason = _reason_to_drop(sample, tuple(self.objective.part_weights))
            if reason:
                dropped[reason] = dropped.get(reason, 0) + 1
                continue
            kept.append(sample)
            place = places[sample.group_id, sample.trajectory_id]
            steps.append(place * self.arithmetic.num_steps_per_rollout // len(places))
        if "missing_part" in dropped:
            names = ", ".join(self.objective.part_weights)
            self.warn(f"{dropped['missing_part']} samples lack a value of one of {names} and are not trained on")
        return kept, steps, [metric(f"rollout/dropped/{reason}", count) for reason, count in sorted(dropped.items())]

    def _loss_weights(self, batch: Batch, steps: Sequence[Sequence[int]]) -> Tensor:
        """Return each token's weight in the loss of its step, float32 [T]; 0 for samples that are in no step."""
        weights = torch.zeros(batch.token_ids.shape[0])
        for indices in steps:
            part = batch.select(indices)
            found = self.objective.loss_weights(part, self.arithmetic.global_batch_size)
            sample = torch.tensor(indices, dtype=torch.int64)[part.sample_index]
            within = torch.arange(len(found)) - part.offsets[part.sample_index]
            weights[batch.offsets[sample] + within] = found
        return weights

    def _trained(self, batch: Batch, steps: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        """Return the samples of each step that add to its policy loss, as far as rewards alone decide that.

        A step in which no sample does trains the group of its first sample, so that every step is measured.
        """
        idle = self._without_signal(batch)
        found = [tuple(i for i in indices if i not in idle) for indices in steps]
        groups = batch.group_ids.tolist()
        return tuple(
            trained or tuple(i for i in indices if groups[i] == groups[indices[0]])
            for trained, indices in zip(found, steps, strict=True)
        )

    def _without_signal(self, batch: Batch) -> set[int]:
        """Return the samples that are known to add nothing to the policy loss."""
        objective = self.objective
        skips = self.config.train.skip_zero_advantage and objective.only_advantages
        if not (skips and objective.zero_reward_is_zero_advantage):
            return set()
        assert batch.shaped is not None
        return set(torch.nonzero(batch.shaped == 0).squeeze(1).tolist())

    def _ranks_of(self, batch: Batch, steps: Sequence[Sequence[int]], num_ranks: int) -> list[list[int]]:
        """Return the samples of each rank, ascending. Ranks have about the same work in every step and in scoring.

        Samples that are known to have no advantage are dealt by themselves.
        """
        if num_ranks == 1:
            return [list(range(len(batch)))]
        idle = set(range(len(batch))).difference(*steps) | self._without_signal(batch)
        train = self.config.train
        limit = train.max_tokens_per_gpu if train.use_dynamic_batch_size else int(batch.lengths.sum()) + 1
        held: list[list[int]] = [[] for _ in range(num_ranks)]
        loads = [0] * num_ranks
        for indices in (*([i for i in step if i not in idle] for step in steps), sorted(idle)):
            plans = plan_ranks(workload_of(batch.select(indices)), num_ranks, limit, same_count=True)
            plans.sort(key=lambda plan: -sum(plan.num_tokens))
            for rank, plan in zip(sorted(range(num_ranks), key=lambda r: (loads[r], r)), plans, strict=True):
                held[rank] += [indices[i] for members in plan.micro_batches for i in members]
                loads[rank] += sum(plan.num_tokens)
        return [sorted(indices) for indices in held]


def _reason_to_drop(sample: Sample, part_names: Sequence[str]) -> str:
    if sample.status is Status.FAILED or sample.reward is None:
        return "failed"
    if not all(name in sample.reward_parts for name in part_names):  # a reward said None of it
        return "missing_part"
    return "" if sample.loss_mask.any() else "nothing_sampled"


def _places(held: Sequence[int], wanted: Sequence[int]) -> tuple[int, ...]:
    """Return the indices of the wanted samples among a rank's samples, in the order of the rollout."""
    return tuple(np.flatnonzero(np.isin(np.asarray(held, np.int64), np.asarray(wanted, np.int64))).tolist())
