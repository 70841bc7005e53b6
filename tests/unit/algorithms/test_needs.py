import pytest

from treadle.algorithms import (
    CORRECTIONS,
    ESTIMATORS,
    KL_ESTIMATORS,
    NEEDS,
    POLICY_LOSSES,
    Needs,
    needs_of,
)
from treadle.errors import ConfigError


def test_every_name_is_in_the_table():
    for kind, table in (
        ("advantage", ESTIMATORS),
        ("policy_loss", POLICY_LOSSES),
        ("kl_loss", KL_ESTIMATORS),
        ("correction", CORRECTIONS),
    ):
        assert {f"{kind}/{name}" for name in table} == {name for name in NEEDS if name.startswith(f"{kind}/")} - {
            "policy_loss/custom"
        }


def test_every_default_policy_loss_exists():
    assert {rule.policy_loss for rule in ESTIMATORS.values()} <= set(POLICY_LOSSES)


def test_needs_add_up():
    assert needs_of("advantage/grpo", "policy_loss/ppo") == Needs(old_logprobs=True, groups=True)
    assert needs_of("advantage/ppo", "policy_loss/gspo", "kl_reward", "correction/tis") == Needs(
        old_logprobs=True,
        prior_logprobs=True,
        rollout_logprobs=True,
        ref_logprobs=True,
        values=True,
        whole_samples=True,
    )
    assert needs_of("advantage/reinforce_plus_plus").whitening
    assert needs_of() == Needs()


def test_an_unknown_part_is_refused():
    with pytest.raises(ConfigError, match="advantage/grppo"):
        needs_of("advantage/grppo")
