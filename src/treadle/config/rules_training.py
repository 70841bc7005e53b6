"""Rules of a run that trains: estimators, losses, corrections, rewards, batches and the optimizer; one rule a function."""

from __future__ import annotations

from collections.abc import Iterator

from treadle.catalog import ESTIMATORS, KL_ESTIMATORS, EstimatorRecord
from treadle.config.batch_sizes import batch_arithmetic, check_length, known_arithmetic
from treadle.config.conditions import shown
from treadle.config.findings import Finding, fault, rule, warning
from treadle.config.sections import Config
from treadle.errors import ConfigError

_CONDITIONED = ("reward_scale", "reward_bias", "reward_clip_low", "reward_clip_high", "normalize_rewards_running")


@rule("run")
def length_of_run_is_given_once(config: Config) -> Iterator[Finding]:
    rollouts, epochs = config.train.num_rollout, config.train.num_epoch
    if config.debug.debug_train_only and rollouts is None:
        if epochs is not None:
            yield fault(
                f"num_epoch = {epochs} counts passes over prompt_data, which debug_train_only does not read; "
                "use num_rollout, or neither for all saved rollouts"
            )
        return
    try:
        check_length(config)
    except ConfigError as error:
        yield fault(str(error))


@rule("train")
def group_has_company(config: Config) -> Iterator[Finding]:
    found, n = config.algorithm.estimator, config.rollout.n_samples_per_prompt
    if found and found.needs_group and n == 1 and config.algorithm.opd_kl_coef == 0:
        others = ", ".join(name for name, record in ESTIMATORS.items() if not record.needs_group)
        yield fault(
            f"n_samples_per_prompt = 1 gives {found.name} nothing to compare: every advantage would be zero; "
            f"set at least 2, or use {others}"
        )


@rule("train")
def kl_pulls(config: Config) -> Iterator[Finding]:
    algorithm, found = config.algorithm, KL_ESTIMATORS.get(config.algorithm.kl_loss_type)
    if not algorithm.use_kl_loss or found is None:
        return
    if algorithm.kl_loss_coef == 0:
        yield warning(
            "use_kl_loss with kl_loss_coef = 0 computes the KL to the reference model and trains nothing with it; "
            "set kl_loss_coef"
        )
    if algorithm.use_unbiased_kl and not found.unbiased_by_ratio:
        unbiased = ", ".join(name for name, record in KL_ESTIMATORS.items() if record.unbiased_by_ratio)
        yield warning(
            f"use_unbiased_kl with kl_loss_type = {found.name} does not give the gradient of the KL; it does with {unbiased}"
        )
    elif found.name == "k1" and not algorithm.use_unbiased_kl:
        yield warning(
            "kl_loss_type = k1 in the loss holds nothing back: its gradient is 0 on average; add use_unbiased_kl, or use "
            "another"
        )


@rule("train")
def kl_is_steered_slowly(config: Config) -> Iterator[Finding]:
    horizon, arithmetic = config.algorithm.kl_horizon, known_arithmetic(config)
    samples = arithmetic.samples_per_rollout if arithmetic else 0
    if horizon is not None and 5 * horizon <= samples:  # a rollout moves the weight by at most 0.2 · samples / horizon
        yield fault(
            f"kl_horizon = {horizon} is too short for rollouts of {samples} samples: the weight of KL could fall to 0 at "
            f"once; give more than {samples // 5}"
        )


@rule("train")
def clip_range_is_ordered(config: Config) -> Iterator[Finding]:
    low, high = config.algorithm.eps_clip, config.algorithm.eps_clip_high
    if low == 1 and high is None:
        yield fault("eps_clip = 1 leaves the ratio without a lower bound; set eps_clip_high, its upper bound, too")
    elif high is not None and high < low < 1:
        yield fault(
            f"eps_clip_high = {high} is less than eps_clip = {low}; it is the wider, upper side of the clip range"
        )


@rule("train")
def rejection_has_a_bound(config: Config) -> Iterator[Finding]:
    algorithm = config.algorithm
    level, low, high = (
        algorithm.correction_reject_level,
        algorithm.correction_reject_low,
        algorithm.correction_reject_high,
    )
    if level is not None and algorithm.rollout_correction is not None and not low and high is None:  # no weight is < 0
        yield fault(
            f"correction_reject_level = {level} drops nothing without a bound; set correction_reject_low (above 0) or _high"
        )


# Rewards


@rule("train")
def rewards_have_parts(config: Config) -> Iterator[Finding]:
    found, count = config.algorithm.estimator, len(config.reward.targets)
    if found and found.needs_parts and count < 2:
        yield fault(
            f"advantage_estimator {found.name} normalises several rewards one by one, and {count} is given; use grpo, or "
            "give more with rm_type and custom_rm_path (the parts of one reward's dict count as one reward)"
        )


@rule("train")
def filter_sees_the_signal(config: Config) -> Iterator[Finding]:
    found = config.algorithm.estimator
    if config.rollout.group_filter != "zero_signal":
        return
    if config.algorithm.opd_kl_coef > 0 and not config.reward.targets and not config.debug.debug_train_only:
        yield fault("group_filter zero_signal drops every group of a run without a reward; drop it")
    elif config.algorithm.opd_kl_coef > 0:
        yield warning("group_filter zero_signal drops groups of equal rewards, which the teacher would still teach")
    if found and found.needs_parts:
        yield warning(f"group_filter zero_signal looks at the sum of the rewards, {found.name} at each of them")


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
    if given and not config.reward.targets and not config.debug.debug_train_only:
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
    """True if advantages are the same for rewards times any factor: something divides by their spread or mean."""
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
    """True if advantages are the same for rewards plus any constant: a mean is subtracted from them."""
    if traits.needs_group:
        return not traits.divides_by_mean
    return not traits.needs_values and config.algorithm.gamma == 1 and traits.whitens


# Batches and the optimizer


@rule("train")
def batches_agree(config: Config) -> Iterator[Finding]:
    try:
        batch_arithmetic(config)
    except ConfigError as error:
        yield fault(str(error))


@rule("train")
def micro_batches_fit(config: Config) -> Iterator[Finding]:
    train, longest = config.train, config.rollout.rollout_max_response_len
    if not train.use_dynamic_batch_size and train.micro_batch_size is None:
        yield fault("use_dynamic_batch_size = false needs micro_batch_size, the number of samples in a micro-batch")
    if train.use_dynamic_batch_size and longest > train.max_tokens_per_gpu:
        yield warning(
            f"samples up to rollout_max_response_len = {longest} tokens are longer than max_tokens_per_gpu = "
            f"{train.max_tokens_per_gpu}; each such sample makes a micro-batch of its own, with the memory it takes"
        )


@rule("train")
def learning_rate_is_reached(config: Config) -> Iterator[Finding]:
    warmup, rollouts, arithmetic = config.optim.lr_warmup_steps, config.train.num_rollout, known_arithmetic(config)
    if rollouts and warmup and arithmetic and warmup >= (total := rollouts * arithmetic.num_steps_per_rollout):
        yield warning(
            f"lr_warmup_steps = {warmup} is as long as the run ({total} optimizer steps): lr is never reached"
        )
