"""The trainer of one rank: it turns a share of the samples into new weights and metrics."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from treadle.config import BatchArithmetic, Config
from treadle.errors import ModelError
from treadle.metrics import Metric, metric
from treadle.models.forward import embeddings_of, recompute_layers
from treadle.models.offload import HostCopies
from treadle.training.batch import Batch
from treadle.training.checkpoint import Checkpoint, check_same_model
from treadle.training.critic import Critic
from treadle.training.micro_batches import MicroBatch, MicroBatches, Passes, with_last
from treadle.training.optimizer import MasterOptimizer
from treadle.training.parallel import ParallelModel, as_parallel, local_part
from treadle.training.policy_loss import (
    empty_loss,
    micro_batch_loss,
    micro_batch_metrics,
    packed_scores,
)
from treadle.training.ranks import Ranks, lost_ranks_are_named
from treadle.training.reference import Reference, lent_to
from treadle.training.rollout_plan import Planner, RankShare
from treadle.training.sharded_state import stored_parameters
from treadle.training.tensor_files import Chosen
from treadle.types import Group

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, eq=False)
class Rollout:
    """A rank's state between the parts of a rollout's training.

    `batch` is the share's batch with the fields computed so far, `passes` are the policy's micro-batches, `critic_passes` those of
    a critic that is trained here. `began` is a time of `time.perf_counter`, in seconds.
    """

    share: RankShare
    batch: Batch
    passes: Passes
    critic_passes: Passes | None
    began: float


class Trainer:
    """Trains a model on one rollout after another; with many ranks, each has a trainer.

    `reference` is needed if the objective uses KL, `teacher` (frozen) if it distils. If it uses values, they come from
    `critic`, which is trained with the policy, or from critic ranks, which pass them to `spread`. `warn`
    is called for each skipped step.
    """

    def __init__(
        self,
        model: PreTrainedModel | ParallelModel,
        config: Config,
        arithmetic: BatchArithmetic,
        total_steps: int,
        reference: Reference | None = None,
        warn: Callable[[str], None] = warnings.warn,
        critic: Critic | None = None,
        teacher: nn.Module | None = None,
    ):
        self.policy = as_parallel(model)
        self.model: PreTrainedModel = self.policy.model
        self.critic, self.teacher, self.reference = critic, teacher, reference
        self.config, self.arithmetic, self.warn = config, arithmetic, warn
        self.planner = Planner(config, arithmetic, warn=warn)  # of one process; with many ranks the driver has its own
        self.objective = self.planner.objective
        self.micro_batches = MicroBatches(config.train, self.policy.grid.device, self.policy.ranks)
        needs = self.objective.needs
        assert not needs.ref_logprobs or reference is not None, "the objective needs a reference model"
        assert needs.values or critic is None, "a critic is given only where values are needed"
        assert needs.teacher_logprobs == (teacher is not None), "a teacher is given exactly where one is needed"
        self._host = HostCopies()
        self.optimizer = MasterOptimizer(self.policy, config.optim, total_steps)
        if config.model.gradient_checkpointing:
            recompute_layers(self.model)

    # One rollout

    @property
    def device(self) -> torch.device:
        return self.micro_batches.device

    def train(self, groups: Sequence[Group], rollout_id: int = 0) -> list[Metric]:
        """Take the rollout's optimizer steps; failed samples are left out and counted. For one process."""
        (share,) = self.planner.plan(groups)
        return self.train_share(share, rollout_id)

    def train_share(self, share: RankShare, rollout_id: int = 0) -> list[Metric]:
        """Take the rollout's optimizer steps on this rank's share of it; all ranks do so at the same time.

        In the first `num_critic_only_steps` rollouts the critic alone is trained. Returns this rank's metrics: those
        of all ranks together are the rollout's.
        """
        return self.take_steps(self.spread(self.score(share)), rollout_id)

    def score(self, share: RankShare) -> Rollout:
        """Do the first part of a rollout: split it, and compute what the objective needs from the models."""
        began = time.perf_counter()
        _check_ids(share.batch, self.model)
        with self.named("scoring a rollout"):
            needs = self.objective.needs
            with_rest = needs.prior_logprobs or needs.prior_entropy
            passes = self.micro_batches.plan(share.batch, share.trained, with_rest=with_rest)
            critic_passes = None if self.critic is None else self.critic.plan(share.batch, share.steps)
            return Rollout(share, self._score(share.batch, passes, critic_passes), passes, critic_passes, began)

    def _score(self, batch: Batch, passes: Passes, critic_passes: Passes | None) -> Batch:
        """Return the batch with what the objective needs, and only that.

        With one optimizer step the old logprobs are those of the step itself. Values come from other ranks if there is no
        critic here.
        """
        needs = self.objective.needs
        needs_old = needs.prior_logprobs or self.arithmetic.num_steps_per_rollout > 1
        if needs_old or needs.prior_entropy:
            logprobs, *entropy = self._scored(batch, passes, self.policy, 2 if needs.prior_entropy else 1)
            batch = replace(
                batch, old_logprobs=logprobs if needs_old else None, entropy=entropy[0] if entropy else None
            )
        if needs.ref_logprobs:
            assert self.reference is not None
            with lent_to(self.device, self.reference.parallel) as model:
                batch = replace(batch, ref_logprobs=self._scored(batch, passes, model)[0])
        if self.teacher is not None:
            with lent_to(self.device, as_parallel(self.teacher)) as model:
                batch = replace(batch, teacher_logprobs=self._scored(batch, passes, model)[0])
        if self.critic is not None and critic_passes is not None:
            batch = replace(batch, values=self.critic.values(batch, critic_passes))
        return batch

    def spread(self, rollout: Rollout) -> Rollout:
        """Do the second part: compute advantages, returns and corrections of a scored rollout, which has values if they are needed."""
        batch, ranks = rollout.batch, self.policy.ranks
        assert (batch.values is not None) == self.objective.needs.values, "values are there exactly where needed"
        with self.named("working out advantages"):
            found = self.objective.advantages(batch, ranks)
            correction = self.objective.correction(batch, ranks)
        batch = replace(batch, advantages=found.advantages, returns=found.returns, correction=correction)
        return replace(rollout, batch=batch)

    def take_steps(self, rollout: Rollout, rollout_id: int) -> list[Metric]:
        """Take the optimizer steps, the last part; return this rank's metrics."""
        share, batch = rollout.share, rollout.batch
        metrics = [*share.metrics, *_teacher_metrics(batch)]
        before = self.optimizer.num_steps
        with self.named(f"training on rollout {rollout_id}"):
            for step, micro_batches in enumerate(rollout.passes.steps):
                if self.critic is not None and rollout.critic_passes is not None:
                    metrics += self.critic.step(batch, rollout.critic_passes.steps[step])
                if rollout_id >= self.config.critic.num_critic_only_steps:
                    skipped = len(share.steps[step]) - len(share.trained[step])
                    metrics += [metric("train/num_skipped_samples", skipped), *self._step(batch, micro_batches)]
            if self.reference is not None:
                self.reference.follow(rollout_id + 1, self.optimizer.masters)
            metrics += self._steer_kl(metrics, share.num_trajectories)
        seconds = time.perf_counter() - rollout.began
        metrics += [
            metric("train/num_samples", len(batch)),
            metric("train/num_tokens", int(batch.loss_mask.sum())),
        ]
        if self.policy.grid.is_first:
            metrics += [
                metric("train/seconds", seconds),
                metric("train/tokens_per_second", share.num_tokens / seconds),
                metric("train/num_steps", self.optimizer.num_steps - before),
            ]
        return metrics if self.policy.grid.reports else []

    def logprobs(self, batch: Batch, model: nn.Module) -> Tensor:
        """Return the logprobs of the trained tokens of a batch under `model`, float32 [T], 0 at the others."""
        return self._scored(batch, self.micro_batches.plan(batch, [range(len(batch))]), as_parallel(model))[0]

    def _scored(self, batch: Batch, passes: Passes, model: ParallelModel, count: int = 1) -> list[Tensor]:
        """Return the logprobs of the trained tokens under `model`, and their entropies if `count` is 2; each is float32 [T]."""
        backend = self.config.model.attention_backend
        found = self.micro_batches.per_token(
            batch, passes.all, lambda packed: packed_scores(model, packed, backend)[:count], count
        )
        model.free_gathered()
        return found

    def _steer_kl(self, metrics: Sequence[Metric], num_samples: int) -> list[Metric]:
        """Move the weight of KL towards its target for the next rollout, if there is a target."""
        if self.config.algorithm.kl_target is None:
            return []
        used = metric("train/kl_coef", self.objective.kl_weight)
        measured = _mean_over_ranks([m for m in metrics if m.name == "train/kl"], self.policy.ranks)
        if not math.isnan(measured):  # no step was taken, or the policy is broken: leave the weight as it is
            self.objective = self.objective.steered(measured, num_samples)
        return [used] if self.policy.grid.is_first else []

    # One optimizer step

    def _step(self, batch: Batch, micro_batches: Sequence[MicroBatch]) -> list[Metric]:
        """Run forward and backward over the micro-batches of a step, then take one optimizer step."""
        metrics: list[Metric] = []
        losses = torch.zeros(3, dtype=torch.float64)  # the whole, of the policy, of KL
        backend = self.config.model.attention_backend
        count = 0
        for micro_batch, is_last in with_last(micro_batches):
            packed = micro_batch.row.to(self.device)
            if not packed.tokens.shape[0]:
                self.policy.backward(empty_loss(self.policy, packed, backend), is_last=is_last)
                continue
            part = batch.select(micro_batch.samples).to(self.device)
            result = micro_batch_loss(self.policy, packed, part, self.objective, backend)
            self.policy.backward(result.loss, is_last=is_last)
            count += 1
            losses += torch.tensor(
                [float(result.loss.detach()), result.policy_loss, result.kl_loss], dtype=losses.dtype
            )
            metrics += micro_batch_metrics(result)
        loss, policy_loss, kl_loss = self.policy.ranks.sum(losses).tolist()
        update = self.optimizer.step(loss_is_finite=bool(torch.isfinite(torch.tensor(loss))))
        metrics.append(metric("train/num_micro_batches", count))
        if not self.policy.grid.is_first:
            return metrics
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
        ]

    def named(self, doing: str) -> AbstractContextManager[None]:
        """Return a context in which the loss of another rank is reported with what this rank was doing."""
        return lost_ranks_are_named(doing, self.policy.grid.world.rank, self.policy.grid.world.size)

    # Memory for others

    def sleep(self, *, force: bool = False) -> int:
        """Move weights, masters and optimizer state to host memory; return the bytes freed on the device.

        Between rollouts only: gradients are gone then. On a CPU nothing moves, unless forced. Nothing may use the
        trainer's weights until `wake`.
        """
        held = [local_part(p.detach()) for p in self.model.parameters()] + list(self.optimizer.tensors())
        held += [] if self.critic is None else self.critic.tensors()
        return self._host.sleep(held, force=force)

    def wake(self) -> int:
        """Restore what `sleep` moved, bit for bit; return the number of bytes."""
        return self._host.wake()

    # Checkpoints

    def state(self) -> dict[str, Any]:
        """Return the state beside weights that a resumed run needs, in JSON values."""
        state: dict[str, Any] = {"optimizer_steps": self.optimizer.num_steps}
        if self.critic is not None:
            state["critic_steps"] = self.critic.optimizer.num_steps
        if self.config.algorithm.kl_target is not None:
            state["kl_weight"] = self.objective.kl_weight
        return {**state, **self.planner.state()}

    def load(self, checkpoint: Checkpoint) -> None:
        """Set weights, AdamW state and schedule; raises `CheckpointError` for a checkpoint of another model."""
        tensors = stored_parameters(checkpoint.path / "model", list(self.optimizer.params))
        untrained = self.policy.trainable.untrained(self.model)
        trained = Chosen({name: (tensors, name) for name in tensors if name not in untrained})
        check_same_model(checkpoint, trained, self.optimizer.params)
        self.optimizer.load_masters(trained)
        self.optimizer.load_state_tensors(checkpoint.optimizer_tensors())
        self.optimizer.num_steps = checkpoint.entry("optimizer_steps", int)
        if self.config.algorithm.kl_target is not None and "kl_weight" in checkpoint.state:
            self.objective = self.objective.with_kl_weight(checkpoint.entry("kl_weight", float))
        self.planner.load_state(checkpoint.state)
        if self.critic is not None:
            self.critic.load(checkpoint)
        if self.reference is not None:
            self.reference.load(checkpoint)


def _check_ids(batch: Batch, model: PreTrainedModel) -> None:
    """Raise `ModelError` if a sample has an id that the model has no embedding for, as one of another model may have."""
    rows = embeddings_of(model).shape[0]
    largest = int(batch.token_ids.max()) if len(batch.token_ids) else -1
    if largest >= rows:
        raise ModelError(
            f"a sample has the token id {largest}, but the model has embeddings for {rows} ids only, 0 to {rows - 1}; "
            "train on samples of a model with the same tokenizer"
        )


def _mean_over_ranks(metrics: Sequence[Metric], ranks: Ranks) -> float:
    sums = [math.fsum(m.value * m.weight for m in metrics), math.fsum(m.weight for m in metrics)]
    total, weight = ranks.sum(torch.tensor(sums, dtype=torch.float64)).tolist()
    return total / weight if weight > 0 else math.nan


def _teacher_metrics(batch: Batch) -> list[Metric]:
    if batch.teacher_logprobs is None or batch.old_logprobs is None:
        return []
    gap = (batch.old_logprobs - batch.teacher_logprobs)[batch.loss_mask]
    if not gap.shape[0]:
        return []
    return [metric("train/teacher_kl", float(gap.double().mean()), gap.shape[0])]
