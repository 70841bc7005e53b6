"""Check a configuration before anything starts: fields without effect, unknown names, and rules between fields."""

from __future__ import annotations

from collections.abc import Iterator

from treadle.config import rules_engine, rules_rollout, rules_run, rules_training  # noqa: F401
from treadle.config.conditions import RULES, Condition, Finding, Part, fault, filled, shown
from treadle.config.fields import config_fields
from treadle.config.secrets import without_secrets
from treadle.config.sections import Config
from treadle.config.values import written
from treadle.errors import ConfigError
from treadle.registry import suggestion

_PART_OF_SECTION: dict[str, Part] = {
    **dict.fromkeys(("model", "algorithm", "critic", "optim", "train"), "train"),
    **dict.fromkeys(("data", "rollout", "eval"), "generate"),
    "reward": "score",
    "engine": "all",
}
"""The part for which a section's settings are checked; the other sections are checked for a `run`."""


def check_config(config: Config, *, evaluation_only: bool = False) -> list[str]:
    """Return warnings, or raise one `ConfigError` that lists every fault, a line each.

    `evaluation_only` checks what `treadle eval` needs: a model, evaluation sets and a reward, but no training.
    """
    findings = findings_of(config, parts_of(config, evaluation_only))
    faults = [finding.text for finding in findings if finding.fatal]
    if faults:
        raise ConfigError(
            faults[0] if len(faults) == 1 else "\n  ".join([f"the configuration has {len(faults)} faults:", *faults])
        )
    return [finding.text for finding in findings]


def parts_of(config: Config, evaluation_only: bool = False) -> set[Part]:
    """Return the parts of a run that a command does with this configuration."""
    if evaluation_only:
        return {"all", "score", "eval"}
    parts: set[Part] = {"all", "run"}
    parts |= set() if config.debug.debug_train_only else {"generate", "score"}
    return parts | (set() if config.debug.debug_rollout_only else {"train"})


def findings_of(config: Config, parts: set[Part]) -> list[Finding]:
    """Return what the conditions and rules for these parts of a run find."""
    found = [finding for part, rule in RULES if part in parts for finding in rule(config)]
    return [*found, *unknown_names(config, parts), *idle_settings(config, parts)]


def unknown_names(config: Config, parts: set[Part]) -> Iterator[Finding]:
    """Find fields whose value is neither a registered name nor, if the field takes one, a path."""
    for field in config_fields().values():
        name = config.value(field.name)
        if not field.declared.names or not isinstance(name, str) or name in field.declared.names:
            continue
        if field.declared.path and ":" in name:
            continue
        if _PART_OF_SECTION.get(field.section, "run") in parts:
            yield fault(f"{field.name} {name!r} is unknown{suggestion(name, field.declared.names, most_listed=12)}")


def idle_settings(config: Config, parts: set[Part]) -> Iterator[Finding]:
    """Find fields that were changed but have no effect; each is reported by its first condition that does not hold."""
    idle: dict[Condition, dict[str, str]] = {}
    for field in config_fields().values():
        value = config.value(field.name)
        for condition in field.declared.only_with if value != field.default else ():
            part = condition.part or _PART_OF_SECTION.get(field.section, "run")
            if part in parts and not condition.holds(config, value):
                idle.setdefault(condition, {})[field.name] = f"{field.name} = {written(shown(without_secrets(value)))}"
                break
    for condition, fields in idle.items():
        text = filled(condition.otherwise, config)
        if condition.together:
            text = "do" + text.removeprefix("does") if len(fields) > 1 and text.startswith("does") else text
            yield Finding(f"{', '.join(fields)} {text} ({', '.join(fields.values())})", not condition.warn)
        else:
            yield from (Finding(f"{given} {text}", not condition.warn) for given in fields.values())
