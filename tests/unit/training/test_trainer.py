"""The trainer against GRPO written out with one plain Hugging Face forward for each sequence."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from treadle.errors import CheckpointError, ModelError
from treadle.metrics import reduce_metrics
from treadle.training.batch import batch_of
from treadle.training.checkpoint import find_checkpoint, save_checkpoint
from treadle.training.trainer_files import write_model
from treadle.types import Group, Sample, Status

SIZES = (3, 2, 4, 3)
REWARDS = ((1.0, 0.0, 0.5), (0.25, 0.25), (0.0, 0.0, 1.0, 1.0), (1.0, 0.0, 0.0))
BASE: dict[str, Any] = {"rollout_batch_size": 4, "n_samples_per_prompt": 3, "max_tokens_per_gpu": 64, "lr": 0.2}
SAME = {"atol": 2e-6, "rtol": 1e-5}


@pytest.fixture
def groups(make_groups) -> list[Group]:
    """Twelve samples in uneven groups, sampled at temperature 0.7; one has a tool's answer in the middle."""
    made = make_groups(SIZES, rewards=REWARDS, temperature=0.7, seed=5)
    first = made[2].samples[1]
    given = np.zeros_like(first.loss_mask)
    given[-3:-1] = True
    made[2] = replace(made[2], samples=(made[2].samples[0], _mask_out(first, given), *made[2].samples[2:]))
    return made


def _mask_out(sample: Sample, given: np.ndarray) -> Sample:
    return replace(sample, loss_mask=sample.loss_mask & ~given)


# GRPO, written out


def sequence_logprobs(model, sample: Sample) -> tuple[Tensor, Tensor]:
    """(logprobs, entropies) of a sample's trained tokens, by the model's own forward."""
    ids = torch.from_numpy(sample.token_ids.astype(np.int64))
    logits = model(ids[None]).logits[0] / sample.temperature
    table = torch.log_softmax(logits, -1)[:-1]
    places = torch.from_numpy(np.flatnonzero(sample.loss_mask))
    return table[places - 1, ids[places]], -(table.exp() * table).sum(-1)[places - 1]


def group_advantages(groups: list[Group], std_normalization: bool) -> dict[int, float]:
    out = {}
    for group in groups:
        rewards = np.array([s.reward for s in group.samples])
        std = rewards.std(ddof=1) if len(rewards) > 1 else 0.0
        for sample, reward in zip(group.samples, rewards, strict=True):
            centred = reward - rewards.mean()
            out[id(sample)] = centred / (std + 1e-6) if std_normalization else centred
    return out


def load_plain(folder: Path, noise: float = 0.0):
    """The model as transformers has it, with noise on its weights."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=noise)
    return model


def token_weight(sample: Sample, step: list[Sample], algorithm) -> float:
    if algorithm.calculate_per_token_loss:
        return 1 / sum(s.response_length for s in step)
    return 1 / (len(step) * (algorithm.loss_length_divisor or sample.response_length))


def kl_written_out(logprobs: Tensor, ref: Tensor, algorithm) -> Tensor:
    kl = torch.exp(ref - logprobs) - 1 + logprobs - ref
    return kl.clamp(max=10.0) if algorithm.kl_loss_type == "low_var_kl" else kl


def step_written_out(model, step: list[Sample], scored: dict[int, tuple], algorithm) -> dict[str, Any]:
    """Losses of one optimizer step; `scored` has each sample's advantage, old logprobs and reference logprobs."""
    policy_loss = kl_loss = entropy_sum = torch.zeros(())
    columns: dict[str, list[Tensor]] = {"ratio": [], "entropy": [], "clipped": []}
    high = algorithm.eps_clip if algorithm.eps_clip_high is None else algorithm.eps_clip_high
    for sample in step:
        logprobs, entropy = sequence_logprobs(model, sample)
        advantage, old, ref = scored[id(sample)]
        ratio = torch.exp(logprobs - old)
        surrogate = torch.maximum(-ratio * advantage, -ratio.clamp(1 - algorithm.eps_clip, 1 + high) * advantage)
        weight = token_weight(sample, step, algorithm)
        policy_loss = policy_loss + weight * surrogate.sum()
        kl_loss = kl_loss + weight * kl_written_out(logprobs, ref, algorithm).sum()
        entropy_sum = entropy_sum + weight * entropy.sum()
        columns["ratio"].append(ratio.detach())
        columns["entropy"].append(entropy.detach())
        columns["clipped"].append((surrogate > -ratio * advantage).float())
    kl_coef = algorithm.kl_loss_coef if algorithm.use_kl_loss else 0.0
    loss = policy_loss + kl_coef * kl_loss - algorithm.entropy_coef * entropy_sum
    return {
        "loss": loss,
        "train/loss": loss.item(),
        "train/policy_loss": policy_loss.item(),
        "train/kl_loss": kl_loss.item() if algorithm.use_kl_loss else 0.0,
        **{name: torch.cat(parts) for name, parts in columns.items()},
    }


