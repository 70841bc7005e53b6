"""What a configuration chose, for the rules that look at it: the estimator with its traits, and the policy loss."""

from __future__ import annotations

from treadle.catalog import ESTIMATORS, EstimatorRecord
from treadle.config.sections import Config


def estimator_of(config: Config) -> EstimatorRecord | None:
    """The estimator's record; None for a user's own, or a name that is unknown (a finding of its own)."""
    if config.algorithm.custom_advantage_path is not None:
        return None
    return ESTIMATORS.get(config.algorithm.advantage_estimator)


def policy_loss_of(config: Config) -> str | None:
    """The policy loss in use; None for a user's own, or where the estimator is unknown or a user's own."""
    if config.algorithm.custom_loss_path is not None:
        return None
    found = estimator_of(config)
    return config.algorithm.policy_loss or (found.policy_loss if found else None)


def models_beside(config: Config) -> dict[str, str]:
    """Return the models that a run loads beside the one that it trains, by their flags."""
    if config.debug.debug_rollout_only:
        return {}
    algorithm, found = config.algorithm, estimator_of(config)
    has_reference = algorithm.use_kl_loss or algorithm.kl_coef > 0
    has_critic = algorithm.custom_advantage_path is not None or (found is not None and found.needs_values)
    named = {
        "--ref-load": config.model.ref_load if has_reference else None,
        "--critic-load": config.critic.critic_load if has_critic else None,
        "--opd-teacher-load": config.model.opd_teacher_load,
    }
    return {flag: name for flag, name in named.items() if name is not None}


def kl_is_weighted(config: Config) -> bool:
    """True where KL has a weight above 0, in the reward or in the loss."""
    algorithm = config.algorithm
    return algorithm.kl_coef > 0 or (algorithm.use_kl_loss and algorithm.kl_loss_coef > 0)


def ignores_scale(config: Config, traits: EstimatorRecord) -> bool:
    """True where advantages are the same for rewards times any factor: something divides by their spread or mean."""
    algorithm = config.algorithm
    if algorithm.overlong_buffer_len is not None or traits.needs_values:  # a penalty, or a value, of fixed size
        return False
    whitened = traits.whitens or algorithm.normalize_advantages
    alone = algorithm.kl_coef == 0 and algorithm.opd_kl_coef == 0
    if traits.divides_by_mean:
        return config.reward.reward_bias == 0  # a bias is added after the scale
    in_group = traits.divides_by_std and algorithm.grpo_std_normalization
    return in_group or (whitened and alone)


def ignores_bias(config: Config, traits: EstimatorRecord) -> bool:
    """True where advantages are the same for rewards plus any constant: a mean is taken off them."""
    if traits.needs_group:
        return not traits.divides_by_mean
    return not traits.needs_values and config.algorithm.gamma == 1 and traits.whitens
