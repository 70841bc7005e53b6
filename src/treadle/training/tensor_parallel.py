"""Split the matrices of decoder layers over neighbouring ranks, by the plan that transformers has for a model.

Neighbours have the same samples. A layer's first matrices are split by rows of the weight (each rank has some of the
heads, some of the hidden units), its last ones by columns, and the parts are added up: two exchanges a layer. What
lies outside the layers is computed by every neighbour alike. Source: Shoeybi et al. 2019 (arXiv 1909.08053).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from treadle.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FIRST, LAST, EVERYWHERE = "colwise", "rowwise", "replicated_with_grad_allreduce"
"""What transformers calls the three ways; the last is a small weight that each rank applies to its own heads."""


def split_layers(body: PreTrainedModel, mesh: DeviceMesh) -> list[nn.Module]:
    """Split the layers over a mesh of one axis; returns the modules whose gradients must be added up over it.

    Raises `ConfigError` if the model has no such plan, or if sizes do not divide.
    """
    size = mesh.size()
    plan = body.config.get_text_config().base_model_tp_plan
    asked = f"tensor_parallel_size = {size}"
    if not plan:
        raise ConfigError(f"{asked}: transformers has no plan for {type(body).__name__}; use 1")
    summed: list[nn.Module] = []
    for name, module, style in _planned(body.base_model, plan):
        if style == EVERYWHERE:
            summed.append(module)
            continue
        if style not in (FIRST, LAST) or not isinstance(module, nn.Linear):
            raise ConfigError(
                f"{asked}: {type(body).__name__} splits {name!r} as {style!r}, which is not supported; use 1"
            )
        width = module.out_features if style == FIRST else module.in_features
        if width % size:
            raise ConfigError(f"{asked} does not divide the {width} units of {name!r}; choose a size that does")
        parallelize_module(module, mesh, ColwiseParallel() if style == FIRST else RowwiseParallel())
    return summed


def check_heads(body: PreTrainedModel, size: int) -> None:
    """Raise `ConfigError` if the heads do not divide evenly."""
    config = body.config.get_text_config()
    for what, count in (
        ("attention heads", config.num_attention_heads),
        ("key and value heads", config.num_key_value_heads),
    ):
        if count % size:
            raise ConfigError(f"tensor_parallel_size = {size} does not divide the model's {count} {what}")


def _planned(base: nn.Module, plan: dict[str, str]) -> Iterator[tuple[str, nn.Module, str]]:
    """Return the modules of the layers that the plan names, and how each is split."""
    patterns = [(re.compile(re.escape(key).replace(r"\*", r"\d+")), style) for key, style in plan.items()]
    for name, module in base.named_modules():
        for pattern, style in patterns:
            if name.startswith("layers.") and pattern.fullmatch(name):
                yield name, module, style
