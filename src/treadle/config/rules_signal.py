"""Rules about what the policy is told: rewards, their parts, a teacher, and KL that is steered; one rule a function."""

from __future__ import annotations

from collections.abc import Iterator

from treadle.config.batch_sizes import batch_arithmetic
from treadle.config.chosen import estimator_of, ignores_bias, ignores_scale, kl_is_weighted
from treadle.config.fields import config_fields
from treadle.config.findings import Finding, Rule, fault, warning
from treadle.config.sections import Config
from treadle.errors import ConfigError

_CONDITIONS = (
    "reward_scale",
    "reward_bias",
    "reward_clip_low",
    "reward_clip_high",
    "normalize_rewards_running",
)


def rewards_have_parts(config: Config) -> Iterator[Finding]:
    found, count = estimator_of(config), len(config.reward.targets)
    if found and found.needs_parts and count < 2:
        yield fault(
            f"advantage_estimator {found.name} normalises several rewards one by one, and {count} is given; use grpo, or "
            "give more with rm_type and custom_rm_path (the parts of one reward's dict count as one reward)"
        )


def distillation_is_whole(config: Config) -> Iterator[Finding]:
    teacher, coef = config.model.opd_teacher_load, config.algorithm.opd_kl_coef
    if teacher is not None and coef == 0:
        yield fault(f"opd_teacher_load = {teacher} does nothing without opd_kl_coef, the weight of the distillation")
    if teacher is None and coef > 0:
        yield fault(f"opd_kl_coef = {coef} needs opd_teacher_load, the model to distil from")


def filter_sees_the_signal(config: Config) -> Iterator[Finding]:
    found = estimator_of(config)
    if config.rollout.group_filter != "zero_signal":
        return
    if config.algorithm.opd_kl_coef > 0 and not config.reward.targets and not config.debug.debug_train_only:
        yield fault("group_filter zero_signal drops every group of a run without a reward; drop it")
    elif config.algorithm.opd_kl_coef > 0:
        yield warning("group_filter zero_signal drops groups of equal rewards, which the teacher would still teach")
    if found and found.needs_parts:
        yield warning(f"group_filter zero_signal looks at the sum of the rewards, {found.name} at each of them")


def kl_controller_is_whole(config: Config) -> Iterator[Finding]:
    target, horizon = config.algorithm.kl_target, config.algorithm.kl_horizon
    if target is None and horizon is None:
        return
    if target is None or horizon is None:
        given, other = ("kl_horizon", "kl_target") if target is None else ("kl_target", "kl_horizon")
        yield fault(f"{given} = {horizon if target is None else target} needs {other} too")
    if not kl_is_weighted(config):
        yield fault("kl_target and kl_horizon have no KL to steer: set kl_coef, or use_kl_loss with kl_loss_coef")
    try:
        samples = batch_arithmetic(config).samples_per_rollout
    except ConfigError:
        return
    if horizon is not None and 5 * horizon <= samples:  # a rollout moves the weight by at most 0.2 · samples / horizon
        yield fault(
            f"kl_horizon = {horizon} is too short for rollouts of {samples} samples: the weight of KL could fall to 0 at "
            f"once; give more than {samples // 5}"
        )


def reward_clip_is_ordered(config: Config) -> Iterator[Finding]:
    low, high = config.reward.reward_clip_low, config.reward.reward_clip_high
    if low is not None and high is not None and low >= high:
        yield fault(f"reward_clip_low = {low} must be below reward_clip_high = {high}")


def conditioned_rewards_are_read(config: Config) -> Iterator[Finding]:
    values = config.reward.model_dump()
    given = {name: values[name] for name in _CONDITIONS if values[name] != config_fields()[name].default}
    found = estimator_of(config)
    if found is None:
        return
    name, traits = found.name, found
    if traits.needs_parts:
        if config.algorithm.overlong_buffer_len is not None:
            given["overlong_buffer_len"] = config.algorithm.overlong_buffer_len
        if given:
            yield fault(f"{_joined(given)} does nothing with {name}, which normalises each reward by itself; drop it")
        return
    if given and not config.reward.targets and not config.debug.debug_train_only:
        yield fault(f"{_joined(given)} does nothing without a reward: set rm_type or custom_rm_path")
    if "reward_clip_low" in given or "reward_clip_high" in given:  # scale and bias then say what is cut
        given = {key: value for key, value in given.items() if key == "normalize_rewards_running"}
    no_scale, no_bias = ignores_scale(config, traits), ignores_bias(config, traits)
    dead = {"reward_scale": no_scale, "reward_bias": no_bias, "normalize_rewards_running": no_scale and no_bias}
    unread = {key: value for key, value in given.items() if dead.get(key)}
    if unread:
        yield fault(f"{_joined(unread)} does nothing with {name}: its advantages do not change by it; drop it")
    if traits.divides_by_mean and "normalize_rewards_running" in given:
        yield fault(f"normalize_rewards_running makes rewards negative, and {name} divides by their mean; drop it")
    if traits.divides_by_mean and config.algorithm.overlong_buffer_len is not None:
        buffer = config.algorithm.overlong_buffer_len
        yield fault(f"overlong_buffer_len = {buffer} makes rewards negative, and {name} divides by their mean; drop it")


def _joined(given: dict[str, object]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in given.items())


SIGNAL_RULES: tuple[Rule, ...] = (
    rewards_have_parts,
    distillation_is_whole,
    filter_sees_the_signal,
    kl_controller_is_whole,
    reward_clip_is_ordered,
    conditioned_rewards_are_read,
)
"""Rules of a run that trains: what it learns from."""
