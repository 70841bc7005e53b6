"""Rules about what weighs or drops tokens of the policy loss; each is one function and says one thing."""

from __future__ import annotations

from collections.abc import Iterator

from treadle.catalog import CORRECTIONS, POLICY_LOSSES, Bound
from treadle.config.batch_sizes import batch_arithmetic
from treadle.config.chosen import policy_loss_of
from treadle.config.findings import Finding, Rule, fault, warning
from treadle.config.sections import Config
from treadle.errors import ConfigError


def dual_clip_is_used(config: Config) -> Iterator[Finding]:
    loss, algorithm = policy_loss_of(config), config.algorithm
    if (
        loss is not None
        and loss in POLICY_LOSSES
        and algorithm.eps_clip_c is not None
        and "eps_clip_c" not in POLICY_LOSSES[loss].reads
    ):
        yield warning(f"eps_clip_c = {algorithm.eps_clip_c} does nothing with policy loss {loss}: it has no dual clip")
    if loss == "sapo" and (algorithm.eps_clip_high is not None or algorithm.eps_clip != 0.2):
        yield warning("eps_clip and eps_clip_high do nothing with policy loss sapo: its gate is soft")


def parameters_are_read(config: Config) -> Iterator[Finding]:
    loss, values = policy_loss_of(config), config.algorithm.model_dump()
    for record in POLICY_LOSSES.values() if loss is not None else ():
        for parameter in record.parameters if record.name != loss else ():
            if (value := values[parameter.name]) != parameter.default:
                yield fault(
                    f"{parameter.name} = {value} does nothing with policy loss {loss}; set policy_loss = {record.name}, or drop it"
                )


def drift_mask_can_see_drift(config: Config) -> Iterator[Finding]:
    delta = config.algorithm.opsm_delta
    try:
        steps = batch_arithmetic(config).num_steps_per_rollout
    except ConfigError:
        return
    if delta is not None and steps == 1:
        yield fault(
            f"opsm_delta = {delta} does nothing with one optimizer step a rollout: the policy has not moved yet; "
            "set num_steps_per_rollout"
        )


def correction_settings_are_used(config: Config) -> Iterator[Finding]:
    algorithm = config.algorithm
    if algorithm.rollout_correction is None:
        for name, value in (
            ("correction_bound", algorithm.correction_bound),
            ("correction_low", algorithm.correction_low),
            ("correction_high", algorithm.correction_high),
            ("correction_veto", algorithm.correction_veto),
            ("correction_reject_level", algorithm.correction_reject_level),
            ("correction_batch_mean_one", algorithm.correction_batch_mean_one or None),
        ):
            if value is not None:
                yield fault(f"{name} = {value} does nothing without rollout_correction")


def correction_bounds_are_ordered(config: Config) -> Iterator[Finding]:
    algorithm = config.algorithm
    for prefix, low, high in (
        ("correction", algorithm.correction_low, algorithm.correction_high),
        ("correction_reject", algorithm.correction_reject_low, algorithm.correction_reject_high),
    ):
        if low is not None and high is not None and low > high:
            yield fault(f"{prefix}_low = {low} is more than {prefix}_high = {high}")


def lower_bound_is_used(config: Config) -> Iterator[Finding]:
    algorithm = config.algorithm
    name, low, bound = algorithm.rollout_correction, algorithm.correction_low, algorithm.correction_bound
    if name is None or low is None:
        return
    if bound == "truncate" or (
        bound is None and name in CORRECTIONS and CORRECTIONS[name].settings.bound is Bound.TRUNCATE
    ):
        yield fault(
            f"correction_low = {low} does nothing with rollout_correction {name}, whose weights are cut from above only; "
            "set correction_bound = clip or mask, or drop it"
        )


def rejection_is_whole(config: Config) -> Iterator[Finding]:
    algorithm = config.algorithm
    level, low, high = (
        algorithm.correction_reject_level,
        algorithm.correction_reject_low,
        algorithm.correction_reject_high,
    )
    if level is not None and not low and high is None:  # a weight is never below 0
        yield fault(
            f"correction_reject_level = {level} drops nothing without a bound; set correction_reject_low (above 0) or _high"
        )
    for name, value in (("correction_reject_low", low), ("correction_reject_high", high)):
        if level is None and value is not None:
            yield fault(f"{name} = {value} does nothing without correction_reject_level (token, sequence or geometric)")


CORRECTION_RULES: tuple[Rule, ...] = (
    dual_clip_is_used,
    parameters_are_read,
    drift_mask_can_see_drift,
    correction_settings_are_used,
    correction_bounds_are_ordered,
    lower_bound_is_used,
    rejection_is_whole,
)
"""Rules of a run that trains: its policy loss, token by token."""
