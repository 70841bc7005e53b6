"""The trainer of one process: samples in, new weights and metrics out."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from treadle.algorithms.shaping import RunningMoments
from treadle.config import BatchArithmetic, Config
from treadle.metrics import Metric, metric, reduce_metrics
from treadle.models.load import load_parameters, save_model
from treadle.training.batch import Batch, batch_of
from treadle.training.checkpoint import Checkpoint, check_same_model
from treadle.training.conditioning import condition_rewards
from treadle.training.critic import FOLDER as CRITIC_FOLDER
from treadle.training.critic import Critic
from treadle.training.micro_batches import MicroBatches
from treadle.training.objective import Objective, build_objective
from treadle.training.optim import MasterOptimizer
from treadle.training.reference import Reference, lent_to
from treadle.training.step import micro_batch_loss, micro_batch_metrics, packed_entropy, packed_logprobs
from treadle.types import Group, Sample, Status

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Trainer:
    """A model, its optimizer, and what one rollout does to them.

    `reference` is needed where the objective uses KL, `critic` where it uses values, `teacher` (frozen) where it
    distils; `warn` hears of skipped steps.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: Config,
        arithmetic: BatchArithmetic,
        total_steps: int,
        reference: Reference | None = None,
        warn: Callable[[str], None] = warnings.warn,
        critic: Critic | None = None,
        teacher: PreTrainedModel | None = None,
    ):
        self.critic, self.teacher = critic, teacher
        self.model, self.config, self.arithmetic, self.reference, self.warn = model, config, arithmetic, reference, warn
        self.micro_batches = MicroBatches(config.train, next(model.parameters()).device)
        self.objective: Objective = build_objective(
            config.algorithm, config.rollout.rollout_max_response_len, config.reward.part_weights
        )
        self.reward_moments = RunningMoments()
        needs = self.objective.needs
        assert not needs.ref_logprobs or reference is not None, "the objective needs a reference model"
        assert needs.values == (critic is not None), "a critic is given exactly where values are needed"
        assert needs.teacher_logprobs == (teacher is not None), "a teacher is given exactly where one is needed"
        self.optimizer = MasterOptimizer(model, config.optim, total_steps)
        if config.model.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})

    # One rollout

    @property
    def device(self) -> torch.device:
        return self.micro_batches.device

    def train(self, groups: Sequence[Group], rollout_id: int = 0) -> list[Metric]:
        """Take the rollout's optimizer steps; failed samples are left out and counted.

        In the first `num_critic_only_steps` rollouts the critic alone is trained.
        """
        began = time.perf_counter()
        samples, steps, metrics = self._choose([sample for group in groups for sample in group.samples])
        masked = self._masked(samples)
        batch = batch_of(samples, tuple(self.objective.part_weights))
        in_loss = batch.loss_mask & ~torch.tensor(masked, dtype=torch.bool)[batch.sample_index]
        if len(batch):
            rewards, self.reward_moments = condition_rewards(
                batch.rewards, self.config.reward, self.reward_moments, batch.trajectory_ids
            )
            batch = self._score(replace(batch, rewards=rewards))
            metrics += _teacher_metrics(batch)
            found = self.objective.advantages(batch, in_loss)
            factor = self.objective.correction(replace(batch, loss_mask=in_loss))
            batch = replace(batch, advantages=found.advantages, returns=found.returns, correction=factor)
        else:
            batch = replace(batch, advantages=torch.zeros(0))
        before = self.optimizer.num_steps
        if any(masked):
            metrics.append(metric("rollout/dropped/truncated", sum(masked)))
        for step in range(self.arithmetic.num_steps_per_rollout):
            part = batch.select([i for i, of in enumerate(steps) if of == step and not masked[i]])
            part = replace(part, loss_weights=self.objective.loss_weights(part, self.arithmetic.global_batch_size))
            if self.critic is not None:
                metrics += self.critic.step(part)
            if rollout_id >= self.config.critic.num_critic_only_steps:
                metrics += self._step(part)
        if self.reference is not None:
            self.reference.follow(rollout_id + 1, self.optimizer.masters)
        metrics += self._steer_kl(metrics, batch.trajectory_ids.unique().numel())
        seconds = time.perf_counter() - began
        metrics += [
            metric("train/seconds", seconds),
            metric("train/tokens_per_second", int(batch.lengths.sum()) / seconds),
            metric("train/num_samples", len(batch) - sum(masked)),
            metric("train/num_tokens", int(in_loss.sum())),
            metric("train/num_steps", self.optimizer.num_steps - before),
        ]
        return metrics

    def _choose(self, samples: Sequence[Sample]) -> tuple[list[Sample], list[int], list[Metric]]:
        """The samples to train on, and which optimizer step each belongs to.

        A step is a fixed share of the rollout whatever was left out, so its denominators do not change.
        """
        kept: list[Sample] = []
        steps: list[int] = []
        dropped: dict[str, int] = {}
        for place, sample in enumerate(samples):
            reason = _reason_to_drop(sample, tuple(self.objective.part_weights))
            if reason:
                dropped[reason] = dropped.get(reason, 0) + 1
                continue
            kept.append(sample)
            steps.append(place * self.arithmetic.num_steps_per_rollout // len(samples))
        if "missing_part" in dropped:
            names = ", ".join(self.objective.part_weights)
            self.warn(f"{dropped['missing_part']} samples lack a value of one of {names} and are not trained on")
        return kept, steps, [metric(f"rollout/dropped/{reason}", count) for reason, count in sorted(dropped.items())]

    def _masked(self, samples: Sequence[Sample]) -> list[bool]:
        """True for samples that count in their group's statistics and not in the loss: truncated ones, if so asked."""
        asked = self.config.algorithm.mask_truncated
        return [asked and sample.status is Status.TRUNCATED for sample in samples]

    def _score(self, batch: Batch) -> Batch:
        """Add what the objective needs, and only that; old logprobs of the only step are its own."""
        needs = self.objective.needs
        if needs.prior_logprobs or (needs.old_logprobs and self.arithmetic.num_steps_per_rollout > 1):
            batch = replace(batch, old_logprobs=self.logprobs(batch, self.model))
        if needs.prior_entropy:
            backend = self.config.model.attention_backend
            found = self.micro_batches.per_token(batch, lambda packed: packed_entropy(self.model, packed, backend))
            batch = replace(batch, entropy=found)
        if needs.ref_logprobs:
            assert self.reference is not None
            with lent_to(self.device, self.reference.model) as model:
                batch = replace(batch, ref_logprobs=self.logprobs(batch, model))
        if self.teacher is not None:
            with lent_to(self.device, self.teacher) as model:
                batch = replace(batch, teacher_logprobs=self.logprobs(batch, model))
        if self.critic is not None:
            batch = replace(batch, values=self.critic.values(batch))
        return batch

    def logprobs(self, batch: Batch, model: PreTrainedModel) -> Tensor:
        """Logprobs of the trained tokens of a batch under `model`, float32 [T], 0 at the others."""
        backend = self.config.model.attention_backend
        return self.micro_batches.per_token(batch, lambda packed: packed_logprobs(model, packed, backend))

    def _steer_kl(self, metrics: Sequence[Metric], num_samples: int) -> list[Metric]:
        """Move the weight of KL for the next rollout by what was measured in this one; nothing where there is no target."""
        if self.config.algorithm.kl_target is None:
            return []
        used = metric("train/kl_coef", self.objective.kl_weight)
        measured = reduce_metrics(m for m in metrics if m.name == "train/kl").get("train/kl", math.nan)
        if not math.isnan(measured):  # no step was taken, or the policy is broken: leave the weight as it is
            self.objective = self.objective.steered(measured, num_samples)
        return [used]

    # One optimizer step

    def _step(self, batch: Batch) -> list[Metric]:
        """Forward and backward over the micro-batches, then one update."""
        whole, batch = batch, self._with_signal(batch)
        metrics = [metric("train/num_skipped_samples", len(whole) - len(batch))]
        loss = policy_loss = kl_loss = 0.0
        self.model.train(self.config.model.gradient_checkpointing)
        count = 0
        for packed, part in self.micro_batches.packed(batch):
            result = micro_batch_loss(self.model, packed, part, self.objective, self.config.model.attention_backend)
            result.loss.backward()
            count += 1
            loss += float(result.loss.detach())
            policy_loss += result.policy_loss
            kl_loss += result.kl_loss
            metrics += micro_batch_metrics(result)
        self.model.eval()
        update = self.optimizer.step(loss_is_finite=bool(torch.isfinite(torch.tensor(loss))))
        if update.skipped:
            self.warn(f"optimizer step {self.optimizer.num_steps - 1} skipped, weights unchanged: {update.cause(loss)}")
        return [
            *metrics,
            metric("train/loss", loss),
            metric("train/policy_loss", policy_loss),
            metric("train/kl_loss", kl_loss),
            metric("train/grad_norm", update.grad_norm),
            metric("train/lr", update.lr),
            metric("train/skipped_steps", update.skipped),
            metric("train/num_micro_batches", count),
        ]

    def _with_signal(self, batch: Batch) -> Batch:
        """The batch without the samples that add nothing to the loss; its first group where none adds anything, so
        that every step is measured."""
        if not (self.config.train.skip_zero_advantage and self.objective.only_advantages):
            return batch
        assert batch.advantages is not None
        largest = torch.zeros(len(batch)).scatter_reduce(0, batch.sample_index, batch.advantages.abs(), "amax")
        chosen = torch.nonzero(largest if largest.any() else batch.group_ids == batch.group_ids[:1]).squeeze(1)
        return batch.select(chosen.tolist())

    # Checkpoints

    def write_model(self, folder: Path) -> None:
        """Write the master weights as a Hugging Face folder."""
        save_model(self.model, {name: p.detach() for name, p in self.optimizer.masters.items()}, folder)

    def write_rest(self, folder: Path) -> None:
        """Write into a checkpoint folder what is not the policy: the critic, a reference that moves."""
        if self.critic is not None:
            self.critic.write(folder / CRITIC_FOLDER)
        if self.reference is not None:
            self.reference.write(folder)

    def state(self) -> dict[str, Any]:
        """Where the schedules stand, and what moves over a run beside weights; JSON values."""
        state: dict[str, Any] = {"optimizer_steps": self.optimizer.num_steps}
        if self.critic is not None:
            state["critic_steps"] = self.critic.optimizer.num_steps
        if self.config.algorithm.kl_target is not None:
            state["kl_weight"] = self.objective.kl_weight
        if self.config.reward.normalize_rewards_running:
            state["reward_moments"] = astuple(self.reward_moments)
        return state

    def load(self, checkpoint: Checkpoint) -> None:
        """Set weights, AdamW state and schedule; raises `CheckpointError` for a checkpoint of another model."""
        tensors = load_parameters(checkpoint.path / "model")
        check_same_model(checkpoint, tensors, self.optimizer.masters)
        self.optimizer.load_masters(tensors)
        self.optimizer.load_state_tensors(checkpoint.optimizer_tensors())
        self.optimizer.num_steps = checkpoint.state["optimizer_steps"]
        if self.config.algorithm.kl_target is not None and "kl_weight" in checkpoint.state:
            self.objective = replace(self.objective, kl_weight=checkpoint.state["kl_weight"])
        if "reward_moments" in checkpoint.state:
            self.reward_moments = RunningMoments(*checkpoint.state["reward_moments"])
        if self.critic is not None:
            self.critic.load(checkpoint)
        if self.reference is not None:
            self.reference.load(checkpoint)


def _reason_to_drop(sample: Sample, part_names: Sequence[str]) -> str:
    if sample.status is Status.FAILED or sample.reward is None:
        return "failed"
    if not all(name in sample.reward_parts for name in part_names):  # a reward said None of it
        return "missing_part"
    return "" if sample.loss_mask.any() else "nothing_sampled"


def _teacher_metrics(batch: Batch) -> list[Metric]:
    if batch.teacher_logprobs is None or batch.old_logprobs is None:
        return []
    gap = (batch.old_logprobs - batch.teacher_logprobs)[batch.loss_mask]
    return [metric("train/teacher_kl", float(gap.double().mean()), gap.shape[0])]
