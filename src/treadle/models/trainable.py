"""What of a model is trained, published and saved: the one place that decides it.

The optimizer asks a `Trainable` what it steps, transports ask what engines receive, checkpoints ask what a model folder
holds. `FULL` trains every weight that the architecture does not freeze. An adapter such as LoRA would be another
implementation, in a file of its own: it would freeze the base and train its own matrices, publish the base with the adapter
merged in under the names of the base, and save that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor, nn


class Trainable(Protocol):
    """Decides which tensors of a model are trained, published and saved. A name is that of the module's parameter."""

    def freeze(self, model: nn.Module, is_frozen: Callable[[str], bool]) -> None:
        """Exclude the weights with these names from training; the others stay as they are."""
        ...

    def trained(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Return the parameters that get gradients and an optimizer state."""
        ...

    def published(self, model: nn.Module) -> Mapping[str, Tensor]:
        """Return the weights that engines receive and a model folder holds, by the names that the engine's module has for them."""
        ...

    def untrained(self, model: nn.Module) -> dict[str, Tensor]:
        """Return what a model folder holds beside the trained weights: frozen weights in float32, and buffers."""
        ...


class FullTraining:
    """Training of the weights of the model itself. Tied weights are one parameter with one name."""

    def freeze(self, model: nn.Module, is_frozen: Callable[[str], bool]) -> None:
        for name, parameter in model.named_parameters():
            if is_frozen(name):
                parameter.requires_grad_(False)

    def trained(self, model: nn.Module) -> dict[str, nn.Parameter]:
        return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}

    def published(self, model: nn.Module) -> Mapping[str, Tensor]:
        return dict(model.named_parameters())

    def untrained(self, model: nn.Module) -> dict[str, Tensor]:
        frozen = {name: p.detach().float() for name, p in model.named_parameters() if not p.requires_grad}
        return {**frozen, **stored_buffers(model)}


FULL: Trainable = FullTraining()
"""Full training."""


def stored_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model folder that are no weights, such as the bias of a router."""
    weights = dict(model.named_parameters(remove_duplicate=False))
    return {name: tensor for name, tensor in model.state_dict().items() if name not in weights}