def written_out(folder: Path, groups: list[Group], config, steps: int, noise: float = 0.0) -> dict[str, Any]:
    """Train a fresh model on the groups; returns its weights and what each step measured."""
    model, reference, optim = load_plain(folder), load_plain(folder, noise), config.optim
    adamw = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": optim.weight_decay},
            {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=optim.lr,
        betas=(optim.adam_beta1, optim.adam_beta2),
        eps=optim.adam_eps,
    )
    samples = [sample for group in groups for sample in group.samples]
    advantages = group_advantages(groups, config.algorithm.grpo_std_normalization)
    with torch.no_grad():
        scored = {
            id(s): (advantages[id(s)], sequence_logprobs(model, s)[0], sequence_logprobs(reference, s)[0])
            for s in samples
        }
    size = len(samples) // steps
    measured = []
    for first in range(0, len(samples), size):
        step = step_written_out(model, samples[first : first + size], scored, config.algorithm)
        step["loss"].backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip_grad)
        adamw.step()
        adamw.zero_grad()
        measured.append({**step, "train/grad_norm": norm.item()})
    return {"weights": {name: p.detach() for name, p in model.named_parameters()}, "steps": measured}


def weights_of(trainer) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in trainer.model.named_parameters()}


def assert_same_weights(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, **SAME, msg=lambda m, n=name: f"{n}: {m}")


CASES = {
    "grpo": {},
    "clipped gradient": {"clip_grad": 0.05},
    "weight decay": {"weight_decay": 0.1},
    "Dr. GRPO": {"grpo_std_normalization": False, "loss_length_divisor": 16},
    "per token": {"calculate_per_token_loss": True},
    "kl loss": {"use_kl_loss": True, "kl_loss_coef": 0.3},
    "unclamped kl loss, two steps": {
        "use_kl_loss": True,
        "kl_loss_coef": 0.3,
        "kl_loss_type": "k3",
        "num_steps_per_rollout": 2,
    },
    "entropy bonus": {"entropy_coef": 0.05},
    "two steps": {"num_steps_per_rollout": 2},
    "three steps, clip-higher": {"num_steps_per_rollout": 3, "eps_clip": 0.05, "eps_clip_high": 0.1},
    "everything": {
        "num_steps_per_rollout": 2,
        "eps_clip": 0.02,
        "use_kl_loss": True,
        "kl_loss_coef": 0.2,
        "entropy_coef": 0.02,
        "calculate_per_token_loss": True,
        "weight_decay": 0.01,
    },
}


@pytest.mark.parametrize("case", CASES)
def test_weights_and_metrics_are_those_of_grpo_written_out(case, make_trainer, tiny_model_dir, groups):
    fields = {**BASE, **CASES[case]}
    trainer = make_trainer(**fields, reference_noise=0.02)
    start = {name: w.clone() for name, w in weights_of(trainer).items()}
    found = reduce_metrics(trainer.train(groups))
    steps = trainer.arithmetic.num_steps_per_rollout
    expected = written_out(tiny_model_dir, groups, trainer.config, steps, noise=0.02)
    assert_same_weights(weights_of(trainer), expected["weights"])
    moved = max(float((start[name] - w).abs().max()) for name, w in expected["weights"].items())
    assert moved > 1e-3
    for name in ("train/loss", "train/policy_loss", "train/kl_loss"):
        mean = sum(step[name] for step in expected["steps"]) / steps
        assert found[name] == pytest.approx(mean, abs=1e-5), name
    assert found["train/grad_norm"] == pytest.approx(expected["steps"][-1]["train/grad_norm"], rel=1e-4)
    assert found["train/num_steps"] == steps
    if not trainer.objective.only_advantages:  # no sample is left out, so the means are over all trained tokens
        joined = {key: torch.cat([step[key] for step in expected["steps"]]) for key in ("ratio", "entropy", "clipped")}
        assert found["train/ratio_mean"] == pytest.approx(joined["ratio"].mean().item(), rel=2e-5)
        assert found["train/ratio_max"] == pytest.approx(joined["ratio"].max().item(), rel=1e-4)
        assert found["train/entropy"] == pytest.approx(joined["entropy"].mean().item(), abs=1e-5)
        assert found["train/clip_fraction"] == pytest.approx(joined["clipped"].mean().item(), abs=1e-6)


