"""The reference model: fixed, refreshed, or a moving average, and resumed as it was."""

from __future__ import annotations

import json

import pytest
import torch

from treadle.models.load import load_model
from treadle.training.checkpoint import Checkpoint
from treadle.training.reference import Reference, lent_to

KL = {"use_kl_loss": True, "kl_loss_coef": 0.1}


def weights(model) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(one: dict, other: dict) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def test_a_fixed_reference_never_moves_and_is_not_saved(make_trainer, make_groups, tmp_path) -> None:
    trainer = make_trainer(**KL)
    before = weights(trainer.reference.model)
    for rollout in range(3):
        trainer.train(make_groups(seed=rollout), rollout)
    assert same(before, weights(trainer.reference.model))
    trainer.reference.write(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_refreshed_reference_is_the_policy_every_so_often(make_trainer, make_groups) -> None:
    trainer = make_trainer(**KL, ref_update_interval=2)
    start = weights(trainer.reference.model)
    seen = []
    for rollout in range(4):
        trainer.train(make_groups(seed=rollout), rollout)
        seen.append((weights(trainer.reference.model), weights(trainer.model)))
    assert same(seen[0][0], start)  # after one rollout: not yet
    assert same(seen[1][0], seen[1][1])  # after two: the policy of that moment
    assert same(seen[2][0], seen[1][1])
    assert same(seen[3][0], seen[3][1])
    metrics = trainer.train(make_groups(seed=9), 4)  # with reference = policy the KL is 0
    assert next(m.value for m in metrics if m.name == "train/kl") == pytest.approx(0.0, abs=1e-10)


@pytest.mark.parametrize("moving", [{"ref_update_interval": 1}, {"ref_ema_decay": 0.5}])
def test_a_weight_that_the_policy_does_not_train_stays(tiny_model_dir, make_config, moving) -> None:
    """Architectures freeze some, such as the bias of a router."""
    model = load_model(str(tiny_model_dir), torch.float32, torch.device("cpu"), trainable=False)
    before, frozen = weights(model), "model.norm.weight"
    reference = Reference(model, make_config(**KL, **moving).algorithm)
    reference.follow(1, {name: weight + 1 for name, weight in before.items() if name != frozen})
    after = weights(model)
    assert [name for name in after if torch.equal(after[name], before[name])] == [frozen]


def test_a_moving_average_by_hand(make_trainer, make_groups) -> None:
    """After two rollouts: 0.5 · (0.5 · start + 0.5 · first) + 0.5 · second."""
    trainer = make_trainer(**KL, ref_ema_decay=0.5)
    start = weights(trainer.reference.model)
    policies = []
    for rollout in range(2):
        trainer.train(make_groups(seed=rollout), rollout)
        policies.append(weights(trainer.model))
    for name, found in weights(trainer.reference.model).items():
        expected = 0.25 * start[name] + 0.25 * policies[0][name] + 0.5 * policies[1][name]
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("fields", [{"ref_update_interval": 1}, {"ref_ema_decay": 0.9}])
def test_a_reference_that_moved_is_resumed(make_trainer, make_groups, tmp_path, fields) -> None:
    one, other = make_trainer(**KL, **fields), make_trainer(**KL, **fields)
    one.train(make_groups(), 0)
    one.reference.write(tmp_path)
    assert not same(weights(one.reference.model), weights(other.reference.model))
    (tmp_path / "state.json").write_text(json.dumps({}))
    other.reference.load(Checkpoint(tmp_path, 1, {}))
    assert same(weights(one.reference.model), weights(other.reference.model))
    policy = {name: torch.ones_like(p) for name, p in one.model.named_parameters()}
    for trainer in (one, other):
        trainer.reference.follow(2, policy)
    assert same(weights(one.reference.model), weights(other.reference.model))


@pytest.mark.parametrize(("device", "moves"), [("cuda", ["cuda", "cpu"]), ("cpu", ["cpu"])])
def test_a_model_that_is_lent_to_a_device_comes_back_to_host_memory(device: str, moves: list[str]) -> None:
    """Also where its use raises. A model that only writes down where it is sent stands in for one on a GPU."""

    class Sent:
        is_sharded = False

        def __init__(self) -> None:
            self.places: list[str] = []

        def to(self, place) -> Sent:
            self.places.append(str(place))
            return self

    model = Sent()
    with pytest.raises(RuntimeError), lent_to(torch.device(device), model):
        raise RuntimeError("stop")
    assert model.places == moves
