"""The configured algorithm: advantages, token weights, policy loss and KL, and the inputs that they need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from treadle.algorithms.advantages import (
    AdvantageInputs,
    Advantages,
    AdvantageSettings,
    Estimator,
    broadcast,
    shape_rewards,
    spread_advantages,
)
from treadle.algorithms.corrections import CorrectionSettings
from treadle.algorithms.kl import AdaptiveKL, k3, kl_per_token, update_kl_coef
from treadle.algorithms.losses import PolicyLoss, PolicyLossFn, PolicyLossInputs, opsm_mask
from treadle.algorithms.reduce import Denominators, Mode, token_weights, trajectory_tokens
from treadle.algorithms.shaping import overlong_penalty
from treadle.catalog import KL_ESTIMATORS, find
from treadle.config import AlgorithmSection
from treadle.errors import ConfigError
from treadle.training.batch import Batch
from treadle.training.correction import correction_settings, loss_factor
from treadle.training.custom_functions import chosen_estimator, chosen_policy_loss
from treadle.training.ranks import ALONE, Ranks


@dataclass(frozen=True, slots=True)
class Needs:
    """The inputs of an algorithm beside the current logprobs and the rewards; the trainer computes nothing else.

    `prior_logprobs` and `prior_entropy` are those of the policy before the first step of a rollout.
    """

    prior_logprobs: bool = False
    prior_entropy: bool = False
    ref_logprobs: bool = False
    teacher_logprobs: bool = False
    values: bool = False  # a critic
    groups: bool = False  # more than one sample of a prompt
    reward_parts: bool = False


@dataclass(frozen=True, eq=False)
class Objective:
    """The algorithm section, resolved to functions."""

    section: AlgorithmSection
    estimator: Estimator
    policy_loss_fn: PolicyLossFn
    needs: Needs
    max_response_len: int
    kl_weight: float  # of KL, in the reward or in the loss; changes if a target steers it
    corrections: CorrectionSettings | None
    part_weights: Mapping[str, float]  # of the rewards an estimator reads one by one; empty for the others

    @property
    def entropy_coef(self) -> float:
        return self.section.entropy_coef

    @property
    def kl_loss_coef(self) -> float:
        return self.kl_weight if self.section.use_kl_loss and self.section.kl_loss_coef > 0 else 0.0

    @property
    def kl_coef(self) -> float:
        return self.kl_weight if self.section.kl_coef > 0 else 0.0

    @property
    def only_advantages(self) -> bool:
        """True if a sample with zero advantage adds nothing to the loss: no entropy, no KL, no loss of the user's own."""
        own_loss = self.section.custom_loss_path is not None
        return self.entropy_coef == 0 and self.kl_loss_coef == 0 and not own_loss

    def steered(self, measured_kl: float, num_samples: int) -> Objective:
        """Return the objective of the next rollout, its weight of KL moved towards `kl_target`.

        `num_samples` counts trajectories; `measured_kl` is the mean per trained token of the rollout, as `train/kl` has it, in nats.
        """
        target, horizon = self.section.kl_target, self.section.kl_horizon
        assert target is not None
        assert horizon is not None
        state = update_kl_coef(AdaptiveKL(self.kl_weight, target, horizon), measured_kl, num_samples)
        return self.with_kl_weight(state.coef)

    def with_kl_weight(self, weight: float) -> Objective:
        """Return the same objective with another weight of KL."""
        return replace(self, kl_weight=weight)

    def correction(self, batch: Batch, ranks: Ranks = ALONE) -> Float[Tensor, " T"] | None:
        """Return the factor on each token's policy loss for this rank's share of a rollout; None if there is none."""
        return loss_factor(self.section, self.corrections, batch, ranks)

    def rewards(self, batch: Batch) -> Float[Tensor, " S"]:
        """Return the rewards from which advantages are computed: those of the batch minus the overlong penalty."""
        buffer = self.section.overlong_buffer_len
        if buffer is None:
            return batch.rewards
        factor = self.section.overlong_penalty_factor
        return batch.rewards + overlong_penalty(batch.trained_lengths, self.max_response_len, buffer, factor)

    @property
    def zero_reward_is_zero_advantage(self) -> bool:
        """True if a shaped reward of 0 means an advantage of 0, whatever the models compute for the sample's tokens."""
        whitens = self.section.normalize_advantages or self.estimator.whitens
        return self.estimator.spread is broadcast and not whitens and not self.needs.teacher_logprobs

    def shaped(self, batch: Batch) -> Float[Tensor, " S"]:
        """Return the shaped rewards of whole groups; they do not depend on a model.

        Raises `ConfigError` for a negative reward where rewards are divided by their mean.
        """
        inputs = self._inputs(batch)
        if self.estimator.divides_by_mean and (inputs.rewards < 0).any():
            raise ConfigError(
                f"advantage_estimator {self.estimator.name} divides by the mean reward and can't take a negative one, got "
                f"{float(inputs.rewards.min()):g}; shift rewards with reward_bias, or cut them with reward_clip_low = 0"
            )
        return shape_rewards(self.estimator, inputs, self._settings)

    def advantages(self, batch: Batch, ranks: Ranks = ALONE) -> Advantages:
        """Return advantages and returns of this rank's share of a rollout, each float32 [T], 0 on untrained tokens.

        Rewards that were not shaped yet are shaped here: the groups must be whole then.
        """
        shaped = self.shaped(batch) if batch.shaped is None else batch.shaped
        return spread_advantages(self.estimator, shaped, self._inputs(batch), self._settings, ranks.sum)

    @property
    def _settings(self) -> AdvantageSettings:
        section = self.section
        return AdvantageSettings(
            std_normalization=section.grpo_std_normalization,
            whiten=True if section.normalize_advantages else None,
            kl_coef=self.kl_coef,
            gamma=section.gamma,
            lambd=section.lambd,
            opd_kl_coef=section.opd_kl_coef,
        )

    def _inputs(self, batch: Batch) -> AdvantageInputs:
        kl = None
        if self.kl_coef > 0 and batch.old_logprobs is not None and batch.ref_logprobs is not None:
            kl = kl_per_token("k1", batch.old_logprobs, batch.ref_logprobs)
        return AdvantageInputs(
            rewards=self.rewards(batch),
            group_ids=batch.group_ids,
            sample_index=batch.sample_index,
            mask=batch.loss_mask,
            trajectory_ids=batch.trajectory_ids,
            reward_parts=batch.reward_parts,
            part_weights=torch.tensor(list(self.part_weights.values())) if self.part_weights else None,
            kl=kl,
            values=batch.values,
            student_logprobs=batch.old_logprobs,
            teacher_logprobs=batch.teacher_logprobs,
        )

    def loss_weights(self, batch: Batch, global_batch_size: int) -> Float[Tensor, " T"]:
        """Return each token's weight in the loss of one optimizer step, float32 [T]; `batch` is the whole step."""
        section = self.section
        mode = Mode.PER_SAMPLE
        if section.calculate_per_token_loss:
            mode = Mode.PER_TOKEN
        elif section.loss_length_divisor is not None:
            mode = Mode.CONSTANT
        lengths = batch.trained_lengths
        denominators = Denominators(
            mode=mode,
            batch_size=global_batch_size,
            total_tokens=float(lengths.sum()),
            max_length=section.loss_length_divisor or 0,
        )
        per_sample = trajectory_tokens(lengths, batch.trajectory_ids)
        return token_weights(batch.sample_index, per_sample, denominators, batch.loss_mask)

    def policy_loss(
        self,
        logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        sample_index: Int64[Tensor, " K"],
        num_samples: int,
        rollout_logprobs: Tensor | None = None,
    ) -> PolicyLoss:
        """Return the policy loss of each trained token; some losses read the rollout policy's logprobs."""
        section = self.section
        inputs = PolicyLossInputs(
            logprobs,
            old_logprobs,
            advantages,
            sample_index,
            num_samples=num_samples,
            eps_clip=section.eps_clip,
            eps_clip_high=section.eps_clip_high,
            eps_clip_c=section.eps_clip_c,
            rollout_logprobs=rollout_logprobs,
        )
        result = self.policy_loss_fn(inputs)
        if section.opsm_delta is None:
            return result
        return replace(result, loss=result.loss * opsm_mask(inputs, section.opsm_delta))

    def kl(self, logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
        """Return the KL of each trained token by the configured estimator, with gradient."""
        old = old_logprobs if self.section.use_unbiased_kl else None
        return kl_per_token(self.section.kl_loss_type, logprobs, ref_logprobs, old)

    @staticmethod
    def measured_kl(logprobs: Tensor, other: Tensor) -> Tensor:
        """Return the KL of each trained token for the log, always by the k3 estimator."""
        return k3(logprobs, other)


def build_objective(
    section: AlgorithmSection, max_response_len: int, part_weights: Mapping[str, float] | None = None
) -> Objective:
    """Resolve the names of the algorithm section; raises `ConfigError` for an unknown one.

    `part_weights` are those of the rewards, by the name of their part, for estimators that read them one by one.
    """
    estimator = chosen_estimator(section)
    policy_loss = chosen_policy_loss(section, estimator)
    find("kl_loss_type", section.kl_loss_type, KL_ESTIMATORS)
    needs = needs_of(section, estimator)
    parts = dict(part_weights or {}) if needs.reward_parts else {}
    if needs.reward_parts and not parts:
        raise ConfigError(f"advantage {estimator.name!r} reads the rewards one by one; name them with rm_type")
    return Objective(
        section,
        estimator,
        policy_loss,
        needs,
        max_response_len,
        kl_weight=section.kl_coef or (section.kl_loss_coef if section.use_kl_loss else 0.0),
        corrections=correction_settings(section),
        part_weights=parts,
    )


def needs_of(section: AlgorithmSection, estimator: Estimator) -> Needs:
    """Return what the estimator and everything that the section switches on read."""
    weighs_tokens = section.rollout_correction is not None or section.m2po_threshold is not None
    return Needs(
        prior_logprobs=weighs_tokens or section.kl_coef > 0 or section.opd_kl_coef > 0,
        prior_entropy=section.top_entropy_fraction is not None,
        ref_logprobs=section.use_kl_loss or section.kl_coef > 0,  # KL is measured even if its coefficient is 0
        teacher_logprobs=section.opd_kl_coef > 0,
        values=estimator.needs_values,
        groups=estimator.needs_group,
        reward_parts=estimator.needs_parts,
    )
