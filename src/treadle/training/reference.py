"""The reference model that KL is measured against: fixed, refreshed now and then, or a moving average of the policy."""

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
    """The model on this device; back in host memory afterwards, where the device has a memory of its own.

    The shards of a frozen model stay in host memory: its layers are brought to the device one by one.
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
    """A frozen model, and when it follows the policy.

    With a moving average the weights are kept in float32 beside the model, for in bfloat16 small steps would be lost.
    """

    def __init__(self, model: PreTrainedModel | ParallelModel, section: AlgorithmSection):
        self.parallel = as_parallel(model)
        self.model: PreTrainedModel = self.parallel.model
        self.interval, self.decay = section.ref_update_interval, section.ref_ema_decay
        self._weights: dict[str, Tensor] = {}
        if self.decay is not None:
            self._weights = {name: p.float().clone() for name, p in self._parts()}

    def _parts(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's part of each weight."""
        return ((name, local_part(p.detach())) for name, p in self.model.named_parameters())

    @property
    def moves(self) -> bool:
        """True where the reference changes over the run, so that a checkpoint must hold it."""
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
        """Write the weights into a checkpoint that is being made, where they move; all ranks call this."""
        if not self.moves:
            return
        weights = self._weights or dict(self._parts())
        if self.parallel.is_sharded:
            params = dict(self.model.named_parameters())
            write_parts(folder, STEM, weights, params.__getitem__, self.parallel)
            return
        save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / f"{STEM}.safetensors")

    @torch.no_grad()
    def load(self, checkpoint: Checkpoint) -> None:
        """Set the weights a checkpoint holds; one that holds none leaves the reference as it is."""
        saved = TensorFiles(checkpoint.path, STEM)
        if not self.moves or not saved:
            return
        for name, param in self.model.named_parameters():
            part = part_of(saved[name], param)
            local_part(param.detach()).copy_(part)
            if self._weights:
                self._weights[name].copy_(part)
