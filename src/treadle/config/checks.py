"""Check the rules that join fields of several sections, before anything starts."""

from __future__ import annotations

from treadle.config.findings import Rule
from treadle.config.rules_algorithm import ALGORITHM_RULES, length_of_run_is_given_once
from treadle.config.rules_cluster import CLUSTER_RULES, evaluation_is_local
from treadle.config.rules_correction import CORRECTION_RULES
from treadle.config.rules_engine import ENGINE_RULES
from treadle.config.rules_rollout import (
    EVALUATION_RULES,
    GENERATION_RULES,
    MODEL_RULES,
    SAMPLED_TRAINING_RULES,
    SCORING_RULES,
)
from treadle.config.rules_run import RUN_RULES, folders_have_names
from treadle.config.rules_signal import SIGNAL_RULES
from treadle.config.sections import Config
from treadle.errors import ConfigError


def check_config(config: Config, *, evaluation_only: bool = False) -> list[str]:
    """Return warnings, or raise one `ConfigError` that lists every fault, a line each.

    `evaluation_only` checks what `treadle eval` needs: a model, evaluation sets and a reward, but no training.
    """
    findings = [finding for rule in _rules(config, evaluation_only) for finding in rule(config)]
    faults = [finding.text for finding in findings if finding.fatal]
    if faults:
        raise ConfigError(
            faults[0] if len(faults) == 1 else "\n  ".join([f"the configuration has {len(faults)} faults:", *faults])
        )
    return [finding.text for finding in findings]


def _rules(config: Config, evaluation_only: bool) -> tuple[Rule, ...]:
    debug = config.debug
    if evaluation_only:
        return (*MODEL_RULES, *EVALUATION_RULES, *SCORING_RULES, *ENGINE_RULES, evaluation_is_local, folders_have_names)
    rules = MODEL_RULES + RUN_RULES + CLUSTER_RULES + ENGINE_RULES
    if not debug.debug_train_only:
        rules += GENERATION_RULES + SCORING_RULES
    if debug.debug_rollout_only:
        return (*rules, length_of_run_is_given_once)
    if not debug.debug_train_only:
        rules += SAMPLED_TRAINING_RULES
    return rules + ALGORITHM_RULES + CORRECTION_RULES + SIGNAL_RULES