def test_the_clip_is_reached_in_these_tests(tiny_model_dir, groups, make_config):
    config = make_config(**BASE, **CASES["everything"], adam_eps=1.0, clip_grad=1e9)
    steps = written_out(tiny_model_dir, groups, config, 2, noise=0.02)["steps"]
    assert steps[0]["clipped"].sum() == 0
    assert 0 < steps[1]["clipped"].mean() < 1


def test_at_the_first_step_the_ratio_is_one_and_nothing_is_clipped(make_trainer, groups):
    found = reduce_metrics(make_trainer(**BASE).train(groups))
    assert found["train/ratio_mean"] == found["train/ratio_max"] == 1.0
    assert found["train/clip_fraction"] == 0.0


def test_the_reference_is_the_policy_at_the_start(make_trainer, groups):
    found = reduce_metrics(make_trainer(**BASE, use_kl_loss=True, kl_loss_coef=0.5).train(groups))
    assert found["train/kl_loss"] == pytest.approx(0.0, abs=1e-7)
    assert found["train/kl"] == pytest.approx(0.0, abs=1e-7)
    assert found["train/loss"] == pytest.approx(found["train/policy_loss"], abs=1e-6)


def test_logprobs_lie_at_their_tokens(make_trainer, tiny_model_dir, groups):
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    trainer = make_trainer(**{**BASE, "max_tokens_per_gpu": 20})
    samples = [sample for group in groups for sample in group.samples]
    found = trainer.logprobs(batch_of(samples), trainer.model)
    expected = torch.zeros(len(found))
    at = 0
    for sample in samples:
        places = at + torch.from_numpy(np.flatnonzero(sample.loss_mask))
        expected[places] = sequence_logprobs(plain, sample)[0].detach()
        at += len(sample.token_ids)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert not found.requires_grad


def test_gap_to_the_engine_is_measured_before_the_step(make_trainer, groups):
    trainer = make_trainer(**BASE, num_steps_per_rollout=2, entropy_coef=1e-9)
    samples = [sample for group in groups for sample in group.samples]
    batch = batch_of(samples)
    gap = (trainer.logprobs(batch, trainer.model) - batch.rollout_logprobs)[batch.loss_mask]
    found = reduce_metrics(trainer.train(groups))
    assert found["train/rollout_logprob_abs_diff"] == pytest.approx(gap.abs().mean().item(), rel=1e-5)
    assert found["train/rollout_logprob_abs_diff_max"] == pytest.approx(gap.abs().max().item(), rel=1e-5)
    assert found["train/rollout_kl"] == pytest.approx((torch.expm1(gap) - gap).mean().item(), rel=1e-4)


def test_what_was_trained_is_counted(make_trainer, groups):
    trainer = make_trainer(**BASE, num_steps_per_rollout=2)
    found = reduce_metrics(trainer.train(groups))
    assert found["train/num_samples"] == 12
    assert found["train/num_tokens"] == sum(s.response_length for g in groups for s in g.samples)
    assert found["train/num_skipped_samples"] == 3  # the group of equal rewards, and one at its group's mean
    assert found["train/num_steps"] == 2
    assert found["train/skipped_steps"] == 0
    assert found["train/lr"] == 0.2
    assert not any(name.startswith("rollout/dropped") for name in found)


def test_failed_and_empty_samples_are_dropped_and_counted(make_trainer, groups):
    untrained = replace(groups[1].samples[0], loss_mask=np.zeros_like(groups[1].samples[0].loss_mask))
    failed = replace(groups[0].samples[0], status=Status.FAILED, reward=None)
    broken = [
        replace(groups[0], samples=(failed, *groups[0].samples[1:])),
        replace(groups[1], samples=(untrained, failed)),
        *groups[2:],
    ]
    found = reduce_metrics(make_trainer(**BASE).train(broken))
    assert found["rollout/dropped/failed"] == 2
    assert found["rollout/dropped/nothing_sampled"] == 1
    assert found["train/num_samples"] == 9


def test_a_rollout_in_which_all_samples_failed_trains_nothing(make_trainer, groups):
    broken = [
        replace(g, samples=tuple(replace(s, status=Status.FAILED, reward=None) for s in g.samples)) for g in groups
    ]
    trainer = make_trainer(**BASE, num_steps_per_rollout=2, weight_decay=0.0)
    start = {name: w.clone() for name, w in weights_of(trainer).items()}
    found = reduce_metrics(trainer.train(broken))
    assert found["rollout/dropped/failed"] == 12
    assert found["train/num_samples"] == found["train/num_tokens"] == found["train/loss"] == 0
    assert all(torch.equal(start[name], w) for name, w in weights_of(trainer).items())
    assert math.isfinite(reduce_metrics(trainer.train(groups))["train/loss"])


