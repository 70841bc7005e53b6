"""When a field of the configuration has an effect, declared on the field: `setting(1.0, given("overlong_buffer_len"))`.

One rule (`checks.idle_settings`) reports every field that was changed although its condition does not hold. A message names
the value, the reason and the remedy.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from treadle.catalog import ESTIMATORS, POLICY_LOSSES, Record

if TYPE_CHECKING:
    from treadle.config.sections import Config

Part = Literal["all", "run", "generate", "score", "train", "eval"]
"""What a command does: `all` of them, a `run` (`treadle train`), which may generate, score and train, and `treadle eval`."""


@dataclass(frozen=True, eq=False)
class Condition:
    """When a field has an effect, and what is said of it otherwise.

    `otherwise` continues a sentence that begins with the field: "does nothing without …". With `together`, all fields of
    this condition are reported in one line. `part` is that of the field's section unless set.
    """

    holds: Callable[[Config, Any], bool]  # of the configuration and the field's value
    otherwise: Callable[[Config], str]
    fatal: bool = True
    together: bool = False
    part: Part | None = None


class Options(TypedDict, total=False):
    """Keywords of every condition."""

    fatal: bool
    together: bool
    part: Part


def when(
    holds: Callable[[Config], bool], otherwise: str | Callable[[Config], str], **options: Unpack[Options]
) -> Condition:
    """It has an effect if `holds` says so."""
    text = otherwise
    say = (lambda config: text) if isinstance(text, str) else text
    return Condition(lambda config, value: holds(config), say, **options)


def compared(sign: Literal["<", "<=", ">", ">="], name: str, otherwise: str, **options: Unpack[Options]) -> Condition:
    """It is on this side of the field `name`, which the text holds as `{}`; None, or no steps or rollouts, is no bound."""
    compare = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}[sign]

    def holds(config: Config, value: Any) -> bool:
        bound = config.value(name)
        return bound is None or (bound == 0 and isinstance(bound, int)) or compare(value, bound)

    return Condition(holds, lambda config: otherwise.format(f"{name} = {config.value(name)}"), **options)


def given(*names: str, why: str = "", **options: Unpack[Options]) -> Condition:
    """It has an effect if one of these fields is set."""
    either = " or ".join(names)
    return when(
        lambda config: any(config.value(name) for name in names),
        f"does nothing without {either}{why and ': ' + why}; set {either} too, or drop it",
        **options,
    )


def needs(name: str, why: str, **options: Unpack[Options]) -> Condition:
    """It is half of a setting: the field `name` must be set too."""
    return when(lambda config: bool(config.value(name)), f"needs {name}, {why}", **options)


def absent(name: str, why: str, **options: Unpack[Options]) -> Condition:
    """It has an effect unless this field is set."""
    return when(lambda config: not config.value(name), f"does nothing with {name}: {why}; drop one of them", **options)


def alone(name: str, why: str = "", **options: Unpack[Options]) -> Condition:
    """It is another way to say what this field says."""
    return when(
        lambda config: not config.value(name),
        lambda config: f"and {name} = {shown(config.value(name))} are both given{why and ': ' + why}; keep one of them",
        **options,
    )


def choice(name: str, *values: str, why: str = "", **options: Unpack[Options]) -> Condition:
    """It has an effect if the field `name` has one of these values."""
    return when(
        lambda config: config.value(name) in values,
        lambda config: (
            f"does nothing with {name} = {config.value(name)}{why and ': ' + why}; set {name} = {' or '.join(values)}, or drop it"
        ),
        **options,
    )


def estimator(trait: str, why: str, **options: Unpack[Options]) -> Condition:
    """It has an effect with the advantage estimators that have this trait, and with the user's own."""
    options.setdefault("part", "train")
    names = ", ".join(name for name, record in ESTIMATORS.items() if getattr(record, trait))
    return when(
        lambda config: (found := config.algorithm.estimator) is None or getattr(found, trait),
        lambda config: f"does nothing with {config.algorithm.advantage_estimator}: {why.format(names)}",
        **options,
    )


def read_by(table: Mapping[str, Record], field: str, **options: Unpack[Options]) -> Condition:
    """It has an effect with the estimators, or the policy losses, that read it, and with the user's own."""
    is_loss = table is POLICY_LOSSES
    kind = "policy loss" if is_loss else "advantage_estimator"
    options.setdefault("part", "train")
    names = ", ".join(name for name, record in table.items() if field in record.all_read)

    def chosen(config: Config) -> Record | None:
        return config.algorithm.loss if is_loss else config.algorithm.estimator

    return when(
        lambda config: (found := chosen(config)) is None or field in found.all_read,
        lambda config: (
            f"does nothing with {kind} {found.name if (found := chosen(config)) else ''}: it is read by {names}; drop it"
        ),
        **options,
    )


def shown(value: Any) -> str:
    """A value in a message, as a recipe has it but without quotation marks."""
    return ("true" if value else "false") if isinstance(value, bool) else str(value)


REFERENCE = when(
    lambda config: config.algorithm.uses_reference,
    "does nothing without a reference: set use_kl_loss, or kl_coef, or drop it",
    part="train",
)
TRAINS_A_CRITIC = estimator("needs_values", "only {} has a critic; drop it")
ON_RAY = choice("runtime", "ray", fatal=False, together=True)
STARTED_SERVERS = absent("rollout_external_engine_addrs", "those servers run already", fatal=False, together=True)
IN_THE_RUN = compared("<=", "num_rollout", "is longer than the run ({}): none falls inside it; lower it", fatal=False)
