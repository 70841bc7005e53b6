"""Rules about estimators, losses, batches and the optimizer; each is one function and says one thing."""

from __future__ import annotations

from collections.abc import Iterator

from treadle.catalog import (
    CORRECTIONS,
    ESTIMATORS,
    KL_ESTIMATORS,
    POLICY_LOSSES,
)
from treadle.config.batch_sizes import batch_arithmetic
from treadle.config.chosen import estimator_of
from treadle.config.fields import config_fields, did_you_mean
from treadle.config.findings import Finding, Rule, fault, warning
from treadle.config.sections import Config
from treadle.errors import ConfigError


def _those_with(trait: str) -> str:
    return ", ".join(name for name, traits in ESTIMATORS.items() if getattr(traits, trait))


def estimator_is_known(config: Config) -> Iterator[Finding]:
    name = config.algorithm.advantage_estimator
    if name not in ESTIMATORS:
        yield fault(f"advantage_estimator {name!r} is unknown{did_you_mean(name, list(ESTIMATORS))}")


def group_has_company(config: Config) -> Iterator[Finding]:
    found, n = estimator_of(config), config.rollout.n_samples_per_prompt
    if found and found.needs_group and n == 1 and config.algorithm.opd_kl_coef == 0:
        yield fault(
            f"n_samples_per_prompt = 1 gives {found.name} nothing to compare: every advantage would be zero; "
            f"set at least 2, or use {_those_without_groups()}"
        )


def _those_without_groups() -> str:
    return ", ".join(name for name, traits in ESTIMATORS.items() if not traits.needs_group)


def kl_penalty_is_used(config: Config) -> Iterator[Finding]:
    found, coef = estimator_of(config), config.algorithm.kl_coef
    if found and coef > 0 and not found.per_token_reward:
        yield fault(
            f"kl_coef = {coef} does nothing with {found.name}: only {_those_with('per_token_reward')} put KL in the reward; "
            "use use_kl_loss and kl_loss_coef instead"
        )


def kl_counts_once(config: Config) -> Iterator[Finding]:
    if config.algorithm.kl_coef > 0 and config.algorithm.use_kl_loss:
        yield fault(f"kl_coef = {config.algorithm.kl_coef} and use_kl_loss would count KL twice; keep one of them")


def kl_loss_is_on_and_weighted(config: Config) -> Iterator[Finding]:
    algorithm = config.algorithm
    if algorithm.kl_loss_coef > 0 and not algorithm.use_kl_loss:
        yield fault(f"kl_loss_coef = {algorithm.kl_loss_coef} does nothing without use_kl_loss; add use_kl_loss = true")
    if algorithm.use_kl_loss and algorithm.kl_loss_coef == 0:
        yield warning(
            "use_kl_loss with kl_loss_coef = 0 computes the KL to the reference model and trains nothing with it"
        )


def kl_type_is_known(config: Config) -> Iterator[Finding]:
    algorithm = config.algorithm
    name = algorithm.kl_loss_type
    if name not in KL_ESTIMATORS:
        yield fault(f"kl_loss_type {name!r} is unknown{did_you_mean(name, list(KL_ESTIMATORS))}")
    elif name != config_fields()["kl_loss_type"].default and not algorithm.use_kl_loss:
        yield warning(f"kl_loss_type = {name} does nothing without use_kl_loss (kl_coef always takes k1)")


def reference_is_used(config: Config) -> Iterator[Finding]:
    if config.model.ref_load is not None and not config.algorithm.use_kl_loss and config.algorithm.kl_coef == 0:
        yield warning(f"ref_load = {config.model.ref_load} is not loaded: neither use_kl_loss nor kl_coef is on")


def clip_range_is_ordered(config: Config) -> Iterator[Finding]:
    low, high = config.algorithm.eps_clip, config.algorithm.eps_clip_high
    if low == 1 and high is None:
        yield fault("eps_clip = 1 leaves the ratio without a lower bound; set eps_clip_high, its upper bound, too")
    elif high is not None and high < low < 1:
        yield fault(
            f"eps_clip_high = {high} is less than eps_clip = {low}; it is the wider, upper side of the clip range"
        )


def discount_is_used(config: Config) -> Iterator[Finding]:
    found, algorithm = estimator_of(config), config.algorithm
    if found and algorithm.gamma != 1 and not found.uses_gamma:
        yield fault(
            f"gamma = {algorithm.gamma} does nothing with {found.name}: only {_those_with('uses_gamma')} discounts"
        )
    if found and algorithm.lambd != 1 and not found.needs_values:
        yield fault(
            f"lambd = {algorithm.lambd} does nothing with {found.name}: it needs an estimator with a critic (ppo)"
        )


def std_normalization_is_used(config: Config) -> Iterator[Finding]:
    found = estimator_of(config)
    if found and not config.algorithm.grpo_std_normalization and not found.divides_by_std:
        yield warning(
            f"grpo_std_normalization = false does nothing with {found.name}: it never divides by the deviation"
        )


