"""What a resumed run may change, and what it can't."""

import json
from types import SimpleNamespace

import pytest

from treadle.errors import CheckpointError
from treadle.run.differences import check_supplies, differences
from treadle.training.checkpoint import Checkpoint


@pytest.fixture
def saved(tmp_path, make_config):
    def save(**fields):
        (tmp_path / "config.json").write_text(json.dumps(make_config(**fields).model_dump(mode="json")))
        return Checkpoint(tmp_path, 3, {})

    return save


def objective(*, values):
    return SimpleNamespace(needs=SimpleNamespace(values=values))


def test_the_same_settings_and_those_that_change_nothing_are_not_named(saved, make_config):
    checkpoint = saved(lr=1e-3, num_rollout=3, run_dir="a", max_running_requests=4)
    same = make_config(lr=1e-3, num_rollout=9, run_dir="b", max_running_requests=8, load="a", progress="off")
    assert differences(same, checkpoint) == []


def test_what_changes_the_end_of_the_run_is_named_with_both_values(saved, make_config):
    checkpoint = saved(lr=1e-3, advantage_estimator="grpo", rollout_batch_size=4)
    (text,) = differences(make_config(lr=1e-4, advantage_estimator="rloo", rollout_batch_size=4), checkpoint)
    assert text == (
        "this run is not the one that was saved, it has other settings: advantage_estimator grpo → rloo, lr 0.001 → 0.0001"
    )


def test_more_rollouts_are_another_run_if_the_learning_rate_decays_over_all_of_them(saved, make_config):
    decays = {"lr_decay_style": "linear"}
    assert "num_rollout 3 → 9" in differences(make_config(num_rollout=9, **decays), saved(num_rollout=3, **decays))[0]
    decays["lr_decay_steps"] = 5
    assert differences(make_config(num_rollout=9, **decays), saved(num_rollout=3, **decays)) == []


def test_many_differences_are_one_short_line(saved, make_config):
    fields = ("lr", "eps_clip", "gamma", "lambd", "reward_scale", "adam_beta1", "adam_beta2", "clip_grad")
    (text,) = differences(make_config(**dict.fromkeys(fields, 0.5)), saved(**dict.fromkeys(fields, 0.25)))
    assert text.endswith(" and 2 more")
    assert "\n" not in text


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"optim": 3, "train": {"seed": {}}}', "\x00", "[" * 100_000])
def test_a_configuration_that_can_not_be_read_compares_as_far_as_it_goes(tmp_path, make_config, text):
    (tmp_path / "config.json").write_text(text)
    assert len(differences(make_config(), Checkpoint(tmp_path, 3, {}))) <= 1


def test_a_critic_can_not_be_resumed_from_a_run_that_had_none(saved, tmp_path):
    checkpoint = saved(advantage_estimator="grpo")
    with pytest.raises(CheckpointError, match=r"of a run without a critic \(advantage_estimator = grpo\)") as caught:
        check_supplies(objective(values=True), checkpoint)
    assert "treadle model export" in str(caught.value)
    assert "\n" not in str(caught.value)
    check_supplies(objective(values=False), checkpoint)
    check_supplies(objective(values=True), None)
    (tmp_path / "critic").mkdir()
    check_supplies(objective(values=True), checkpoint)
