"""The chosen advantage estimator and policy loss: a named one, or the user's own, checked before anything runs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

from treadle.algorithms.advantages import ESTIMATORS, Estimator, broadcast, find_estimator
from treadle.algorithms.contract import check_advantage, check_policy_loss
from treadle.algorithms.losses import PolicyLossFn, find_policy_loss
from treadle.catalog import PARAMETERS
from treadle.config import AlgorithmSection
from treadle.errors import ConfigError
from treadle.registry import resolve, user_code

P = ParamSpec("P")
R = TypeVar("R")


def chosen_estimator(section: AlgorithmSection) -> Estimator:
    """Return the named estimator, or the user's.

    Raises `ConfigError` if the user's breaks the contract of estimators, or a setting is given that it does not read.
    """
    path = section.custom_advantage_path
    if path is None:
        return find_estimator(section.advantage_estimator, section.model_dump())
    found: Any = resolve("advantage", path, {})
    rule = found if isinstance(found, Estimator) else Estimator(path, found, broadcast)
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
    own_spread = rule.spread not in (broadcast, *(known.spread for known in ESTIMATORS.values()))
    spread = _guarded("custom_advantage_path", path, rule.spread) if own_spread else rule.spread
    return replace(rule, shape=_guarded("custom_advantage_path", path, rule.shape), spread=spread)


def chosen_policy_loss(section: AlgorithmSection, estimator: Estimator) -> PolicyLossFn:
    """Return the named policy loss, or the user's, which gets the parameters that it names as keywords.

    Raises `ConfigError` if the user's breaks the contract of policy losses.
    """
    path = section.custom_loss_path
    if path is None:
        return find_policy_loss(section.policy_loss or estimator.policy_loss, section.model_dump())
    found: Any = resolve("policy loss", path, {})
    with user_code(_fault("custom_loss_path", path)):
        named = PARAMETERS.keys() & inspect.signature(found).parameters.keys()
        loss = functools.partial(found, **{name: section.model_dump()[name] for name in named}) if named else found
    _hold_to_contract("custom_loss_path", path, lambda: check_policy_loss(loss))
    return _guarded("custom_loss_path", path, loss)


def _hold_to_contract(field: str, path: str, check: Callable[[], None]) -> None:
    broken = ""
    with user_code(_fault(field, path)):
        try:
            check()
        except AssertionError as error:
            broken = (str(error) or repr(error)).splitlines()[0]
    if broken:
        raise _fault(field, path)(broken)


def _fault(field: str, path: str) -> Callable[[str], ConfigError]:
    return lambda what: ConfigError(f"{field} {path!r} does not do what the trainer relies on: {what}")


def _guarded(field: str, path: str, function: Callable[P, R]) -> Callable[P, R]:
    """Return the same function; what it raises while a run trains becomes a `ConfigError` that names it."""
    fault = _fault(field, path)

    @functools.wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        with user_code(fault):
            return function(*args, **kwargs)

    return guarded