def whitening_is_not_repeated(config: Config) -> Iterator[Finding]:
    found = estimator_of(config)
    if found and config.algorithm.normalize_advantages and found.whitens:
        yield warning(f"normalize_advantages does nothing with {found.name}: it whitens its advantages already")


def loss_and_correction_are_known(config: Config) -> Iterator[Finding]:
    algorithm = config.algorithm
    for field, name, known in (
        ("policy_loss", algorithm.policy_loss, POLICY_LOSSES),
        ("rollout_correction", algorithm.rollout_correction, CORRECTIONS),
    ):
        if name is not None and name not in known:
            yield fault(f"{field} {name!r} is unknown{did_you_mean(name, list(known))}")


def own_functions_stand_alone(config: Config) -> Iterator[Finding]:
    algorithm = config.algorithm
    if algorithm.custom_advantage_path is not None and algorithm.advantage_estimator != "grpo":
        yield fault(
            f"advantage_estimator = {algorithm.advantage_estimator} and custom_advantage_path are both given; keep one"
        )
    if algorithm.custom_loss_path is not None and algorithm.policy_loss is not None:
        yield fault(f"policy_loss = {algorithm.policy_loss} and custom_loss_path are both given; keep one")


def reference_follows_one_way(config: Config) -> Iterator[Finding]:
    algorithm = config.algorithm
    interval, decay = algorithm.ref_update_interval, algorithm.ref_ema_decay
    if interval is not None and decay is not None:
        yield fault(f"ref_update_interval = {interval} and ref_ema_decay = {decay} are both given; keep one")
    if (interval or decay) and not algorithm.use_kl_loss and algorithm.kl_coef == 0:
        yield fault("ref_update_interval and ref_ema_decay do nothing without a reference: set use_kl_loss or kl_coef")


def unbiased_kl_is_used(config: Config) -> Iterator[Finding]:
    algorithm = config.algorithm
    if algorithm.use_unbiased_kl and not algorithm.use_kl_loss:
        yield fault("use_unbiased_kl does nothing without use_kl_loss")
    elif (
        algorithm.use_unbiased_kl
        and algorithm.kl_loss_type in KL_ESTIMATORS
        and not KL_ESTIMATORS[algorithm.kl_loss_type].unbiased_by_ratio
    ):
        yield warning(
            f"use_unbiased_kl with kl_loss_type = {algorithm.kl_loss_type} does not give the gradient of the KL; it does "
            f"with {', '.join(name for name, record in KL_ESTIMATORS.items() if record.unbiased_by_ratio)}"
        )


def kl_loss_pulls(config: Config) -> Iterator[Finding]:
    algorithm = config.algorithm
    if algorithm.use_kl_loss and algorithm.kl_loss_type == "k1" and not algorithm.use_unbiased_kl:
        yield warning(
            "kl_loss_type = k1 in the loss holds nothing back: its gradient is 0 on average; add use_unbiased_kl, or use "
            "another"
        )


def overlong_penalty_is_used(config: Config) -> Iterator[Finding]:
    algorithm, longest = config.algorithm, config.rollout.rollout_max_response_len
    buffer = algorithm.overlong_buffer_len
    if buffer is None and algorithm.overlong_penalty_factor != 1:
        yield fault("overlong_penalty_factor does nothing without overlong_buffer_len")
    if buffer is not None and buffer > longest:
        yield fault(f"overlong_buffer_len = {buffer} is more than rollout_max_response_len = {longest}")


def critic_is_used(config: Config) -> Iterator[Finding]:
    found = estimator_of(config)
    if found and not found.needs_values:
        for name, value in {**config.critic.model_dump(), **config.cluster.critic_numbers}.items():
            if value != config_fields()[name].default:
                yield fault(
                    f"{name} = {value} does nothing with {found.name}: only {_those_with('needs_values')} has a critic"
                )


def policy_is_trained_too(config: Config) -> Iterator[Finding]:
    alone, rollouts = config.critic.num_critic_only_steps, config.train.num_rollout
    if rollouts is not None and 0 < rollouts <= alone:
        yield fault(
            f"num_critic_only_steps = {alone} is all of num_rollout = {rollouts}: the policy would never be trained"
        )


def entropy_is_a_bonus(config: Config) -> Iterator[Finding]:
    if config.algorithm.entropy_coef < 0:
        yield warning(f"entropy_coef = {config.algorithm.entropy_coef} is negative: it pushes the entropy down")


def loss_has_one_denominator(config: Config) -> Iterator[Finding]:
    algorithm = config.algorithm
    if algorithm.calculate_per_token_loss and algorithm.loss_length_divisor is not None:
        yield fault(
            f"calculate_per_token_loss and loss_length_divisor = {algorithm.loss_length_divisor} are two denominators "
            "of one loss; keep one of them"
        )


def batches_agree(config: Config) -> Iterator[Finding]:
    try:
        batch_arithmetic(config)
    except ConfigError as error:
        yield fault(str(error))


