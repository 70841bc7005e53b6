"""One micro-batch: from packed tokens to a loss and its metrics.

Axis letters: `K` trained tokens of the micro-batch, `T` all its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from treadle.algorithms.logprobs import logprobs_and_entropy
from treadle.metrics import Metric, metric
from treadle.models.attention import Backend, PackedAttention
from treadle.models.cpu import head_kernel
from treadle.models.forward import head_of, hidden_states
from treadle.training.batch import Batch
from treadle.training.objective import Objective
from treadle.training.packing import PackedBatch
from treadle.training.parallel import as_parallel

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, eq=False)
class MicroBatchResult:
    """The loss of a micro-batch (its share of the step's loss) and the per-token numbers behind it."""

    loss: Tensor
    policy_loss: float
    kl_loss: float
    entropy: Float[Tensor, " K"]
    ratio: Float[Tensor, " K"]
    clipped: Bool[Tensor, " K"]
    advantages: Float[Tensor, " K"]
    kl: Float[Tensor, " K"]
    correction: Float[Tensor, " K"] | None
    rollout_gap: Float[Tensor, " K"]  # trainer's logprob before the step minus the engine's


def packed_scores(
    model: nn.Module, packed: PackedBatch, backend: Backend
) -> tuple[Float[Tensor, " K"], Float[Tensor, " K"]]:
    """Return the logprobs of the trained tokens at their sampling temperature, and the entropies of their distributions."""
    return as_parallel(model)(_logprobs, packed, backend, False)


def _logprobs(
    model: PreTrainedModel, packed: PackedBatch, backend: Backend, entropy_grad: bool
) -> tuple[Tensor, Tensor]:
    plan = PackedAttention(packed.layout, backend)
    hidden = hidden_states(model, packed.token_ids, packed.layout.position_ids, plan)
    head = head_of(model)
    return logprobs_and_entropy(
        hidden.index_select(0, packed.predictors),
        head.weight,
        packed.targets,
        packed.temperatures,
        bias=head.bias,
        logit_scale=head.scale,
        logit_softcap=head.softcap,
        entropy_grad=entropy_grad,
        kernel=head_kernel(),
    )


def empty_loss(model: nn.Module, packed: PackedBatch, backend: Backend) -> Tensor:
    """Return a loss of 0 that depends on the whole model: the pass of a row without trained tokens."""
    return packed_scores(model, packed, backend)[0].sum()


def micro_batch_loss(
    model: nn.Module, packed: PackedBatch, batch: Batch, objective: Objective, backend: Backend
) -> MicroBatchResult:
    """Run the forward pass and compute the loss; `batch` holds the samples of `packed`, on the same device."""
    logprobs, entropy = as_parallel(model)(_logprobs, packed, backend, objective.entropy_coef != 0)
    assert batch.advantages is not None
    assert batch.loss_weights is not None
    now = logprobs.detach()
    at = packed.tokens
    old = now if batch.old_logprobs is None else batch.old_logprobs[at]
    ref = None if batch.ref_logprobs is None else batch.ref_logprobs[at]
    rollout = batch.rollout_logprobs[at]
    advantages, weights = batch.advantages[at], batch.loss_weights[at]
    policy = objective.policy_loss(logprobs, old, advantages, packed.sample_index, len(batch), rollout)
    per_token = policy.loss if batch.correction is None else policy.loss * batch.correction[at]
    policy_loss = (per_token * weights).sum()
    loss = policy_loss
    kl_loss = 0.0
    if objective.entropy_coef:
        loss = loss - objective.entropy_coef * (entropy * weights).sum()
    if objective.kl_loss_coef:
        assert ref is not None
        term = (objective.kl(logprobs, ref, old) * weights).sum()
        loss = loss + objective.kl_loss_coef * term
        kl_loss = float(term.detach())
    return MicroBatchResult(
        loss=loss,
        policy_loss=float(policy_loss.detach()),
        kl_loss=kl_loss,
        entropy=entropy.detach(),
        ratio=policy.ratio.detach(),
        clipped=policy.clipped,
        advantages=advantages,
        kl=objective.measured_kl(now, rollout if ref is None else ref),
        correction=None if batch.correction is None else batch.correction[at],
        rollout_gap=old - rollout,
    )


def micro_batch_metrics(result: MicroBatchResult) -> list[Metric]:
    """Return means over the trained tokens, weighted so that the means of micro-batches combine exactly."""
    count = result.ratio.shape[0]

    def mean(name: str, values: Tensor) -> Metric:
        return metric(name, float(values.double().mean()), count)

    gap = result.rollout_gap
    correction = [] if result.correction is None else _correction_metrics(result.correction)
    return [
        *correction,
        mean("train/entropy", result.entropy),
        mean("train/kl", result.kl),
        mean("train/clip_fraction", result.clipped.float()),
        mean("train/ratio_mean", result.ratio),
        metric("train/ratio_max", float(result.ratio.max())),
        mean("train/advantage_mean", result.advantages),
        mean("train/advantage_abs_mean", result.advantages.abs()),
        mean("train/rollout_logprob_abs_diff", gap.abs()),
        metric("train/rollout_logprob_abs_diff_max", float(gap.abs().max())),
        mean("train/rollout_kl", torch.expm1(gap) - gap),
    ]


def _correction_metrics(correction: Tensor) -> list[Metric]:
    count = correction.shape[0]
    return [
        metric("train/correction_mean", float(correction.mean()), count),
        metric("train/correction_dropped_fraction", float((correction == 0).float().mean()), count),
    ]
