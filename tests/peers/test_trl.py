"""Our losses against TRL's, through TRL's own trainer: same samples, same weights, same loss and gradient.

Ran against trl 1.16.0. Deliberate differences, taken out here by the settings:
- cispo: TRL bounds the weight by `epsilon_high` itself and has no lower bound; ours is clip(ρ, 1 - ε, 1 + ε_high).
- dr_grpo: TRL always divides by max_completion_length; ours by `loss_length_divisor`.
- KL: TRL has k3 only, and multiplies it by ρ unless `use_bias_correction_kl` is off; ours does so with `use_unbiased_kl`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from treadle.training.batch import batch_of
from treadle.training.policy_loss import micro_batch_loss

pytest.importorskip("trl", reason="trl is not installed; see tests/peers/requirements.txt")

LONGEST = 9
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"loss_type": "grpo", "epsilon": 0.1, "epsilon_high": 0.3}, {"eps_clip": 0.1, "eps_clip_high": 0.3}),
    "grpo with KL": (
        {"loss_type": "grpo", "beta": 0.3, "use_bias_correction_kl": False},
        {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k3"},
    ),
    "grpo with unbiased KL": (
        {"loss_type": "grpo", "beta": 0.3, "use_bias_correction_kl": True},
        {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k3", "use_unbiased_kl": True},
    ),
    "dr_grpo": ({"loss_type": "dr_grpo"}, {"loss_length_divisor": LONGEST}),
    "dapo": ({"loss_type": "dapo", "epsilon_high": 0.28}, {"calculate_per_token_loss": True, "eps_clip_high": 0.28}),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.03, "epsilon_high": 0.04},
        {"policy_loss": "gspo", "eps_clip": 0.03, "eps_clip_high": 0.04},
    ),
    "cispo": (
        {"loss_type": "cispo", "epsilon_high": 1.2},
        {"policy_loss": "cispo", "calculate_per_token_loss": True, "eps_clip": 0.99, "eps_clip_high": 0.2},
    ),
    "sapo": ({"loss_type": "sapo"}, {"policy_loss": "sapo"}),
}


@pytest.fixture
def samples(make_groups):
    """Seven samples of three prompts at temperature 0.7."""
    groups = make_groups((3, 2, 2), response_lengths=(2, LONGEST), temperature=0.7)
    return [sample for group in groups for sample in group.samples]


def drifted(batch, seed: int, size: float) -> torch.Tensor:
    noise = torch.randn(batch.token_ids.shape[0], generator=torch.Generator().manual_seed(seed)) * size
    return torch.where(batch.loss_mask, noise, 0.0)


def ours(trainer, batch) -> tuple[float, dict[str, torch.Tensor]]:
    batch = replace(batch, loss_weights=trainer.objective.loss_weights(batch, len(batch)))
    total = 0.0
    for one in trainer.micro_batches.split(batch, range(len(batch))):
        result = micro_batch_loss(trainer.model, one.row, batch.select(one.samples), trainer.objective, "auto")
        result.loss.backward()
        total += float(result.loss.detach())
    return total, {name: p.grad for name, p in trainer.model.named_parameters()}


def theirs(
    folder: Path, samples, batch, settings: dict[str, Any], tmp_path: Path
) -> tuple[float, dict[str, torch.Tensor]]:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    count = len(samples)
    args = GRPOConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=count, num_generations=count, temperature=0.7, use_cpu=True,
        bf16=False, max_completion_length=LONGEST, report_to=[], gradient_checkpointing=False, **{"beta": 0.0, **settings},
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=lambda completions, **kwargs: [0.0] * len(completions),
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["a"]}),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    offsets, lengths = batch.offsets.tolist(), batch.lengths.tolist()
    prompts = [int(np.argmax(s.loss_mask)) for s in samples]

    def padded(values: torch.Tensor, part: str) -> torch.Tensor:
        """Prompts to the right edge, completions to the left one."""
        rows = []
        for start, length, prompt in zip(offsets, lengths, prompts, strict=True):
            own = values[start : start + prompt] if part == "prompt" else values[start + prompt : start + length]
            width = max(prompts) if part == "prompt" else LONGEST
            gap = torch.zeros(width - len(own), dtype=values.dtype)
            rows.append(torch.cat([gap, own] if part == "prompt" else [own, gap]))
        return torch.stack(rows)

    ones = torch.ones_like(batch.token_ids)
    inputs = {
        "prompt_ids": padded(batch.token_ids, "prompt"),
        "prompt_mask": padded(ones, "prompt"),
        "completion_ids": padded(batch.token_ids, "completion"),
        "completion_mask": padded(ones, "completion"),
        "advantages": batch.advantages[torch.tensor(offsets) + torch.tensor(prompts)],
        "old_per_token_logps": padded(batch.old_logprobs, "completion"),
        "ref_per_token_logps": padded(batch.ref_logprobs, "completion"),
        "num_items_in_batch": batch.loss_mask.sum(),
    }
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in trainer.model.named_parameters()}


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_those_of_trl(name, samples, make_trainer, tiny_model_dir, tmp_path) -> None:
    their_settings, our_settings = CASES[name]
    trainer = make_trainer(**our_settings)
    batch = batch_of(samples)
    now = trainer.logprobs(batch, trainer.model)
    per_sample = torch.tensor([1.0, -0.5, 0.7, -1.2, 0.4, 2.0, -0.3])[batch.sample_index]
    batch = replace(
        batch,
        advantages=torch.where(batch.loss_mask, per_sample, 0.0),
        old_logprobs=now + drifted(batch, 1, 0.3),
        ref_logprobs=now + drifted(batch, 2, 0.5),
    )
    our_loss, our_gradient = ours(trainer, batch)
    their_loss, their_gradient = theirs(tiny_model_dir, samples, batch, their_settings, tmp_path)
    assert our_loss == pytest.approx(their_loss, rel=1e-4, abs=1e-6)
    for weight, gradient in their_gradient.items():
        torch.testing.assert_close(our_gradient[weight], gradient, atol=1e-5, rtol=1e-3)
    assert max(g.abs().max() for g in their_gradient.values()) > 1e-3
