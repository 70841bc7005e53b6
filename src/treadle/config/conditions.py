"""The checks of a configuration: conditions under which a field has an effect, and rules between fields.

A field declares its conditions itself: `setting(1.0, given("overlong_buffer_len"))`. `checks.idle_settings` reports
every field that was changed although one of its conditions does not hold. Rules that no field can declare are in
`rules_*.py`: rows of `refuse` and `warn_of`, and functions under `@rule`. A message names the value, the reason and
the remedy.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from treadle.catalog import ESTIMATORS, POLICY_LOSSES, Record

if TYPE_CHECKING:
    from treadle.config.sections import Config

Part = Literal["all", "run", "generate", "score", "train", "eval"]
"""When a check applies: to `all` commands, to a `run` (`treadle train`) or one of its parts, or to `eval`."""


class Options(TypedDict, total=False):
    """Keywords of every condition."""

    warn: bool  # report a warning instead of a fault
    together: bool  # report all fields of this condition in one line
    part: Part  # the part for which it is checked; by default that of the field's section


@dataclass(frozen=True, eq=False)
class Condition:
    """A condition under which a field has an effect, and the message if it does not hold.

    `otherwise` continues a sentence that begins with the field: "does nothing without …"; see `filled`.
    """

    holds: Callable[[Config, Any], bool]  # of the configuration and the field's value
    otherwise: str
    warn: bool = False
    together: bool = False
    part: Part | None = None


def filled(text: str, config: Config) -> str:
    """Fill in the values that a text names in braces: `{field}`, or `{section.property}` for a derived value."""
    return text.format_map(dict(config) | {name: shown(value) for _, section in config for name, value in section})


def shown(value: Any) -> str:
    """Return a value as in a recipe without quotation marks; of a table only its names, `none` for an empty value."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value in (None, "", (), [], {}):
        return "none"
    return " ".join(map(str, value)) if isinstance(value, tuple | list | dict) else str(value)


def when(holds: Callable[[Config], bool], otherwise: str, **options: Unpack[Options]) -> Condition:
    """Return the condition that `holds(config)` is true."""
    return Condition(lambda config, value: holds(config), otherwise, **options)


def compared(sign: Literal["<", "<=", ">", ">="], name: str, otherwise: str, **options: Unpack[Options]) -> Condition:
    """Return the condition that the value is on this side of the field `name`; None and 0 steps are no bound."""
    compare = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}[sign]

    def holds(config: Config, value: Any) -> bool:
        bound = config.value(name)
        return bound is None or (bound == 0 and isinstance(bound, int)) or compare(value, bound)

    return Condition(holds, otherwise, **options)


def given(*names: str, why: str = "", **options: Unpack[Options]) -> Condition:
    """Return the condition that one of these fields is set."""
    either = " or ".join(names)
    text = f"does nothing without {either}{why and ': ' + why}; set {either} too, or drop it"
    return when(lambda config: any(config.value(name) for name in names), text, **options)


def needs(name: str, why: str, **options: Unpack[Options]) -> Condition:
    """Return the condition that the field `name`, the other half of a setting, is set too."""
    return when(lambda config: bool(config.value(name)), f"needs {name}, {why}", **options)


def absent(name: str, why: str, **options: Unpack[Options]) -> Condition:
    """Return the condition that the field `name` is not set."""
    return when(lambda config: not config.value(name), f"does nothing with {name}: {why}; drop one of them", **options)


def alone(name: str, why: str = "", **options: Unpack[Options]) -> Condition:
    """Return the condition that the field `name`, which sets the same in another way, is not set."""
    text = f"and {name} = {{{name}}} are both given{why and ': ' + why}; keep one of them"
    return when(lambda config: not config.value(name), text, **options)


def choice(name: str, *values: str, **options: Unpack[Options]) -> Condition:
    """Return the condition that the field `name` has one of these values."""
    text = f"does nothing with {name} = {{{name}}}; set {name} = {' or '.join(values)}, or drop it"
    return when(lambda config: config.value(name) in values, text, **options)


def estimator(trait: str, why: str, **options: Unpack[Options]) -> Condition:
    """Return the condition that the advantage estimator has this trait or is the user's own.

    In `why`, `{those}` stands for their names.
    """
    those = ", ".join(name for name, record in ESTIMATORS.items() if getattr(record, trait))
    text = f"does nothing with {{advantage_estimator}}: {why.format(those=those)}"
    options.setdefault("part", "train")
    return when(lambda c: (found := c.algorithm.estimator) is None or getattr(found, trait), text, **options)


def read_by(table: Mapping[str, Record], field: str, **options: Unpack[Options]) -> Condition:
    """Return the condition that the estimator, or the policy loss, of the run reads the field or is the user's own."""
    those = ", ".join(name for name, record in table.items() if field in record.all_read)
    chosen = "policy loss {algorithm.loss.name}" if table is POLICY_LOSSES else "{advantage_estimator}"

    def holds(config: Config) -> bool:
        found = config.algorithm.loss if table is POLICY_LOSSES else config.algorithm.estimator
        return found is None or field in found.all_read

    options.setdefault("part", "train")
    return when(holds, f"does nothing with {chosen}: it is read by {those}; drop it", **options)


TRAINS_A_CRITIC = estimator("needs_values", "only {those} has a critic; drop it")
IN_THE_RUN = compared(
    "<=",
    "num_rollout",
    "is longer than the run (num_rollout = {num_rollout}): none falls inside it; lower it",
    warn=True,
)


# Rules between fields


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence about the configuration; a fatal one keeps the run from starting."""

    text: str
    fatal: bool


def fault(text: str) -> Finding:
    """Return a finding that keeps the run from starting."""
    return Finding(text, fatal=True)


def warning(text: str) -> Finding:
    """Return a finding that is only reported: a setting that is probably a mistake."""
    return Finding(text, fatal=False)


Rule = Callable[["Config"], Iterator[Finding]]
RULES: list[tuple[Part, Rule]] = []
"""Every rule with the part of a run that it is for, in the order in which they report."""


def rule(part: Part) -> Callable[[Rule], Rule]:
    """Return a decorator that adds a rule to `RULES`."""

    def add(function: Rule) -> Rule:
        RULES.append((part, function))
        return function

    return add


def refuse(part: Part, found: Callable[[Config], Any], text: str) -> None:
    """Add a rule that reports `text` as a fault if `found` returns true; see `filled` for the values in it."""
    rule(part)(lambda config: iter([fault(filled(text, config))] if found(config) else ()))


def warn_of(part: Part, found: Callable[[Config], Any], text: str) -> None:
    """Add a rule as `refuse` does that reports a warning."""
    rule(part)(lambda config: iter([warning(filled(text, config))] if found(config) else ()))
