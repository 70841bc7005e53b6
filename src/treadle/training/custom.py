"""Advantages and policy losses by name, or of the user's own, held to their contract before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from treadle.algorithms.advantages import Estimator, broadcast, find_estimator
from treadle.algorithms.contract import check_advantage, check_policy_loss
from treadle.algorithms.losses import PolicyLossFn, find_policy_loss
from treadle.config import AlgorithmSection
from treadle.errors import ConfigError
from treadle.registry import resolve


def chosen_estimator(section: AlgorithmSection) -> Estimator:
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
    return rule


def chosen_policy_loss(section: AlgorithmSection, estimator: Estimator) -> PolicyLossFn:
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
