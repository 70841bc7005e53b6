"""The algorithm section, resolved: token weights and advantages by hand, and which logprobs are asked for."""

import dataclasses
from dataclasses import replace

import pytest
import torch

from treadle.config import AlgorithmSection
from treadle.errors import ConfigError
from treadle.training.batch import Batch
from treadle.training.objective import build_objective

# Two groups: samples of 2 and 3 trained tokens after one given token, and of 1 and 0 trained tokens.
BATCH = Batch(
    lengths=torch.tensor([3, 4, 2, 2]),
    group_ids=torch.tensor([5, 5, 8, 8]),
    trajectory_ids=torch.tensor([50, 51, 80, 81]),
    temperatures=torch.ones(4),
    rewards=torch.tensor([1.0, 0.0, 2.0, 4.0]),
    token_ids=torch.arange(11),
    loss_mask=torch.tensor([0, 1, 1, 0, 1, 1, 1, 0, 1, 0, 0]).bool(),
    rollout_logprobs=torch.zeros(11),
)


def objective(**fields):
    return build_objective(AlgorithmSection(**fields), 64)


def trained(values: torch.Tensor) -> list[float]:
    assert (values[~BATCH.loss_mask] == 0).all()
    return values[BATCH.loss_mask].tolist()


def test_each_sample_weighs_the_same():
    weights = objective().loss_weights(BATCH, global_batch_size=4)
    assert trained(weights) == pytest.approx([1 / 8] * 2 + [1 / 12] * 3 + [1 / 4])


def test_each_token_weighs_the_same():
    weights = objective(calculate_per_token_loss=True).loss_weights(BATCH, global_batch_size=4)
    assert trained(weights) == pytest.approx([1 / 6] * 6)


def test_a_constant_divisor():
    weights = objective(loss_length_divisor=10).loss_weights(BATCH, global_batch_size=4)
    assert trained(weights) == pytest.approx([1 / 40] * 6)


def test_samples_of_one_trajectory_share_its_length():
    batch = replace(BATCH, trajectory_ids=torch.tensor([50, 50, 80, 81]))
    weights = objective().loss_weights(batch, global_batch_size=4)
    assert trained(weights) == pytest.approx([1 / 20] * 5 + [1 / 4])


def test_grpo_advantages():
    # Group 5: (1, 0), mean 1/2, std √½; group 8: (2, 4), mean 3, std √2.
    root = 2**-0.5
    assert trained(objective().advantages(BATCH).advantages) == pytest.approx(
        [root] * 2 + [-root] * 3 + [-root], abs=1e-5
    )
    plain = objective(grpo_std_normalization=False).advantages(BATCH).advantages
    assert trained(plain) == pytest.approx([0.5] * 2 + [-0.5] * 3 + [-1.0])


def test_kl_in_the_reward_reads_old_and_reference_logprobs():
    batch = replace(BATCH, old_logprobs=torch.full((11,), -1.0), ref_logprobs=torch.full((11,), -1.5))
    fields = {"advantage_estimator": "reinforce_plus_plus_baseline", "kl_coef": 0.2}
    values = torch.tensor([0.5] * 2 + [-0.5] * 3 + [-1.0]) - 0.2 * 0.5
    whitened = (values - values.mean()) / values.std()
    assert trained(objective(**fields).advantages(batch).advantages) == pytest.approx(whitened.tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("fields", "reference", "old", "only_advantages", "kl_weight"),
    [
        ({}, False, False, True, 0.0),
        ({"use_kl_loss": True, "kl_loss_coef": 0.1}, True, False, False, 0.1),
        ({"use_kl_loss": True}, True, False, True, 0.0),
        ({"kl_loss_coef": 0.1}, False, False, True, 0.0),
        ({"advantage_estimator": "reinforce_plus_plus", "kl_coef": 0.1}, True, True, True, 0.0),
        ({"entropy_coef": 0.01}, False, False, False, 0.0),
    ],
)
def test_what_it_needs(fields, reference, old, only_advantages, kl_weight):
    made = objective(**fields)
    assert made.needs.ref_logprobs is reference
    assert made.needs.prior_logprobs is old
    assert made.only_advantages is only_advantages
    assert made.kl_loss_coef == kl_weight


def test_the_estimator_brings_its_loss():
    logprobs, old = torch.tensor([0.0, 0.2, -0.2]), torch.zeros(3)
    inputs = (logprobs, old, torch.ones(3), torch.tensor([0, 0, 0]), 1)
    assert objective(advantage_estimator="gspo").policy_loss(*inputs).ratio.tolist() == [1.0] * 3
    ppo = objective(eps_clip=0.1, eps_clip_high=0.15).policy_loss(*inputs)
    assert ppo.loss.tolist() == pytest.approx([-1.0, -1.15, -0.818731], abs=1e-5)
    assert ppo.clipped.tolist() == [False, True, False]


def test_an_unknown_name_is_refused():
    with pytest.raises(ConfigError, match="advantage_estimator 'grop' is unknown"):
        objective(advantage_estimator="grop")


@pytest.mark.parametrize(
    ("fields", "given"),
    [
        ({}, {"groups"}),
        ({"advantage_estimator": "ppo", "kl_coef": 0.1}, {"values", "ref_logprobs", "prior_logprobs"}),
        ({"rollout_correction": "tis"}, {"groups", "prior_logprobs"}),
        ({"m2po_threshold": 0.1}, {"groups", "prior_logprobs"}),
        ({"top_entropy_fraction": 0.5}, {"groups", "prior_entropy"}),
        ({"opd_kl_coef": 0.1}, {"groups", "prior_logprobs", "teacher_logprobs"}),
        *(
            (fields, {"groups"})
            for fields in ({"opsm_delta": 0.1}, {"policy_loss": "gmpo"}, {"normalize_advantages": True})
        ),
    ],
)
def test_its_needs_are_those_of_its_parts(fields, given):
    needs = objective(**fields).needs
    assert {f.name for f in dataclasses.fields(needs) if getattr(needs, f.name)} == given
