"""The names a recipe may use for estimators and rewards, and what each estimator reads.

Data only, so that the configuration can be checked without importing torch; the packages that implement the names
are compared with these tables by tests.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Estimator:
    """One advantage estimator.

    `compares_group`: a group of one sample has advantage zero. `divides_by_std`: grpo_std_normalization applies.
    `uses_kl_coef`, `uses_gamma`, `uses_lambd`: these fields have an effect. `whitens`: normalises over the whole
    rollout by itself. `policy_loss`: the loss it is used with. `uses_critic`: it has a critic, so the fields of
    [critic] have an effect. `uses_parts`: it reads the rewards one by one, never their sum. `divides_by_mean`: by the
    group's mean reward, so rewards must not be negative.
    """

    compares_group: bool = True
    divides_by_std: bool = False
    uses_kl_coef: bool = False
    uses_gamma: bool = False
    uses_lambd: bool = False
    whitens: bool = False
    policy_loss: str = "ppo"
    uses_critic: bool = False
    uses_parts: bool = False
    divides_by_mean: bool = False


ADVANTAGE_ESTIMATORS: dict[str, Estimator] = {
    "grpo": Estimator(divides_by_std=True),
    "gspo": Estimator(divides_by_std=True, policy_loss="gspo"),
    "cispo": Estimator(divides_by_std=True, policy_loss="cispo"),
    "rloo": Estimator(),
    "reinforce_plus_plus": Estimator(compares_group=False, uses_kl_coef=True, uses_gamma=True, whitens=True),
    "reinforce_plus_plus_baseline": Estimator(uses_kl_coef=True, whitens=True),
    "maxrl": Estimator(divides_by_mean=True),
    "opo": Estimator(),
    "gdpo": Estimator(divides_by_std=True, whitens=True, uses_parts=True),
    "passk": Estimator(divides_by_std=True),
    "ppo": Estimator(compares_group=False, uses_kl_coef=True, uses_gamma=True, uses_lambd=True, uses_critic=True),
}

POLICY_LOSSES: tuple[str, ...] = ("ppo", "gspo", "gmpo", "cispo", "sapo", "dppo_tv")

DUAL_CLIP_LOSSES: frozenset[str] = frozenset({"ppo", "gspo", "dppo_tv"})
"""Policy losses that read eps_clip_c."""

CORRECTIONS: tuple[str, ...] = ("tis", "icepop", "sequence", "geometric", "decoupled")

TRUNCATING_CORRECTIONS: frozenset[str] = frozenset({"sequence", "geometric", "decoupled"})
"""Corrections that cut a weight from above only, unless told otherwise."""

KL_ESTIMATORS: tuple[str, ...] = ("k1", "k2", "k3", "low_var_kl", "abs", "k3+")

UNBIASED_BY_RATIO: frozenset[str] = frozenset({"k1", "k3", "low_var_kl"})
"""KL estimators whose gradient is that of KL(policy ‖ reference) once times the ratio; low_var_kl where it is not cut."""

REWARDS: tuple[str, ...] = ("math", "last_number", "exact", "regex", "reasoning_gym")

LABEL_REWARDS: frozenset[str] = frozenset({"math", "last_number", "exact"})
"""Rewards that compare the response with the label."""


def reward_names(targets: tuple[str, ...]) -> tuple[str, ...]:
    """The name of each reward's part: the built-in's, or the function's; a number is added where two are equal.

    >>> reward_names(("math", "one.py:score", "package.other:score"))
    ('math', 'score', 'score_2')
    """
    names: list[str] = []
    for target in targets:
        base = target if target in REWARDS else target.rpartition(":")[2].replace("/", ".")
        name, number = base, 2
        while name in names:
            name, number = f"{base}_{number}", number + 1
        names.append(name)
    return tuple(names)
