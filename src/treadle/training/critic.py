"""The critic of PPO: its values, its optimizer, and its checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from treadle.algorithms.losses import value_loss
from treadle.config import AlgorithmSection, Config, CriticSection
from treadle.metrics import Metric, metric
from treadle.models.attention import PackedAttention
from treadle.models.forward import recompute_layers
from treadle.models.saving import save_model
from treadle.models.value import ValueModel, read_value_head, save_value_head
from treadle.training.batch import Batch
from treadle.training.checkpoint import Checkpoint, check_same_model
from treadle.training.micro_batches import MicroBatch, MicroBatches, Passes, with_last
from treadle.training.optimizer import MasterOptimizer
from treadle.training.packing import PackedBatch
from treadle.training.parallel import ParallelModel, as_parallel, local_part
from treadle.training.sharded_state import gathered_parameter, stored_parameters, write_model_folder, write_parts
from treadle.training.tensor_files import Chosen, TensorFiles

OPTIMIZER = "optimizer"
FOLDER = "critic"


class Critic:
    """Predicts the return from every trained token's state, and learns to do so from each rollout."""

    def __init__(
        self, model: ValueModel | ParallelModel, config: Config, total_steps: int, warn: Callable[[str], None]
    ):
        self.parallel = as_parallel(model)
        self.model: ValueModel = self.parallel.model
        self.warn = warn
        self.section: CriticSection = config.critic
        self.algorithm: AlgorithmSection = config.algorithm
        self.backend = config.model.attention_backend
        self.micro_batches = MicroBatches(config.train, self.parallel.grid.device, self.parallel.ranks)
        ratio = self.section.critic_lr / config.optim.lr  # the policy's schedule at another height
        own = {"lr": self.section.critic_lr, "min_lr": config.optim.min_lr * ratio}
        optim = config.optim.model_copy(update={**own, "lr_warmup_steps": self.section.critic_lr_warmup_steps})
        self.optimizer = MasterOptimizer(self.parallel, optim, total_steps)
        if config.model.gradient_checkpointing:
            recompute_layers(self.model.model)

    def plan(self, batch: Batch, steps: Sequence[Sequence[int]]) -> Passes:
        """Split the samples of a rollout's steps, all of which train the critic; every rank calls this at the same time."""
        return self.micro_batches.plan(batch, steps)

    def values(self, batch: Batch, passes: Passes) -> Tensor:
        """Return the value of the state before each trained token, float32 [T], 0 at the others."""
        found = self.micro_batches.per_token(batch, passes.all, lambda packed: [self._values(packed)])
        self.parallel.free_gathered()
        return found[0]

    def _values(self, packed: PackedBatch) -> Tensor:
        plan = PackedAttention(packed.layout, self.backend)
        return self.parallel(_values_of, packed.token_ids, packed.layout.position_ids, plan, packed.predictors)

    def train(self, batch: Batch, passes: Passes) -> list[Metric]:
        """Take the optimizer steps of a rollout; return this rank's metrics."""
        metrics = [m for micro_batches in passes.steps for m in self.step(batch, micro_batches)]
        return metrics if self.parallel.grid.reports else []

    def step(self, batch: Batch, micro_batches: Sequence[MicroBatch]) -> list[Metric]:
        """Take one optimizer step on micro-batches of the batch, which has values, returns and loss weights."""
        metrics: list[Metric] = []
        loss = 0.0
        for micro_batch, is_last in with_last(micro_batches):
            packed = micro_batch.row.to(self.micro_batches.device)
            new, at = self._values(packed), packed.tokens
            if not at.shape[0]:
                self.parallel.backward(new.sum(), is_last=is_last)
                continue
            part = batch.select(micro_batch.samples).to(self.micro_batches.device)
            assert part.values is not None
            assert part.returns is not None
            assert part.loss_weights is not None
            old, returns = part.values[at], part.returns[at]
            result = value_loss(new, old, returns, self.section.value_clip)
            share = (result.loss * part.loss_weights[at]).sum()
            self.parallel.backward(share, is_last=is_last)
            loss += float(share.detach())
            metrics += _metrics(old, returns, result.clipped)
        loss = float(self.parallel.ranks.sum(torch.tensor(loss, dtype=torch.float64)))
        update = self.optimizer.step(loss_is_finite=bool(torch.isfinite(torch.tensor(loss))))
        if not self.parallel.grid.is_first:
            return metrics
        if update.skipped:
            self.warn(f"critic step {self.optimizer.num_steps - 1} skipped, weights unchanged: {update.cause(loss)}")
        return [
            *metrics,
            metric("critic/loss", loss),
            metric("critic/grad_norm", update.grad_norm),
            metric("critic/lr", update.lr),
            metric("critic/skipped_steps", update.skipped),
        ]

    def tensors(self) -> list[Tensor]:
        """Return everything it holds between rollouts: weights, masters, AdamW's state."""
        return [local_part(p.detach()) for p in self.model.parameters()] + list(self.optimizer.tensors())

    # Checkpoints

    def write(self, folder: Path) -> None:
        """Write the critic: a Hugging Face folder of its body, its head, and its AdamW state."""
        state = self.optimizer.state_tensors()
        if self.parallel.is_sharded:
            write_model_folder(self.parallel, self.model.model, "model.", folder)
            head = {n: gathered_parameter(p, self.parallel) for n, p in self.model.value_head.named_parameters()}
            if self.parallel.grid.is_first:
                save_value_head(head, folder)
            write_parts(folder, OPTIMIZER, state, self.optimizer.parameter_of, self.parallel)
            return
        masters = {name: p.detach() for name, p in self.optimizer.masters.items()}
        save_model(self.model.model, _under("model.", masters), folder)
        save_value_head(_under("value_head.", masters), folder)
        save_file({k: v.contiguous() for k, v in state.items()}, folder / f"{OPTIMIZER}.safetensors")

    def load(self, checkpoint: Checkpoint) -> None:
        """Set weights, AdamW state and schedule from a checkpoint that has a critic."""
        folder = checkpoint.path / FOLDER
        names = [name.removeprefix("model.") for name in self.optimizer.params if name.startswith("model.")]
        body, head = stored_parameters(folder, names), read_value_head(self.model, folder)
        places = {f"model.{name}": (body, name) for name in body} | {
            f"value_head.{name}": (head, name) for name in head
        }
        known = Chosen({name: place for name, place in places.items() if name in self.optimizer.params})
        check_same_model(checkpoint, known, self.optimizer.params)
        self.optimizer.load_masters(known)
        self.optimizer.load_state_tensors(TensorFiles(folder, OPTIMIZER))
        self.optimizer.num_steps = checkpoint.entry("critic_steps", int)


def _values_of(model: ValueModel, *args: Any) -> Tensor:
    """Return a copy of the values: FSDP registers hooks on the result of a forward pass and warns about views."""
    return model.values(*args).clone()


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _metrics(values: Tensor, returns: Tensor, clipped: Tensor) -> list[Metric]:
    count = values.shape[0]
    return [
        metric("critic/value_mean", float(values.mean()), count),
        metric("critic/return_mean", float(returns.mean()), count),
        metric("critic/error_squared", float((values - returns).square().mean()), count),
        metric("critic/clip_fraction", float(clipped.float().mean()), count),
    ]
