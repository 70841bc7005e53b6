"""What the configured algorithm computes: advantages, token weights, policy loss and KL, and which logprobs they need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Float, Int64
from torch import Tensor

from treadle.algorithms.advantages import (
    AdvantageInputs,
    Advantages,
    AdvantageSettings,
    Estimator,
    broadcast,
    compute_advantages,
    find_estimator,
)
from treadle.algorithms.contract import check_advantage, check_policy_loss
from treadle.algorithms.corrections import correct, find_correction
from treadle.algorithms.kl import k3, kl_per_token
from treadle.algorithms.losses import PolicyLoss, PolicyLossFn, PolicyLossInputs, find_policy_loss, opsm_mask
from treadle.algorithms.reduce import Denominators, Mode, token_weights, trajectory_tokens
from treadle.algorithms.selection import top_entropy_mask
from treadle.algorithms.shaping import overlong_penalty
from treadle.config import AlgorithmSection
from treadle.errors import ConfigError
from treadle.registry import resolve
from treadle.training.batch import Batch


@dataclass(frozen=True, eq=False)
class Objective:
    """The algorithm section, resolved to functions."""

    section: AlgorithmSection
    estimator: Estimator
    policy_loss_fn: PolicyLossFn
    max_response_len: int

    @property
    def entropy_coef(self) -> float:
        return self.section.entropy_coef

    @property
    def kl_loss_coef(self) -> float:
        return self.section.kl_loss_coef if self.section.use_kl_loss else 0.0

    @property
    def needs_reference(self) -> bool:
        """True where KL to a reference is in the reward or in the loss (or measured, with coefficient 0)."""
        return self.section.kl_coef > 0 or self.section.use_kl_loss

    @property
    def needs_old_logprobs(self) -> bool:
        """True where something reads the policy's logprobs before the first step (more than one step does as well)."""
        return self.section.kl_coef > 0 or self.section.rollout_correction is not None

    @property
    def needs_entropy(self) -> bool:
        """True where tokens are chosen by the entropy before the step."""
        return self.section.top_entropy_fraction is not None

    @property
    def only_advantages(self) -> bool:
        """True where a sample without advantage adds nothing to the loss: no entropy, no KL, no loss of the user's."""
        own_loss = self.section.custom_loss_path is not None
        return self.entropy_coef == 0 and self.kl_loss_coef == 0 and not own_loss

    @property
    def needs_values(self) -> bool:
        """True where the estimator reads a critic."""
        return self.estimator.needs_values

    def correction(self, batch: Batch) -> Float[Tensor, " T"] | None:
        """Factor on the policy loss of each token, of a whole rollout; None where nothing changes it.

        The rollout correction's weights, and 0 on tokens that are left out for their low entropy.
        """
        fraction = self.section.top_entropy_fraction
        weights = self._rollout_weights(batch)
        if fraction is None:
            return weights
        assert batch.entropy is not None
        kept = top_entropy_mask(batch.entropy, fraction, batch.loss_mask).float()
        return kept if weights is None else weights * kept

    def _rollout_weights(self, batch: Batch) -> Float[Tensor, " T"] | None:
        name = self.section.rollout_correction
        if name is None:
            return None
        assert batch.old_logprobs is not None
        usual = find_correction(name)
        low, high = self.section.correction_low, self.section.correction_high
        settings = replace(
            usual,
            low=usual.low if low is None else low,
            high=usual.high if high is None else high,
            veto_below=self.section.correction_veto,
        )
        found = correct(batch.old_logprobs, batch.rollout_logprobs, batch.sample_index, settings, batch.loss_mask)
        return found.weights

    def rewards(self, batch: Batch) -> Float[Tensor, " S"]:
        """The rewards advantages are made of: as scored, less the penalty of an overlong response."""
        buffer = self.section.overlong_buffer_len
        if buffer is None:
            return batch.rewards
        factor = self.section.overlong_penalty_factor
        return batch.rewards + overlong_penalty(batch.trained_lengths, self.max_response_len, buffer, factor)

    def advantages(self, batch: Batch) -> Advantages:
        """Advantages and returns of a whole rollout, each float32 [T], 0 on untrained tokens."""
        section = self.section
        kl = None
        if section.kl_coef > 0:
            assert batch.old_logprobs is not None
            assert batch.ref_logprobs is not None
            kl = kl_per_token("k1", batch.old_logprobs, batch.ref_logprobs)
        inputs = AdvantageInputs(
            rewards=self.rewards(batch),
            group_ids=batch.group_ids,
            sample_index=batch.sample_index,
            mask=batch.loss_mask,
            trajectory_ids=batch.trajectory_ids,
            kl=kl,
            values=batch.values,
        )
        settings = AdvantageSettings(
            std_normalization=section.grpo_std_normalization,
            whiten=True if section.normalize_advantages else None,
            kl_coef=section.kl_coef,
            gamma=section.gamma,
            lambd=section.lambd,
        )
        return compute_advantages(self.estimator, inputs, settings)

    def loss_weights(self, batch: Batch, global_batch_size: int) -> Float[Tensor, " T"]:
        """Weight of each token in the loss of one optimizer step; `batch` is the whole step."""
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
    ) -> PolicyLoss:
        """Policy loss per trained token."""
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
        )
        result = self.policy_loss_fn(inputs)
        if section.opsm_delta is None:
            return result
        return replace(result, loss=result.loss * opsm_mask(inputs, section.opsm_delta))

    def kl(self, logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
        """KL per trained token by the configured estimator, with gradient."""
        old = old_logprobs if self.section.use_unbiased_kl else None
        return kl_per_token(self.section.kl_loss_type, logprobs, ref_logprobs, old)

    @staticmethod
    def measured_kl(logprobs: Tensor, other: Tensor) -> Tensor:
        """KL per trained token for the log: always k3."""
        return k3(logprobs, other)


def build_objective(section: AlgorithmSection, max_response_len: int) -> Objective:
    """Resolve the names of the algorithm section; raises `ConfigError` for an unknown one."""
    estimator = _estimator(section)
    return Objective(section, estimator, _policy_loss(section, estimator), max_response_len)


def _estimator(section: AlgorithmSection) -> Estimator:
    """The named estimator, or the user's, checked against the contract of estimators."""
    path = section.custom_advantage_path
    if path is None:
        return find_estimator(section.advantage_estimator)
    found: Any = resolve("advantage", path, {})
    rule = found if isinstance(found, Estimator) else Estimator(path, found, broadcast, "custom_advantage_path")
    _hold_to_contract("custom_advantage_path", path, lambda: check_advantage(rule))
    unread = [
        f"{name} = {value}"
        for name, value, default, is_read in (
            ("kl_coef", section.kl_coef, 0.0, rule.per_token_reward),
            ("gamma", section.gamma, 1.0, rule.uses_gamma),
            ("lambd", section.lambd, 1.0, rule.needs_values),
        )
        if value != default and not is_read
    ]
    if unread:
        raise ConfigError(f"{', '.join(unread)} does nothing with custom_advantage_path {path!r}; drop it")
    if rule.needs_parts:
        raise ConfigError(f"custom_advantage_path {path!r} needs the parts of the reward, which are not passed on yet")
    return rule


def _policy_loss(section: AlgorithmSection, estimator: Estimator) -> PolicyLossFn:
    """The named policy loss, or the user's, checked against the contract of policy losses."""
    path = section.custom_loss_path
    if path is None:
        return find_policy_loss(section.policy_loss or estimator.policy_loss)
    found: Any = resolve("policy loss", path, {})
    _hold_to_contract("custom_loss_path", path, lambda: check_policy_loss(found))
    return found


def _hold_to_contract(field: str, path: str, check: Callable[[], None]) -> None:
    try:
        check()
    except Exception as error:  # the user's code may raise anything
        reason = (str(error) or repr(error)).splitlines()[0]
        raise ConfigError(f"{field} {path!r} does not do what the trainer relies on: {reason}") from error
