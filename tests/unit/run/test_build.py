"""What is refused once the user's functions are read, before any weights are loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from treadle.errors import ConfigError
from treadle.run.build import resolve_objective

OWN = """
from dataclasses import replace
from treadle.algorithms import ESTIMATORS

compares = replace(ESTIMATORS["grpo"], name="own")
alone = replace(ESTIMATORS["reinforce_plus_plus"], name="own", whitens=False)
critic = replace(ESTIMATORS["ppo"], name="own")

def scalar(inputs, settings):
    return inputs.rewards.sum()
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return f"{tmp_path}/own.py"


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("compares", {"n_samples_per_prompt": 1}, r"n_samples_per_prompt = 1 gives custom_advantage_path .* set 2"),
        ("compares", {"num_critic_only_steps": 2}, r"num_critic_only_steps = 2 does nothing .* it has no critic"),
        ("alone", {"runtime": "ray", "critic_num_nodes": 2}, r"critic_num_nodes = 2 does nothing .* it has no critic"),
        ("alone", {"critic_lr": 0.1, "value_clip": 1.0}, r"critic_lr = 0\.1, value_clip = 1\.0 does nothing"),
        ("scalar", {}, "does not do what the trainer relies on"),
    ],
)
def test_idle_flags_of_an_own_estimator_are_refused(make_config, own, name, fields, message) -> None:
    with pytest.raises(ConfigError, match=message) as found:
        resolve_objective(make_config(custom_advantage_path=f"{own}:{name}", **fields))
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("critic", {"num_critic_only_steps": 2, "critic_lr": 0.1, "n_samples_per_prompt": 1}),
        ("alone", {"n_samples_per_prompt": 1}),
        ("compares", {"n_samples_per_prompt": 1, "opd_kl_coef": 0.1}),
        ("compares", {}),
    ],
)
def test_what_an_own_estimator_reads_is_accepted(make_config, own, name, fields) -> None:
    assert resolve_objective(make_config(custom_advantage_path=f"{own}:{name}", **fields)).estimator.name == "own"
