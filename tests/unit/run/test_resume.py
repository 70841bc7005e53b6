"""What a resumed run may change, and random generators that go through JSON and come back exactly."""

import json
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from treadle.errors import CheckpointError
from treadle.run.resume import (
    changed_settings,
    check_critic_saved,
    random_state,
    seed_everything,
    set_random_state,
)
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
    assert changed_settings(same, checkpoint) is None


def test_what_changes_the_end_of_the_run_is_named_with_both_values(saved, make_config):
    checkpoint = saved(lr=1e-3, advantage_estimator="grpo", rollout_batch_size=4)
    text = changed_settings(make_config(lr=1e-4, advantage_estimator="rloo", rollout_batch_size=4), checkpoint)
    assert text == (
        "this run is not the one that was saved, it has other settings: advantage_estimator grpo → rloo, lr 0.001 → 0.0001"
    )


def test_more_rollouts_are_another_run_if_the_learning_rate_decays_over_all_of_them(saved, make_config):
    decays = {"lr_decay_style": "linear"}
    assert "num_rollout 3 → 9" in changed_settings(make_config(num_rollout=9, **decays), saved(num_rollout=3, **decays))
    decays["lr_decay_steps"] = 5
    assert changed_settings(make_config(num_rollout=9, **decays), saved(num_rollout=3, **decays)) is None


def test_many_differences_are_one_short_line(saved, make_config):
    fields = ("lr", "eps_clip", "gamma", "lambd", "reward_scale", "adam_beta1", "adam_beta2", "clip_grad")
    text = changed_settings(make_config(**dict.fromkeys(fields, 0.5)), saved(**dict.fromkeys(fields, 0.25)))
    assert text.endswith(" and 2 more")
    assert "\n" not in text


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"optim": 3, "train": {"seed": {}}}', "\x00", "[" * 100_000])
def test_a_configuration_that_can_not_be_read_compares_as_far_as_it_goes(tmp_path, make_config, text):
    (tmp_path / "config.json").write_text(text)
    changed = changed_settings(make_config(), Checkpoint(tmp_path, 3, {}))
    assert changed is None or "\n" not in changed


def test_a_critic_can_not_be_resumed_from_a_run_that_had_none(saved, tmp_path):
    checkpoint = saved(advantage_estimator="grpo")
    with pytest.raises(CheckpointError, match=r"of a run without a critic \(advantage_estimator = grpo\)") as caught:
        check_critic_saved(objective(values=True), checkpoint)
    assert "treadle model export" in str(caught.value)
    assert "\n" not in str(caught.value)
    check_critic_saved(objective(values=False), checkpoint)
    check_critic_saved(objective(values=True), None)
    (tmp_path / "critic").mkdir()
    check_critic_saved(objective(values=True), checkpoint)


# Random generators


def draw():
    """A few numbers of every kind from each generator."""
    return (
        torch.rand(3).tolist() + torch.randn(3).tolist(),
        np.random.rand(3).tolist() + np.random.standard_normal(3).tolist() + [int(np.random.randint(1 << 30))],
        [random.random(), random.gauss(0, 1), random.getrandbits(80)],
    )


def test_drawing_goes_on_where_it_was_saved():
    seed_everything(11)
    draw()
    state = random_state()
    assert state["numpy"][3] == 1, "numpy keeps the second of a pair of normals"
    assert state["python"][2] is not None, "and so does Python"
    text = json.dumps(random_state(), allow_nan=False)
    want = draw()
    for again in range(2):
        seed_everything(again)
        set_random_state(json.loads(text))
        assert draw() == want
    assert draw() != want


def test_saving_draws_nothing():
    seed_everything(5)
    want = draw()
    seed_everything(5)
    assert random_state() == random_state()
    assert draw() == want


def test_a_seed_decides_everything():
    seed_everything(1)
    one = draw()
    seed_everything(2)
    other = draw()
    seed_everything(1)
    assert draw() == one
    assert all(a != b for a, b in zip(one, other, strict=True))


def test_a_seed_may_be_larger_than_numpys():
    seed_everything(2**32 + 1)
    large = draw()
    seed_everything(1)
    small = draw()
    assert large[1] == small[1]  # numpy takes the low 32 bits
    assert large[2] != small[2]


@pytest.mark.parametrize(
    "change",
    [
        {"torch": None},
        {"torch": "AAAA"},
        {"torch": "no base64!"},
        {"numpy": 3},
        {"numpy": ["MT19937", [1], 0, 0, 0.0]},
        {"numpy": ["MT19937", [-1] * 624, 0, 0, 0.0]},
        {"python": [3, [], None]},
        {"python": [3, ["x"] * 625, None]},
        {"python": {}},
    ],
)
def test_a_state_of_another_shape_is_damage(change):
    with pytest.raises(CheckpointError, match="random generators is damaged"):
        set_random_state({**random_state(), **change})
