"""The forward pass of a policy in two halves: tokens to hidden states, and the head that reads them.

The halves are apart so that training runs the head on trained tokens only and in chunks, and the engine on the
last token only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treadle.errors import ModelError
from treadle.models.attention import PLAN_KEY, AttentionPlan, LayerRecorder, PackedAttention, RecordedCall
from treadle.models.context import check_length
from treadle.models.layout import Family, PackedLayout

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
        """hidden [N, D] → logits [N, V], in the dtype of the weight."""
        return self.finish(F.linear(hidden, self.weight, self.bias))

    def finish(self, out: Tensor) -> Tensor:
        """What comes after the matmul and the bias: scale and soft cap."""
        if self.scale != 1.0:
            out = out * self.scale
        return out if self.softcap is None else torch.tanh(out / self.softcap) * self.softcap


def head_of(model: PreTrainedModel) -> Head:
    """The output layer of a model, with what its architecture does to the logits afterwards."""
    layer = model.get_output_embeddings()
    if layer is None:
        raise ModelError(f"{type(model).__name__} has no output embeddings; Treadle trains causal language models")
    config = model.config.get_text_config()
    scale = 1.0
    if hasattr(config, "logits_scaling"):  # Granite divides
        scale = 1.0 / config.logits_scaling
    elif hasattr(config, "logit_scale"):  # Cohere multiplies
        scale = config.logit_scale
    softcap = config.final_logit_softcapping if hasattr(config, "final_logit_softcapping") else None
    return Head(layer.weight, layer.bias, scale, softcap)


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


def check_forward(model: PreTrainedModel, tolerance: float) -> None:
    """Compare our packed forward with the model's own on two short sequences that share a prefix.

    Raises `ModelError` where they differ by more than `tolerance` (mean absolute difference of a logit, in standard
    deviations of the logits), or ours does not run: the architecture mixes tokens or scales logits in a way Treadle
    does not know, and would be trained wrongly.
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
    """How far the logits of two short sequences that share a prefix differ, packed and one by one."""
    vocab = embeddings_of(model).shape[0]
    device = embeddings_of(model).device
    tokens = (torch.arange(1, 14, device=device) * 7919) % vocab
    prefix, one, two = tokens[:6], tokens[6:9], tokens[9:13]
    layout = PackedLayout((Family(6, (3, 4)),), device)
    own = model.config._attn_implementation
    with torch.no_grad():
        hidden = hidden_states(model, tokens, layout.position_ids, PackedAttention(layout))
        ours = head_of(model).logits(hidden).float()
        try:
            model.set_attn_implementation("eager")
            first, second = (model(torch.cat([prefix, rest])[None]).logits[0].float() for rest in (one, two))
        finally:
            model.set_attn_implementation(own)
    theirs = torch.cat([first, second[6:]])
    if not torch.isfinite(theirs).all():
        raise ModelError(f"the logits of {type(model).__name__} are not finite: its weights are damaged")
    return mean_gap(ours, theirs)
