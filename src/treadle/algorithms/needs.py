"""What each algorithm must be given, by name, so that the trainer computes only that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType

from treadle.algorithms.advantages import ESTIMATORS, Estimator
from treadle.algorithms.corrections import CORRECTIONS, Level
from treadle.algorithms.kl import KL_ESTIMATORS
from treadle.algorithms.losses import POLICY_LOSSES, ROLLOUT_POLICY_LOSSES, WHOLE_SAMPLE_LOSSES
from treadle.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Needs:
    """Inputs beside the current logprobs and the rewards; `|` joins the needs of several parts.

    `old_logprobs` are read inside the loss: in the first step of a rollout they equal the current ones and need no
    pass of their own. `prior_logprobs` are the same numbers, read before that step: they always need one.
    """

    old_logprobs: bool = False
    prior_logprobs: bool = False
    prior_entropy: bool = False  # of the policy before the step
    rollout_logprobs: bool = False
    ref_logprobs: bool = False
    teacher_logprobs: bool = False
    values: bool = False  # a critic
    groups: bool = False  # more than one sample of a prompt
    reward_parts: bool = False
    whitening: bool = False  # a sum over all ranks
    whole_samples: bool = False  # a sample must not be split over micro-batches

    def __or__(self, other: Needs) -> Needs:
        return Needs(*(getattr(self, f.name) or getattr(other, f.name) for f in fields(self)))


def estimator_needs(rule: Estimator) -> Needs:
    """What an estimator must be given, your own too."""
    return Needs(
        values=rule.needs_values, groups=rule.needs_group, reward_parts=rule.needs_parts, whitening=rule.whitens
    )


def _table() -> dict[str, Needs]:
    table = {f"advantage/{name}": estimator_needs(rule) for name, rule in ESTIMATORS.items()}
    for name in POLICY_LOSSES:
        table[f"policy_loss/{name}"] = Needs(
            old_logprobs=True,
            rollout_logprobs=name in ROLLOUT_POLICY_LOSSES,
            whole_samples=name in WHOLE_SAMPLE_LOSSES,
        )
    for name in KL_ESTIMATORS:
        table[f"kl_loss/{name}"] = Needs(ref_logprobs=True)
    for name, correction in CORRECTIONS.items():
        table[f"correction/{name}"] = Needs(
            prior_logprobs=True, rollout_logprobs=True, whole_samples=correction.level != Level.TOKEN
        )
    table["policy_loss/custom"] = Needs(old_logprobs=True, rollout_logprobs=True, whole_samples=True)  # all it may read
    table["kl_reward"] = Needs(ref_logprobs=True, prior_logprobs=True)
    table["unbiased_kl"] = Needs(ref_logprobs=True, old_logprobs=True)
    table["distillation"] = Needs(teacher_logprobs=True, prior_logprobs=True)
    table["whitening"] = Needs(whitening=True)
    table["opsm"] = Needs(old_logprobs=True, whole_samples=True)
    table["m2po"] = Needs(prior_logprobs=True, rollout_logprobs=True)
    table["top_entropy"] = Needs(prior_entropy=True)
    table["value_loss"] = Needs(values=True)
    table["sft"] = Needs()
    return table


NEEDS: Mapping[str, Needs] = MappingProxyType(_table())
"""Every part of an algorithm, as `kind/name`, and what it must be given."""


def needs_of(*parts: str) -> Needs:
    """What these parts need together; `ConfigError` for one that is not in the table.

    >>> needs_of("advantage/grpo", "policy_loss/ppo", "kl_loss/k3").ref_logprobs
    True
    """
    joined = Needs()
    for part in parts:
        if part not in NEEDS:
            raise ConfigError(f"algorithm part {part!r} is unknown; choose among {', '.join(NEEDS)}")
        joined = joined | NEEDS[part]
    return joined
