"""The reference model of the KL: fixed, refreshed at an interval, or a moving average of the policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor

from treadle.config import AlgorithmSection
from treadle.training.checkpoint import Checkpoint
from treadle.training.parallel import ParallelModel, as_parallel, local_part, part_of
from treadle.training.sharded_state import write_parts
from treadle.training.tensor_files import TensorFiles

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STEM = "reference"


@contextmanager
def lent_to(device: torch.device, model: ParallelModel) -> Iterator[ParallelModel]:
    """Move the model to this device, and back to host memory afterwards if the device is a GPU.

    The shards of a frozen model stay in host memory; its layers are loaded one by one.
    """
    if model.is_sharded:
        yield model
        return
    try:
        yield model.to(device)
    finally:
        if device.type != "cpu":
            model.to("cpu")


class Reference:
    """A frozen model, and its updates from the policy.

    A moving average is kept in float32 beside the model, because bfloat16 would lose small steps.
    """

    def __init__(self, model: PreTrainedModel | ParallelModel, section: AlgorithmSection):
        self.parallel = as_parallel(model)
        self.model: PreTrainedModel = self.parallel.model
        self.interval, self.decay = section.ref_update_interval, section.ref_ema_decay
        self._weights: dict[str, Tensor] = {}
        if self.decay is not None:
            self._weights = {name: p.float().clone() for name, p in self._parts()}

    def _published(self) -> Mapping[str, Tensor]:
        return self.parallel.trainable.published(self.model)

    def _parts(self) -> Iterator[tuple[str, Tensor]]:
        """Return this rank's part of each weight."""
        return ((name, local_part(p.detach())) for name, p in self._published().items())

    @property
    def moves(self) -> bool:
        """True if the reference changes during the run, so that a checkpoint must hold it."""
        return self.interval is not None or self.decay is not None

    @torch.no_grad()
    def follow(self, rollouts_done: int, policy: Mapping[str, Tensor]) -> None:
        """Refresh or average the weights if that is due; called after each rollout.

        Args:
            rollouts_done: number of rollouts trained on.
            policy: this rank's part of the policy's float32 weights that are trained; the others stay as they are.
        """
        trained = ((name, param) for name, param in self._parts() if name in policy)
        if self.decay is not None:
            for name, param in trained:
                weight = self._weights[name]
                weight.lerp_(policy[name].to(weight.device), 1 - self.decay)
                param.copy_(weight)
        elif self.interval is not None and rollouts_done % self.interval == 0:
            for name, param in trained:
                param.copy_(policy[name])

    def write(self, folder: Path) -> None:
        """Write the weights into a checkpoint folder, if they change; all ranks call this."""
        if not self.moves:
            return
        weights = self._weights or dict(self._parts())
        if self.parallel.is_sharded:
            write_parts(folder, STEM, weights, self._published().__getitem__, self.parallel)
            return
        save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / f"{STEM}.safetensors")

    @torch.no_grad()
    def load(self, checkpoint: Checkpoint) -> None:
        """Load the weights from a checkpoint, if it holds any."""
        saved = TensorFiles(checkpoint.path, STEM)
        if not self.moves or not saved:
            return
        for name, param in self._published().items():
            part = part_of(saved[name], param)
            local_part(param.detach()).copy_(part)
            if self._weights:
                self._weights[name].copy_(part)
