"""Gradient checkpointing without training mode: layers recompute their activations in the backward pass.

transformers' `GradientCheckpointingLayer` recomputes only while its `training` flag is set. `Module.train()` sets that
flag for every module, which also turns on whatever else an architecture does at random while it trains: router jitter,
sampled experts, dropout. Here the flag is set on the checkpointing layers alone, and it is cleared while a layer runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from treadle.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def recompute_layers(model: PreTrainedModel) -> None:
    """Make the layers of a model recompute their activations in the backward pass; the model stays in eval mode.

    Raises:
        ModelError: if the architecture has no layer that can recompute.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers: list[Any] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ModelError(
            f"{type(model).__name__} has no layers that can recompute their activations; remove --gradient-checkpointing"
        )
    for layer in layers:
        layer.gradient_checkpointing = layer.training = True
        layer._gradient_checkpointing_func = functools.partial(_run, layer)


def _run(layer: nn.Module, call: Callable[..., Any], *args: Any) -> Any:
    """Run a layer in eval mode, and again in the backward pass if there will be one."""

    def in_eval_mode(*args: Any) -> Any:
        layer.training = False
        try:
            return call(*args)
        finally:
            layer.training = True

    return checkpoint(in_eval_mode, *args, use_reentrant=False) if torch.is_grad_enabled() else in_eval_mode(*args)