def micro_batches_have_one_measure(config: Config) -> Iterator[Finding]:
    train = config.train
    if train.use_dynamic_batch_size and train.micro_batch_size is not None:
        yield fault(
            f"micro_batch_size = {train.micro_batch_size} does nothing with use_dynamic_batch_size (micro-batches are "
            f"filled up to max_tokens_per_gpu = {train.max_tokens_per_gpu}); add --no-use-dynamic-batch-size or drop it"
        )
    if not train.use_dynamic_batch_size and train.micro_batch_size is None:
        yield fault("use_dynamic_batch_size = false needs micro_batch_size, the number of samples in a micro-batch")
    if not train.use_dynamic_batch_size and train.max_tokens_per_gpu != config_fields()["max_tokens_per_gpu"].default:
        yield warning(f"max_tokens_per_gpu = {train.max_tokens_per_gpu} does nothing without use_dynamic_batch_size")


def micro_batch_holds_a_sample(config: Config) -> Iterator[Finding]:
    room, longest = config.train.max_tokens_per_gpu, config.rollout.rollout_max_response_len
    if config.train.use_dynamic_batch_size and longest > room:
        yield warning(
            f"samples up to rollout_max_response_len = {longest} tokens are longer than max_tokens_per_gpu = {room}; "
            "each such sample makes a micro-batch of its own, with the memory it takes"
        )


def length_of_run_is_given_once(config: Config) -> Iterator[Finding]:
    rollouts, epochs = config.train.num_rollout, config.train.num_epoch
    if rollouts is None and epochs is None and not config.debug.debug_train_only:
        yield fault("how long to train is not given: set num_rollout (rollouts) or num_epoch (passes over the data)")
    if rollouts is not None and epochs is not None:
        yield fault(
            f"num_rollout = {rollouts} and num_epoch = {epochs} are both given; keep one (None unsets the other)"
        )
    if config.debug.debug_train_only and rollouts is None and epochs is not None:
        yield fault(
            f"num_epoch = {epochs} counts passes over prompt_data, which debug_train_only does not read; "
            "use num_rollout, or neither for all saved rollouts"
        )


def start_is_before_the_end(config: Config) -> Iterator[Finding]:
    start, rollouts = config.train.start_rollout_id, config.train.num_rollout
    if start is not None and rollouts and start >= rollouts:
        yield fault(
            f"start_rollout_id = {start} leaves nothing to do: the run ends after num_rollout = {rollouts} (ids from 0)"
        )


def learning_rate_decays_downwards(config: Config) -> Iterator[Finding]:
    optim = config.optim
    if optim.min_lr > optim.lr:
        yield fault(f"min_lr = {optim.min_lr} is above lr = {optim.lr}; it is where the decay ends")
    elif optim.min_lr > 0 and optim.lr_decay_style == "constant":
        yield warning(f"min_lr = {optim.min_lr} does nothing with lr_decay_style = constant; use linear or cosine")


def decay_has_steps(config: Config) -> Iterator[Finding]:
    optim = config.optim
    steps, warmup = optim.lr_decay_steps, optim.lr_warmup_steps
    if steps is None:
        return
    if optim.lr_decay_style == "constant":
        yield fault(
            f"lr_decay_steps = {steps} does nothing with lr_decay_style = constant; use linear or cosine, or drop it"
        )
    elif steps <= warmup:
        yield fault(
            f"lr_decay_steps = {steps} must be more than lr_warmup_steps = {warmup}: the decay starts after the warm-up"
        )


def warmup_ends_in_time(config: Config) -> Iterator[Finding]:
    rollouts, warmup = config.train.num_rollout, config.optim.lr_warmup_steps
    if not rollouts or not warmup:
        return
    try:
        steps = rollouts * batch_arithmetic(config).num_steps_per_rollout
    except ConfigError:
        return
    if warmup >= steps:
        yield warning(
            f"lr_warmup_steps = {warmup} is as long as the run ({steps} optimizer steps): lr is never reached"
        )


ALGORITHM_RULES: tuple[Rule, ...] = (
    estimator_is_known,
    group_has_company,
    kl_penalty_is_used,
    kl_counts_once,
    kl_loss_is_on_and_weighted,
    kl_type_is_known,
    reference_is_used,
    clip_range_is_ordered,
    discount_is_used,
    std_normalization_is_used,
    whitening_is_not_repeated,
    loss_and_correction_are_known,
    own_functions_stand_alone,
    reference_follows_one_way,
    unbiased_kl_is_used,
    kl_loss_pulls,
    overlong_penalty_is_used,
    critic_is_used,
    policy_is_trained_too,
    entropy_is_a_bonus,
    loss_has_one_denominator,
    batches_agree,
    micro_batches_have_one_measure,
    micro_batch_holds_a_sample,
    length_of_run_is_given_once,
    start_is_before_the_end,
    learning_rate_decays_downwards,
    decay_has_steps,
    warmup_ends_in_time,
)
"""Rules of a run that trains."""
