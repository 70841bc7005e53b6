"""Settings of the algorithm and of the critic."""

from __future__ import annotations

from typing import Literal

from treadle import catalog
from treadle.catalog import POLICY_LOSSES, EstimatorRecord, PolicyLossRecord
from treadle.config.batch_sizes import known_arithmetic
from treadle.config.conditions import (
    TRAINS_A_CRITIC,
    Condition,
    alone,
    compared,
    estimator,
    given,
    needs,
    read_by,
    when,
)
from treadle.config.section import Section, setting, with_parameters

_KL_LOSS = given("use_kl_loss")
_CORRECTION = given("rollout_correction")
_REJECTION = given("correction_reject_level")
# fmt: off
_ONE_DENOMINATOR = alone("calculate_per_token_loss", "they are two denominators of one loss")
_DIVIDES = estimator("divides_by_std", "it never divides by the deviation; drop it", warn=True)
_DISCOUNTS = estimator("uses_gamma", "it is read by {those} only; drop it")
_HAS_VALUES = estimator("needs_values", "it needs an estimator with a critic ({those})")
_KL_IN_REWARD = estimator("per_token_reward",
                          "only {those} put KL in the reward; use use_kl_loss and kl_loss_coef instead")
_NOT_WHITENED = when(lambda c: c.algorithm.estimator is None or not c.algorithm.estimator.whitens,
                     "does nothing with {advantage_estimator}: it whitens its advantages already; drop it", warn=True)
_REFERENCE = when(lambda c: c.algorithm.uses_reference,
                  "would do nothing without a reference: set use_kl_loss or kl_coef, or drop it")
_CLIPS = when(lambda c: not c.algorithm.truncates,
              "does nothing with rollout_correction {rollout_correction}, whose weights are cut from above only; set "
              "correction_bound = clip or mask, or drop it")
_STEERED = when(lambda c: c.algorithm.weighs_kl,
                "does nothing: there is no KL to steer; set kl_coef, or use_kl_loss with kl_loss_coef", together=True)
_HORIZON = needs("kl_horizon", "the number of samples over which the weight of KL adapts")
_POSITIVE = when(lambda c: c.algorithm.entropy_coef >= 0, "is negative: it pushes the entropy down", warn=True)
_MANY_STEPS = when(lambda c: (found := known_arithmetic(c)) is None or found.num_steps_per_rollout > 1,
                   "does nothing with one optimizer step a rollout: the policy has not moved yet; set num_steps_per_rollout")
_SHORTER = compared("<", "num_rollout",
                    "is all of num_rollout = {num_rollout}: the policy would never be trained; lower it")
# fmt: on


def _below(name: str) -> Condition:
    return compared("<=", name, f"is more than {name} = {{{name}}}; lower it")


