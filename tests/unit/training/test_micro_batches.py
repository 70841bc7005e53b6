"""A rollout is split once: what is compared was computed in the same rows, so in bfloat16 too equal weights give equal numbers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from treadle import compiled_formula as one_pass
from treadle.algorithms import POLICY_LOSSES
from treadle.compiled_formula import compiles
from treadle.config import TrainSection, batch_arithmetic
from treadle.metrics import reduce_metrics
from treadle.models.load import load_model
from treadle.models.value import ValueModel
from treadle.training.batch import batch_of
from treadle.training.critic import Critic
from treadle.training.micro_batches import MicroBatches
from treadle.training.objective import build_objective
from treadle.training.reference import Reference
from treadle.training.trainer import Trainer

CPU = torch.device("cpu")
REWARDS = ([1, 0, 0, 1], [0] * 4, [1, 0.5, 0, 0], [1] * 4, [1, 0, 0, 0], [0, 0, 1, 1])
"""Two groups teach nothing, and a sample of the third is at its mean: they are not trained."""
SPLITS: dict[str, dict[str, Any]] = {
    "one row": {"max_tokens_per_gpu": 4096},
    "some tokens": {"max_tokens_per_gpu": 150},
    "five samples": {"use_dynamic_batch_size": False, "micro_batch_size": 5},
}
OBJECTIVES: dict[str, dict[str, Any]] = {
    **{name: {"policy_loss": name} for name in POLICY_LOSSES},
    "gspo": {"advantage_estimator": "gspo", "eps_clip": 3e-4, "eps_clip_high": 4e-4},
    "reference": {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3", "entropy_coef": 0.01},
    "corrected": {"rollout_correction": "tis", "correction_batch_mean_one": True, "opsm_delta": 1e-4},
    "critic": {"advantage_estimator": "ppo", "value_clip": 1e-6},
}


def test_a_rollout_is_split_step_by_step_and_its_tokens_keep_their_places(make_groups) -> None:
    batch = batch_of([s for g in make_groups((2, 1, 2)) for s in g.samples])
    splits = MicroBatches(TrainSection(max_tokens_per_gpu=12), CPU)
    passes = splits.plan(batch, [(3, 1), (), (4,)], with_rest=True)
    held = [sorted(i for one in step for i in one.samples) for step in passes.steps]
    assert held == [[1, 3], [], [4]]
    assert sorted(i for one in passes.rest for i in one.samples) == [0, 2]
    assert splits.plan(batch, [(3, 1)]).rest == ()
    found = splits.per_token(batch, passes.all, lambda row: (row.targets + 1, row.targets + 2), 2)
    for added, numbers in enumerate(found, start=1):
        assert torch.equal(numbers, torch.where(batch.loss_mask, batch.token_ids + added, 0).float())


def bfloat16_trainer(folder: Path, make_config, *, fused: bool = True, **fields: Any) -> Trainer:
    """Of weights that a step does not change, with a reference and a critic where they are asked for."""
    still = {"lr": 1e-20, "critic_lr": 1e-20, "weight_decay": 0.0}
    config = make_config(
        **{**still, "rollout_batch_size": 6, "n_samples_per_prompt": 4, "num_steps_per_rollout": 4, **fields}
    )
    model = load_model(str(folder), torch.bfloat16, CPU, fused=fused)
    needs = build_objective(config.algorithm, 64).needs
    reference = Reference(copy.deepcopy(model).requires_grad_(False), config.algorithm) if needs.ref_logprobs else None
    critic = None
    if needs.values:
        value = ValueModel(copy.deepcopy(model))
        torch.nn.init.normal_(value.value_head.weight, generator=torch.Generator().manual_seed(0))
        critic = Critic(value, config, 10, pytest.fail)
    return Trainer(model, config, batch_arithmetic(config), 10, reference, pytest.fail, critic)


def check_exact(trainer: Trainer, groups) -> None:
    found = reduce_metrics(trainer.train(groups))
    assert found["train/num_steps"] == 4
    assert found["train/ratio_max"] == found["train/ratio_mean"] == 1.0
    if trainer.config.algorithm.policy_loss != "dppo_tv":  # it compares with the engine, here with random numbers
        assert found["train/clip_fraction"] == 0.0
    if trainer.reference is not None:
        assert found["train/kl"] == found["train/kl_loss"] == 0.0
    if trainer.critic is not None:
        assert found["critic/clip_fraction"] == 0.0


@pytest.mark.parametrize(
    ("objective", "split"),
    [
        *((name, "one row") for name in OBJECTIVES),
        ("gspo", "some tokens"),
        ("gspo", "five samples"),
        ("critic", "five samples"),
    ],
)
def test_where_no_weight_moves_the_ratio_stays_exactly_one(
    wide_model_dir, make_config, make_groups, monkeypatch, objective, split
) -> None:
    monkeypatch.setattr(one_pass, "compiles", lambda device_type: False)
    groups = make_groups((4,) * 6, rewards=REWARDS, response_lengths=(5, 40))
    fields = {**OBJECTIVES[objective], **SPLITS[split]}
    check_exact(bfloat16_trainer(wide_model_dir, make_config, fused=split != "one row", **fields), groups)


@pytest.mark.long
@pytest.mark.skipif(not compiles("cpu"), reason="no C++ compiler here, or torch.compile is turned off")
@pytest.mark.parametrize("compiled_from", [1, 1 << 13, one_pass.COMPILED_FROM])
def test_the_ratio_stays_exactly_one_where_some_rows_are_computed_in_compiled_loops(
    wide_model_dir, make_config, make_groups, monkeypatch, compiled_from
) -> None:
    """Rows of 100 to 3,000 tokens are on both sides of each threshold."""
    monkeypatch.setattr(one_pass, "COMPILED_FROM", compiled_from)
    groups = make_groups((8,) * 6, rewards=[row * 2 for row in REWARDS], response_lengths=(20, 100))
    for objective in OBJECTIVES.values():
        for split in SPLITS.values():
            for fused in (True, False):
                fields = {**objective, **split, "n_samples_per_prompt": 8}
                check_exact(bfloat16_trainer(wide_model_dir, make_config, fused=fused, **fields), groups)
