"""Rules of a run that trains: estimators, losses, corrections, rewards, batches and the optimizer."""

from __future__ import annotations

from collections.abc import Iterator

from treadle.catalog import ESTIMATORS, KL_ESTIMATORS, EstimatorRecord
from treadle.config.batch_sizes import batch_arithmetic, check_length
from treadle.config.conditions import Finding, fault, refuse, rule, shown, warn_of, warning
from treadle.config.sections import AlgorithmSection, Config
from treadle.errors import ConfigError

_CONDITIONED = ("reward_scale", "reward_bias", "reward_clip_low", "reward_clip_high", "normalize_rewards_running")
_UNBIASED = ", ".join(name for name, record in KL_ESTIMATORS.items() if record.unbiased_by_ratio)
_WITHOUT_GROUPS = ", ".join(name for name, record in ESTIMATORS.items() if not record.needs_group)


def _compares_groups(config: Config) -> bool:
    found = config.algorithm.estimator
    return found is not None and found.needs_group


def _needs_parts(config: Config) -> bool:
    found = config.algorithm.estimator
    return found is not None and found.needs_parts


def _reads_saved_rollouts(config: Config) -> bool:
    """Return whether the run takes its length from the saved rollouts."""
    return config.debug.debug_train_only and config.train.num_rollout is None


def _unknown_rewards(config: Config) -> bool:
    """Return whether samples have no reward; saved rollouts already hold theirs."""
    return not config.reward.targets and not config.debug.debug_train_only


def _biases_kl(algorithm: AlgorithmSection) -> bool:
    """Return whether the loss has a KL whose gradient is biased although it is multiplied by the ratio."""
    found = KL_ESTIMATORS.get(algorithm.kl_loss_type)
    return algorithm.use_kl_loss and algorithm.use_unbiased_kl and found is not None and not found.unbiased_by_ratio


def _rejects_nothing(algorithm: AlgorithmSection) -> bool:
    """Return whether tokens are to be rejected but no bound can reject any; no weight is below 0."""
    low, high = algorithm.correction_reject_low, algorithm.correction_reject_high
    return bool(algorithm.rollout_correction and algorithm.correction_reject_level) and not low and high is None


# fmt: off
refuse("run", lambda c: _reads_saved_rollouts(c) and c.train.num_epoch is not None,
       "num_epoch = {num_epoch} counts passes over prompt_data, which debug_train_only does not read; use num_rollout, or "
       "neither for all saved rollouts")
refuse("train", lambda c: _compares_groups(c) and c.rollout.n_samples_per_prompt == 1 and c.algorithm.opd_kl_coef == 0,
       "n_samples_per_prompt = 1 gives {algorithm.estimator.name} nothing to compare: every advantage would be zero; set at "
       f"least 2, or use {_WITHOUT_GROUPS}")
warn_of("train", lambda c: c.algorithm.use_kl_loss and c.algorithm.kl_loss_coef == 0 and c.algorithm.kl_loss_type in KL_ESTIMATORS,
        "use_kl_loss with kl_loss_coef = 0 computes the KL to the reference model and trains nothing with it; set kl_loss_coef")
warn_of("train", lambda c: _biases_kl(c.algorithm),
        f"use_unbiased_kl with kl_loss_type = {{kl_loss_type}} does not give the gradient of the KL; it does with {_UNBIASED}")
warn_of("train", lambda c: c.algorithm.use_kl_loss and c.algorithm.kl_loss_type == "k1" and not c.algorithm.use_unbiased_kl,
        "kl_loss_type = k1 in the loss holds nothing back: its gradient is 0 on average; add use_unbiased_kl, or set "
        "another kl_loss_type")
refuse("train", lambda c: c.algorithm.eps_clip == 1 and c.algorithm.eps_clip_high is None,
       "eps_clip = 1 leaves the ratio without a lower bound; set eps_clip_high, its upper bound, too")
refuse("train", lambda c: c.algorithm.eps_clip_high is not None and c.algorithm.eps_clip_high < c.algorithm.eps_clip < 1,
       "eps_clip_high = {eps_clip_high} is less than eps_clip = {eps_clip}, but it is the wider, upper side of the "
       "clip range; raise it, or lower eps_clip")
refuse("train", lambda c: _rejects_nothing(c.algorithm),
       "correction_reject_level = {correction_reject_level} drops nothing without a bound; set correction_reject_low (above 0) "
       "or _high")
refuse("train", lambda c: _needs_parts(c) and len(c.reward.targets) < 2,
       "advantage_estimator {advantage_estimator} normalises several rewards one by one, and {reward.num_targets} is given; use "
       "grpo, or give more with rm_type and custom_rm_path (the parts of one reward's dict count as one reward)")