def test_a_loss_that_is_not_finite_is_skipped_and_said(make_trainer, groups):
    said: list[str] = []
    trainer = make_trainer(**BASE, warn=said.append)
    start = {name: w.clone() for name, w in weights_of(trainer).items()}
    poisoned = replace(groups[0], samples=(replace(groups[0].samples[0], reward=math.nan), *groups[0].samples[1:]))
    found = reduce_metrics(trainer.train([poisoned, *groups[1:]]))
    assert found["train/skipped_steps"] == 1
    assert len(said) == 1
    assert said[0].startswith("optimizer step 0 skipped, weights unchanged: ")
    assert all(torch.equal(start[name], w) for name, w in weights_of(trainer).items())
    assert trainer.optimizer.state_tensors() == {}
    assert reduce_metrics(trainer.train(groups))["train/skipped_steps"] == 0
    assert any(not torch.equal(start[name], w) for name, w in weights_of(trainer).items())


def test_an_objective_with_kl_needs_a_reference(make_trainer, make_config, tiny_model):
    from treadle.config import batch_arithmetic
    from treadle.training.trainer import Trainer

    config = make_config(**BASE, use_kl_loss=True, kl_loss_coef=0.1)
    with pytest.raises(AssertionError, match="needs a reference model"):
        Trainer(tiny_model, config, batch_arithmetic(config), 1)


def test_an_id_beyond_the_embeddings_is_refused_before_anything_is_computed(make_trainer, groups):
    """As samples have that another model drew."""
    trainer = make_trainer(**BASE)
    rows = trainer.model.get_input_embeddings().weight.shape[0]
    token_ids = groups[0].samples[0].token_ids.copy()
    token_ids[2] = rows + 7
    strange = replace(groups[0], samples=(replace(groups[0].samples[0], token_ids=token_ids), *groups[0].samples[1:]))
    with pytest.raises(ModelError, match=rf"has the token id {rows + 7}, but the model has embeddings for {rows} ids"):
        trainer.train([strange, *groups[1:]])


# Save and resume


def save(trainer, folder: Path, rollout_id: int) -> None:
    save_checkpoint(
        folder,
        rollout_id,
        write_model=partial(write_model, trainer),
        optimizer=trainer.optimizer.state_tensors(),
        state={"optimizer_steps": trainer.optimizer.num_steps},
        config=trainer.config.model_dump(mode="json"),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_trainer_goes_on_bit_for_bit(make_trainer, make_groups, tmp_path, dtype):
    from treadle.training.trainer import Trainer

    fields = {**BASE, "num_steps_per_rollout": 2, "lr_decay_style": "cosine", "lr_warmup_steps": 3, "weight_decay": 0.1}

    def make() -> Trainer:
        made = make_trainer(**fields)
        return Trainer(made.model.to(dtype), made.config, made.arithmetic, 10)

    rollouts = [make_groups((3,) * 4, seed=seed) for seed in range(4)]
    whole = make()
    for groups in rollouts[:2]:
        whole.train(groups)
    save(whole, tmp_path, 2)
    rest = [reduce_metrics(whole.train(groups)) for groups in rollouts[2:]]

    resumed = make()
    resumed.train(rollouts[3])  # what was there before does not matter
    resumed.load(find_checkpoint(tmp_path, pytest.fail))
    again = [reduce_metrics(resumed.train(groups)) for groups in rollouts[2:]]
    timed = ("train/seconds", "train/tokens_per_second")
    for one, two in zip(rest, again, strict=True):
        assert {k: v for k, v in one.items() if k not in timed} == {k: v for k, v in two.items() if k not in timed}
    for name, weight in weights_of(whole).items():
        assert torch.equal(weights_of(resumed)[name], weight), name
    for key, value in whole.optimizer.state_tensors().items():
        assert torch.equal(resumed.optimizer.state_tensors()[key], value), key


def test_a_checkpoint_of_another_model_is_refused(make_trainer, tiny_model_dir, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    from treadle.training.trainer import Trainer

    trainer = make_trainer(**BASE)
    save(trainer, tmp_path, 1)
    config = LlamaConfig.from_pretrained(tiny_model_dir)
    config.num_hidden_layers = 3
    other = Trainer(LlamaForCausalLM(config), trainer.config, trainer.arithmetic, 1)
    before = {name: w.clone() for name, w in weights_of(other).items()}
    with pytest.raises(CheckpointError, match=r"of another model: it has no weight 'model\.layers\.2\."):
        other.load(find_checkpoint(tmp_path, pytest.fail))
    assert all(torch.equal(before[name], w) for name, w in weights_of(other).items())