@with_parameters(catalog.ESTIMATORS, POLICY_LOSSES)
class AlgorithmSection(Section):
    """How rewards become a gradient."""

    advantage_estimator: str = setting("grpo", alone("custom_advantage_path"), names=catalog.ESTIMATORS)
    """How rewards become advantages."""
    grpo_std_normalization: bool = setting(True, _DIVIDES)
    """Divide by the group's standard deviation. Off is Dr. GRPO's advantage."""
    normalize_advantages: bool = setting(False, _NOT_WHITENED)
    """Whiten advantages over all trained tokens of the rollout."""
    gamma: float = setting(1.0, _DISCOUNTS, ge=0, le=1)
    """Discount per token."""
    lambd: float = setting(1.0, _HAS_VALUES, ge=0, le=1)
    """GAE's lambda (needs a critic)."""
    kl_coef: float = setting(0.0, _KL_IN_REWARD, alone("use_kl_loss", "KL would count twice"), ge=0)
    """Weight of the KL penalty inside the reward, for estimators with per-token rewards."""
    use_kl_loss: bool = False
    """Add a KL term to the loss."""
    kl_loss_coef: float = setting(0.0, _KL_LOSS, ge=0)
    """Weight of the KL term."""
    kl_target: float | None = setting(None, _HORIZON, _STEERED, gt=0)
    """Steer the weight of KL so that train/kl (nats per trained token) reaches this target (needs kl_horizon)."""
    kl_horizon: int | None = setting(None, needs("kl_target", "the KL that the weight is steered to"), _STEERED, ge=1)
    """Samples over which the weight of KL adapts to kl_target; a larger number is slower (needs kl_target)."""
    opd_kl_coef: float = setting(0.0, needs("opd_teacher_load", "the model to distil from"), ge=0)
    """On-policy distillation: subtract this times (student's − teacher's logprob) from each token's advantage."""
    kl_loss_type: str = setting("low_var_kl", given("use_kl_loss", warn=True), names=catalog.KL_ESTIMATORS)
    """KL estimator of the loss; kl_coef always uses k1."""
    entropy_coef: float = setting(0.0, _POSITIVE)
    """Weight of the entropy bonus."""
    eps_clip: float = setting(0.2, read_by(POLICY_LOSSES, "eps_clip", warn=True), gt=0, le=1)
    """Clip range of the ratio below 1, and above it unless eps_clip_high is set; 1 removes the lower bound."""
    eps_clip_high: float | None = setting(None, read_by(POLICY_LOSSES, "eps_clip_high", warn=True), gt=0)
    """Clip range of the ratio above 1."""
    eps_clip_c: float | None = setting(None, read_by(POLICY_LOSSES, "eps_clip_c", warn=True), gt=1)
    """Dual clip: bound of the loss if the advantage is negative. For dppo_tv the cap of the ratio, 20 unless set."""
    custom_advantage_path: str | None = setting(None, path=True)
    """Your own advantages, `file.py:object`: a function of AdvantageInputs and settings, or an Estimator."""
    custom_loss_path: str | None = setting(None, path=True)
    """Your own policy loss, `file.py:function`: a function from PolicyLossInputs to PolicyLoss."""
    ref_update_interval: int | None = setting(None, _REFERENCE, alone("ref_ema_decay"), ge=1)
    """Set the reference model to the policy every this many rollouts."""
    ref_ema_decay: float | None = setting(None, _REFERENCE, gt=0, lt=1)
    """Let the reference model follow the policy as a moving average with this decay, once a rollout."""
    policy_loss: str | None = setting(None, alone("custom_loss_path"), names=POLICY_LOSSES)
    """Policy loss. Default depends on the estimator."""
    use_unbiased_kl: bool = setting(False, _KL_LOSS)
    """Multiply the KL in the loss by the probability ratio, which makes it unbiased for tokens of the old policy."""
    rollout_correction: str | None = setting(None, names=catalog.CORRECTIONS)
    """Weight tokens by the trainer's over the engine's probability."""
    correction_bound: Literal["truncate", "clip", "mask"] | None = setting(None, _CORRECTION)
    """`truncate` caps the weight from above, `clip` on both sides, `mask` drops the token. Default depends on the
    correction."""
    correction_low: float | None = setting(None, _CORRECTION, _CLIPS, _below("correction_high"), ge=0)
    """Lower bound of the weight. Default depends on the correction."""
    correction_high: float | None = setting(None, _CORRECTION, gt=0)
    """Upper bound of the weight. Default depends on the correction."""
    correction_veto: float | None = setting(None, _CORRECTION, gt=0, lt=1)
    """Drop a sample in which the weight of any token is below this, for example 1e-4."""
    correction_reject_level: Literal["token", "sequence", "geometric"] | None = setting(None, _CORRECTION)
    """Also drop what has a weight out of bounds: single tokens, or whole samples by the product (`sequence`) or the
    geometric mean of their weights."""
    correction_reject_low: float | None = setting(None, _REJECTION, _below("correction_reject_high"), ge=0)
    """Lower bound of the weight at correction_reject_level."""
    correction_reject_high: float | None = setting(None, _REJECTION, gt=0)
    """Upper bound of the weight at correction_reject_level."""
    correction_batch_mean_one: bool = setting(False, _CORRECTION)
    """Divide the weights by their mean over the rollout's trained tokens."""
    m2po_threshold: float | None = setting(None, gt=0)
    """Drop the tokens with the largest squared gap (trainer − engine logprob) until the mean is below this, usually
    0.04."""
    opsm_delta: float | None = setting(None, _MANY_STEPS, gt=0)
    """Drop samples with a negative advantage that drifted further than this (nats per token)."""
    top_entropy_fraction: float | None = setting(None, gt=0, le=1)
    """Train only on this fraction of the tokens, those with the highest entropy."""
    mask_truncated: bool = False
    """Leave samples that reached the length limit out of the loss."""
    overlong_buffer_len: int | None = setting(None, _below("rollout_max_response_len"), ge=1)
    """Responses that end within this many tokens of the limit are penalised (DAPO)."""
    overlong_penalty_factor: float = setting(1.0, given("overlong_buffer_len"), gt=0)
    """Penalty at the length limit."""
    calculate_per_token_loss: bool = False
    """Weight every token equally. Off weights every sample equally."""
    loss_length_divisor: int | None = setting(None, _ONE_DENOMINATOR, ge=1)
    """Divide each sample's token sum by this constant (Dr. GRPO) instead of its length."""

    @property
    def estimator(self) -> EstimatorRecord | None:
        """The record of the estimator; None for the user's own and for an unknown name."""
        return None if self.custom_advantage_path is not None else catalog.ESTIMATORS.get(self.advantage_estimator)

    @property
    def loss(self) -> PolicyLossRecord | None:
        """The record of the policy loss; None for the user's own, for an unknown name, and for an unknown estimator."""
        if self.custom_loss_path is not None:
            return None
        return POLICY_LOSSES.get(self.policy_loss or (self.estimator.policy_loss if self.estimator else ""))

    @property
    def uses_reference(self) -> bool:
        """True if a reference model is loaded; KL in the loss is measured even if its weight is 0."""
        return self.use_kl_loss or self.kl_coef > 0

    @property
    def weighs_kl(self) -> bool:
        """True if KL has a weight above 0, in the reward or in the loss."""
        return self.kl_coef > 0 or (self.use_kl_loss and self.kl_loss_coef > 0)

    @property
    def truncates(self) -> bool:
        """True if the correction caps its weights from above only."""
        usual = catalog.CORRECTIONS.get(self.rollout_correction or "")
        return (self.correction_bound or (usual.settings.bound if usual else None)) == catalog.Bound.TRUNCATE


class CriticSection(Section):
    """The critic of `ppo`: a value model of its own, with its own optimizer."""

    critic_load: str | None = setting(None, TRAINS_A_CRITIC, path=True)
    """Model the critic starts from, with or without a saved value head. Default: the policy's."""
    critic_lr: float = setting(1e-5, TRAINS_A_CRITIC, gt=0)
    """Peak learning rate of the critic; its schedule is the policy's."""
    critic_lr_warmup_steps: int = setting(0, TRAINS_A_CRITIC, ge=0)
    """Optimizer steps of the critic's linear warm-up."""
    value_clip: float = setting(0.2, TRAINS_A_CRITIC, gt=0)
    """Clip range of the value loss: a value that moves further than this from the old one gains nothing more."""
    num_critic_only_steps: int = setting(0, TRAINS_A_CRITIC, _SHORTER, ge=0)
    """Rollouts at the start in which only the critic is trained."""
