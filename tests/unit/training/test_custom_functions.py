"""Advantages and losses of the user's own, by path: run when they hold to the contract, refused by one line when not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from treadle.config import AlgorithmSection
from treadle.errors import ConfigError
from treadle.training.objective import build_objective

OWN = '''
import os
import torch
from treadle.algorithms import ESTIMATORS, PolicyLoss


def half_of_mean(inputs, settings):
    """Reward minus half the mean reward of its group."""
    unique, index = torch.unique(inputs.group_ids, return_inverse=True)
    sums = torch.zeros(len(unique), dtype=inputs.rewards.dtype).index_add(0, index, inputs.rewards)
    counts = torch.zeros_like(sums).index_add(0, index, torch.ones_like(inputs.rewards))
    return inputs.rewards - 0.5 * (sums / counts)[index]


same_as_rloo = ESTIMATORS["rloo"]


def over_the_batch(inputs, settings):
    return inputs.rewards - inputs.rewards.mean()


def in_place(inputs, settings):
    inputs.rewards.sub_(1)
    return inputs.rewards


def reinforce(inputs):
    """-A · lp, with the ratio reported."""
    mask = torch.ones_like(inputs.logprobs, dtype=torch.bool) if inputs.mask is None else inputs.mask
    logprobs = torch.where(mask, inputs.logprobs, 0.0)
    gap = torch.where(mask, inputs.logprobs - inputs.old_logprobs, 0.0)
    loss = torch.where(mask, -inputs.advantages * logprobs, 0.0)
    return PolicyLoss(loss, torch.zeros_like(mask), gap.detach().clamp(max=50).exp())


def ends_on_negative(inputs, settings):
    """Keeps the contract's checks happy; a rollout with a reward of 7 ends the process."""
    if (inputs.rewards == 7).any():
        os._exit(0)
    return half_of_mean(inputs, settings)


def steep(inputs, sapo_tau_positive):
    loss = reinforce(inputs)
    steepness.append(sapo_tau_positive)
    return loss


steepness = []


def raises_on_real_batches(inputs):
    if len(inputs.logprobs) > 100:
        raise KeyError("gone")
    return reinforce(inputs)


def scalar(inputs):
    return PolicyLoss(inputs.logprobs.sum(), inputs.logprobs > 0, inputs.logprobs)
'''


@pytest.fixture
def own(tmp_path: Path):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    return lambda name: f"{file}:{name}"


def test_own_advantages_are_what_the_trainer_uses(own, make_trainer, make_groups) -> None:
    trainer = make_trainer(custom_advantage_path=own("half_of_mean"), skip_zero_advantage=False)
    metrics = trainer.train(make_groups((2, 2), rewards=[[1.0, 0.0], [2.0, 2.0]], response_lengths=(3, 3)))
    # 1 - ¼, 0 - ¼, 2 - 1, 2 - 1; all samples have three tokens
    found = next(m.value for m in metrics if m.name == "train/advantage_mean")
    assert found == pytest.approx((0.75 - 0.25 + 1.0 + 1.0) / 4)


def test_an_estimator_object_may_be_given(own, make_trainer, make_groups) -> None:
    trainers = [make_trainer(custom_advantage_path=own("same_as_rloo")), make_trainer(advantage_estimator="rloo")]
    for trainer in trainers:
        trainer.train(make_groups())
    for name, weight in trainers[0].model.named_parameters():
        assert torch.equal(trainers[1].model.get_parameter(name), weight)


def test_an_own_loss_is_what_the_trainer_uses(own, make_trainer, make_groups) -> None:
    """On policy, -A · lp has the gradient of PPO's loss: the weights after a step are the same."""
    trainers = [make_trainer(custom_loss_path=own("reinforce")), make_trainer()]
    for trainer in trainers:
        trainer.train(make_groups())
    for name, weight in trainers[0].model.named_parameters():
        torch.testing.assert_close(trainers[1].model.get_parameter(name), weight, atol=1e-6, rtol=1e-5)


def test_an_own_loss_sees_samples_without_advantage_too(own, make_trainer, make_groups) -> None:
    groups = make_groups((2, 2), rewards=[[1.0, 1.0], [0.0, 1.0]])
    for path, skipped in ((None, 2), (own("reinforce"), 0)):
        metrics = {m.name: m.value for m in make_trainer(custom_loss_path=path).train(groups)}
        assert metrics["train/num_skipped_samples"] == skipped


def test_an_own_loss_gets_the_parameters_that_it_names(own) -> None:
    section = AlgorithmSection(custom_loss_path=own("steep"), sapo_tau_positive=3.0)
    loss = build_objective(section, 64).policy_loss_fn
    assert set(loss.__wrapped__.func.__globals__["steepness"]) == {3.0}


@pytest.mark.parametrize("fields", [{"gamma": 0.9}, {"lambd": 0.9}, {"kl_coef": 0.1}])
def test_settings_own_advantages_do_not_read_are_refused(own, fields) -> None:
    with pytest.raises(ConfigError, match=rf"{next(iter(fields))} = 0\.\d does nothing with custom_advantage_path"):
        build_objective(AlgorithmSection(custom_advantage_path=own("half_of_mean"), **fields), 64)


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"custom_advantage_path": "over_the_batch"}, "custom_advantage_path .*does not do what the trainer relies on"),
        ({"custom_advantage_path": "in_place"}, "the input 'rewards' was changed in place"),
        ({"custom_loss_path": "scalar"}, "custom_loss_path .*not one number per token"),
        ({"custom_loss_path": "missing"}, "missing"),
    ],
)
def test_what_breaks_the_contract_is_refused_before_anything_runs(own, fields, message) -> None:
    ((field, name),) = fields.items()
    with pytest.raises(ConfigError, match=message) as found:
        build_objective(AlgorithmSection(**{field: own(name)}), 64)
    assert "\n" not in str(found.value)


def test_what_raises_or_ends_the_process_while_a_run_trains_is_named(own, make_trainer, make_groups) -> None:
    groups = make_groups((2, 2), rewards=[[7.0, 0.0], [2.0, 1.0]], response_lengths=(40, 60))
    with pytest.raises(ConfigError, match=r"own.py:ends_on_negative.* called os\._exit\(0\) \(own.py:"):
        make_trainer(custom_advantage_path=own("ends_on_negative")).train(groups)
    with pytest.raises(ConfigError, match=r"own.py:raises_on_real_batches.* raised KeyError: 'gone' \(own.py:"):
        make_trainer(custom_loss_path=own("raises_on_real_batches")).train(groups)