refuse("train", lambda c: not c.train.use_dynamic_batch_size and c.train.micro_batch_size is None,
       "use_dynamic_batch_size = false needs micro_batch_size, the number of samples in a micro-batch")
warn_of("train", lambda c: c.train.use_dynamic_batch_size and c.rollout.rollout_max_response_len > c.train.max_tokens_per_gpu,
        "samples up to rollout_max_response_len = {rollout_max_response_len} tokens are longer than max_tokens_per_gpu = "
        "{max_tokens_per_gpu}; each such sample makes a micro-batch of its own, with the memory it takes")
# fmt: on


@rule("run")
def length_of_run_is_given_once(config: Config) -> Iterator[Finding]:
    try:
        if not _reads_saved_rollouts(config):
            check_length(config)
    except ConfigError as error:
        yield fault(str(error))


@rule("train")
def batches_agree(config: Config) -> Iterator[Finding]:
    try:
        arithmetic = batch_arithmetic(config)
    except ConfigError as error:
        yield fault(str(error))
        return
    horizon, samples = config.algorithm.kl_horizon, arithmetic.samples_per_rollout
    if horizon is not None and 5 * horizon <= samples:  # a rollout moves the weight by at most 0.2 · samples / horizon
        yield fault(
            f"kl_horizon = {horizon} is too short for rollouts of {samples} samples: the weight of KL could fall to 0 at "
            f"once; give more than {samples // 5}"
        )
    warmup, total = config.optim.lr_warmup_steps, (config.train.num_rollout or 0) * arithmetic.num_steps_per_rollout
    if 0 < total <= warmup:
        yield warning(
            f"lr_warmup_steps = {warmup} is as long as the run ({total} optimizer steps): lr is never reached; lower it"
        )


@rule("train")
def filter_sees_the_signal(config: Config) -> Iterator[Finding]:
    if config.rollout.group_filter != "zero_signal":
        return
    if config.algorithm.opd_kl_coef > 0 and _unknown_rewards(config):
        yield fault("group_filter zero_signal drops every group of a run without a reward; drop it")
    elif config.algorithm.opd_kl_coef > 0:
        yield warning(
            "group_filter zero_signal drops groups of equal rewards, which the teacher would still teach; drop it"
        )
    if _needs_parts(config):
        name = config.algorithm.advantage_estimator
        yield warning(
            f"group_filter zero_signal reads the sum of the rewards, {name} reads each of them: groups that would be "
            "trained on may be dropped; drop the filter, or give your own"
        )


@rule("train")
def conditioned_rewards_are_read(config: Config) -> Iterator[Finding]:
    found = config.algorithm.estimator
    if found is None:
        return
    name, values = found.name, config.reward.model_dump() | config.algorithm.model_dump()
    defaults = type(config.reward)().model_dump() | {"overlong_buffer_len": None}
    changed = [key for key in (*_CONDITIONED, "overlong_buffer_len") if values[key] != defaults[key]]
    given = [key for key in changed if key != "overlong_buffer_len"]

    def joined(keys: list[str]) -> str:
        return ", ".join(f"{key} = {shown(values[key])}" for key in keys)

    if found.needs_parts:
        if changed:
            yield fault(f"{joined(changed)} does nothing with {name}, which normalises each reward by itself; drop it")
        return
    if given and _unknown_rewards(config):
        yield fault(f"{joined(given)} does nothing without a reward: set rm_type or custom_rm_path")
    if "reward_clip_low" in given or "reward_clip_high" in given:  # scale and bias then say what is cut
        given = [key for key in given if key == "normalize_rewards_running"]
    no_scale, no_bias = ignores_scale(config, found), ignores_bias(config, found)
    dead = {"reward_scale": no_scale, "reward_bias": no_bias, "normalize_rewards_running": no_scale and no_bias}
    unread = [key for key in given if dead.get(key)]
    if unread:
        yield fault(f"{joined(unread)} does nothing with {name}: its advantages do not change by it; drop it")
    for key in ("normalize_rewards_running", "overlong_buffer_len") if found.divides_by_mean else ():
        if key in changed:
            yield fault(f"{joined([key])} makes rewards negative, and {name} divides by their mean; drop it")


def ignores_scale(config: Config, traits: EstimatorRecord) -> bool:
    """Return whether advantages are the same for rewards times any factor: they are divided by a spread or a mean."""
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
    """Return whether advantages are the same for rewards plus any constant: a mean is subtracted from them."""
    if traits.needs_group:
        return not traits.divides_by_mean
    return not traits.needs_values and config.algorithm.gamma == 1 and traits.whitens
