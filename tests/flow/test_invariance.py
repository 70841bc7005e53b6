"""What must not change the loss, the gradient or the measurements: how a step is split, ordered, packed and computed.

Each test trains the same fresh tiny model twice and compares the weights after the steps; AdamW's epsilon is 1, so a
weight moves by about its gradient.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from treadle.metrics import reduce_metrics
from treadle.types import Group, Status

BASE: dict[str, Any] = {"rollout_batch_size": 5, "n_samples_per_prompt": 3, "lr": 0.2, "max_tokens_per_gpu": 4096}
REWARDS = ((1.0, 0.0, 0.5), (0.25, 0.25), (0.0, 0.0, 1.0, 1.0), (1.0, 0.0, 0.0, 0.0), (0.0, 0.0))
OBJECTIVES = {
    "grpo": {},
    "per token": {"calculate_per_token_loss": True},
    "constant divisor": {"loss_length_divisor": 10, "grpo_std_normalization": False},
    "kl and entropy": {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3", "entropy_coef": 0.01},
    "whole samples": {"advantage_estimator": "gspo", "num_steps_per_rollout": 3},
    "whitened, kl in the reward": {
        "advantage_estimator": "reinforce_plus_plus",
        "kl_coef": 0.05,
        "num_steps_per_rollout": 3,
    },
}
SPLITS = {
    **{f"{n} tokens": {"max_tokens_per_gpu": n} for n in (1, 16, 64)},
    **{f"{n} samples": {"use_dynamic_batch_size": False, "micro_batch_size": n} for n in (1, 3, 8)},
}
COUNTED = ("train/seconds", "train/tokens_per_second", "train/num_micro_batches")


@pytest.fixture
def groups(make_groups) -> list[Group]:
    """Fifteen samples in uneven groups; one has given tokens between sampled ones, one is a single token."""
    made = make_groups((3, 2, 4, 4, 2), rewards=REWARDS, seed=7, temperature=0.8, response_lengths=(1, 12))
    sample = made[2].samples[0]
    mask = sample.loss_mask.copy()
    mask[np.flatnonzero(mask)[1:-1:2]] = False
    made[2] = replace(made[2], samples=(replace(sample, loss_mask=mask), *made[2].samples[1:]))
    return made


def train(make_trainer, groups: list[Group], **fields: Any) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    trainer = make_trainer(**{**BASE, **fields}, reference_noise=0.01)
    start = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    metrics = reduce_metrics(trainer.train(groups))
    weights = {name: p.detach() for name, p in trainer.model.named_parameters()}
    assert max(float((start[name] - weights[name]).abs().max()) for name in start) > 1e-3
    return weights, metrics


def assert_same(one, two, *, left_out: tuple[str, ...] = ()) -> None:
    for name, weight in one[0].items():
        torch.testing.assert_close(two[0][name], weight, atol=2e-6, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    skipped = {*COUNTED, *left_out}
    kept = [{k: v for k, v in metrics.items() if k not in skipped} for _, metrics in (one, two)]
    assert kept[0] == pytest.approx(kept[1], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_split_into_micro_batches(make_trainer, groups, objective, split):
    whole = train(make_trainer, groups, **OBJECTIVES[objective])
    parts = train(make_trainer, groups, **OBJECTIVES[objective], **SPLITS[split])
    steps = OBJECTIVES[objective].get("num_steps_per_rollout", 1)
    assert whole[1]["train/num_micro_batches"] == steps
    assert parts[1]["train/num_micro_batches"] > 1
    assert_same(whole, parts)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=st.permutations(range(5)), max_tokens=st.integers(1, 120))
def test_the_order_of_groups_and_any_budget(make_trainer, groups, order, max_tokens):
    straight = train(make_trainer, groups)
    mixed = train(make_trainer, [groups[i] for i in order], max_tokens_per_gpu=max_tokens)
    assert_same(straight, mixed)


def test_the_order_of_samples_in_a_group(make_trainer, groups):
    turned = [replace(group, samples=tuple(reversed(group.samples))) for group in groups]
    assert_same(train(make_trainer, groups), train(make_trainer, turned))


@pytest.mark.parametrize("objective", ["grpo", "per token", "constant divisor", "whole samples"])
def test_leaving_out_samples_without_advantage(make_trainer, groups, objective):
    fields = OBJECTIVES[objective]
    kept = train(make_trainer, groups, **fields, skip_zero_advantage=False)
    skipped = train(make_trainer, groups, **fields, skip_zero_advantage=True)
    assert kept[1]["train/num_skipped_samples"] == 0
    assert skipped[1]["train/num_skipped_samples"] == 5  # two groups of equal rewards, one sample at its group's mean
    means = [name for name in kept[1] if name.startswith("train/") and name not in ("train/loss", "train/policy_loss")]
    assert_same(kept, skipped, left_out=tuple(n for n in means if n not in ("train/grad_norm", "train/num_tokens")))


def test_samples_without_advantage_stay_where_they_count(make_trainer, groups):
    found = train(make_trainer, groups, entropy_coef=0.01, skip_zero_advantage=True)
    assert found[1]["train/num_skipped_samples"] == 0


@pytest.mark.parametrize("objective", ["grpo", "kl and entropy"])
def test_gradient_checkpointing(make_trainer, groups, objective):
    plain = train(make_trainer, groups, **OBJECTIVES[objective])
    recomputed = train(make_trainer, groups, **OBJECTIVES[objective], gradient_checkpointing=True)
    assert_same(plain, recomputed)


def test_gradient_checkpointing_does_recompute(make_trainer, groups):
    calls = {}
    for on in (False, True):
        trainer = make_trainer(**BASE, gradient_checkpointing=on)
        count = []
        trainer.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_, count=count: count.append(1))
        trainer.train(groups)
        calls[on] = len(count)
        assert not trainer.model.training
    assert calls == {False: 1, True: 2}


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_attention_backend(make_trainer, groups, objective):
    fields = OBJECTIVES[objective]
    batched = train(make_trainer, groups, **fields, attention_backend="batched")
    for backend in ("sdpa", "auto"):
        assert_same(batched, train(make_trainer, groups, **fields, attention_backend=backend))


@pytest.mark.parametrize("objective", ["grpo", "per token", "constant divisor", "kl and entropy"])
def test_failed_samples_beside_the_others(make_trainer, groups, objective):
    failed = replace(groups[0].samples[0], status=Status.FAILED, reward=None)
    more = [replace(groups[0], samples=(failed, *groups[0].samples)), *groups[1:]]
    more[3] = replace(groups[3], samples=(*groups[3].samples, failed, failed))
    without = train(make_trainer, groups, **OBJECTIVES[objective])
    beside = train(make_trainer, more, **OBJECTIVES[objective])
    assert beside[1]["rollout/dropped/failed"] == 3
    assert_same(without, beside, left_out=("rollout/dropped/failed",))


def test_a_sample_cut_in_two_counts_once(make_trainer, groups):
    """Fan-out: two samples of one trajectory, each training its own half, are the whole sample."""
    sample = max((s for s in groups[3].samples), key=lambda s: s.response_length)
    places = np.flatnonzero(sample.loss_mask)
    assert len(places) >= 4
    first, second = sample.loss_mask.copy(), sample.loss_mask.copy()
    first[places[len(places) // 2 :]] = False
    second[places[: len(places) // 2]] = False
    halves = (replace(sample, loss_mask=first), replace(sample, loss_mask=second))
    others = tuple(s for s in groups[3].samples if s is not sample)
    cut = [*groups[:3], replace(groups[3], samples=(*others, *halves)), groups[4]]
    assert_same(train(make_trainer, groups), train(make_trainer, cut), left_out=("train/num_samples",))


def test_temperature_is_the_sample_s_own(make_trainer, groups):
    """Samples of two temperatures in one micro-batch, against one micro-batch for each sample."""
    mixed = []
    for group in groups:
        samples = [replace(s, temperature=(0.5, 1.7)[i % 2]) for i, s in enumerate(group.samples)]
        mixed.append(replace(group, samples=tuple(samples)))
    whole = train(make_trainer, mixed)
    alone = train(make_trainer, mixed, use_dynamic_batch_size=False, micro_batch_size=1)
    assert_same(whole, alone)
    other = train(make_trainer, groups)
    assert max(float((whole[0][n] - other[0][n]).abs().max()) for n in whole[0]) > 1e-3
