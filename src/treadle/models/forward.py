"""The forward pass of a policy in two halves: tokens to hidden states, and the head that reads them.

The halves are apart so that training runs the head on trained tokens only and in chunks, and the engine on the
last token only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from treadle.errors import ModelError
from treadle.models.attention import PLAN_KEY, AttentionPlan, LayerRecorder, PackedAttention, RecordedCall
from treadle.models.layout import Family, PackedLayout
from treadle.models.model_config import check_length

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Head:
    """The output layer: logits = softcap(scale · (hidden @ weightᵀ + bias))."""

    weight: Tensor  # [V, D]
    bias: Tensor | None = None  # [V]
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [N, V] of hidden states [N, D], in the dtype of the weight."""
        return self.finish(F.linear(hidden, self.weight, self.bias))

    def finish(self, out: Tensor) -> Tensor:
        """Apply scale and soft cap, which follow the matmul and the bias."""
        if self.scale != 1.0:
            out = out * self.scale
        return out if self.softcap is None else torch.tanh(out / self.softcap) * self.softcap


def head_of(model: PreTrainedModel) -> Head:
    """Return the output layer of a model, with what its architecture does to the logits afterwards."""
    layer = model.get_output_embeddings()
    if layer is None:
        raise ModelError(f"{type(model).__name__} has no output embeddings; Treadle trains causal language models")
    text = model.config.get_text_config()
    # Granite divides, Cohere multiplies.
    scale = 1.0 / text.logits_scaling if hasattr(text, "logits_scaling") else getattr(text, "logit_scale", 1.0)
    return Head(layer.weight, layer.bias, scale, getattr(text, "final_logit_softcapping", None))


def body_of(model: PreTrainedModel) -> Any:
    """Return the part of a model that turns tokens into hidden states."""
    body = model.base_model
    return model.model if body is model else body  # a class may name a prefix that it does not have


def hidden_states(model: PreTrainedModel, token_ids: Tensor, position_ids: Tensor, plan: AttentionPlan) -> Tensor:
    """Run the model's body on one packed row: token_ids and position_ids int64 [N] → hidden states [N, D]."""
    if isinstance(plan, PackedAttention):
        check_length(model.config, plan.layout.longest)
    out = body_of(model)(
        input_ids=token_ids.unsqueeze(0),
        position_ids=position_ids.unsqueeze(0),
        use_cache=False,
        **{PLAN_KEY: plan},
    )
    return out.last_hidden_state.squeeze(0)


def embeddings_of(model: nn.Module) -> Tensor:
    """Return the input embeddings [V, D] of a model, whose dtype and device are those of its forward pass."""
    part: Any = model
    weight: Tensor = part.get_input_embeddings().weight
    return weight


@torch.no_grad()
def attention_calls(model: PreTrainedModel) -> list[RecordedCall]:
    """Return the calls of the attention function in one forward pass, in their order."""
    token = torch.zeros(1, dtype=torch.int64, device=embeddings_of(model).device)
    recorder = LayerRecorder()
    hidden_states(model, token, token, recorder)
    return recorder.calls


def mean_gap(ours: Tensor, own: Tensor) -> float:
    """Return the mean distance of logits [N, V], in standard deviations of a logit; NaN if any is NaN."""
    return float((ours - own).abs().mean() / own.std().clamp_min(1e-12))


def packed_logits(model: PreTrainedModel, token_ids: Tensor, layout: PackedLayout) -> Tensor:
    """Return the logits of a packed row, float32 [N, V]."""
    return head_of(model).logits(hidden_states(model, token_ids, layout.position_ids, PackedAttention(layout))).float()


@torch.no_grad()
def check_forward(model: PreTrainedModel, tolerance: float) -> None:
    """Compare the packed forward pass with the model's own on two short sequences that share a prefix.

    Raises:
        ModelError: if a logit differs by more than `tolerance` in the mean, in standard deviations of the logits, or if ours
            does not run: the architecture mixes tokens or scales logits in a way Treadle does not know, and would be
            trained wrongly.
    """
    try:
        gap = _forward_gap(model)
    except ModelError:
        raise
    except Exception as error:  # whatever a model's code does with arguments it does not know
        raise ModelError(
            f"{type(model).__name__} can't run on a packed row ({error!r}); this architecture is not supported"
        ) from error
    if not gap <= tolerance:
        raise ModelError(
            f"{type(model).__name__}: a packed forward differs from the model's own by {gap:.2g} standard deviations; "
            "this architecture can't be packed and is not supported"
        )


def _forward_gap(model: PreTrainedModel) -> float:
    """Return how far the logits of two short sequences differ, packed and one by one."""
    weight, own = embeddings_of(model), model.config._attn_implementation
    tokens = (torch.arange(1, 14, device=weight.device) * 7919) % weight.shape[0]
    ours = packed_logits(model, tokens, PackedLayout((Family(6, (3, 4)),), weight.device))
    try:
        model.set_attn_implementation("eager")
        first, second = (
            model(torch.cat([tokens[:6], rest])[None]).logits[0].float() for rest in (tokens[6:9], tokens[9:])
        )
    finally:
        model.set_attn_implementation(own)
    theirs = torch.cat([first, second[6:]])
    if not torch.isfinite(theirs).all():
        raise ModelError(f"the logits of {type(model).__name__} are not finite: its weights are damaged")
    return mean_gap(ours, theirs)


def recompute_layers(model: PreTrainedModel) -> None:
    """Make the layers of a model recompute their activations in the backward pass (gradient checkpointing), in eval mode.

    transformers' `GradientCheckpointingLayer` recomputes only while its `training` flag is set. `Module.train()` sets that
    flag for every module, which also turns on whatever else an architecture does at random while it trains: router jitter,
    sampled experts, dropout. Here the flag is set on the checkpointing layers alone, and it is cleared while a layer runs.

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
        layer._gradient_checkpointing_func = functools.partial(_run_layer, layer)


def _run_layer(layer: nn.Module, call: Callable[..., Any], *args: Any) -> Any:
    """Run a layer in eval mode, and again in the backward pass if there will be one."""

    def in_eval_mode(*args: Any) -> Any:
        layer.training = False
        try:
            return call(*args)
        finally:
            layer.training = True

    return checkpoint(in_eval_mode, *args, use_reentrant=False) if torch.is_grad_enabled() else in_eval_mode(*args)
