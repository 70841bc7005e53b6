"""The forward pass that an engine runs: the same numbers as training's, with fewer and larger operations.

`InferenceModel` runs the Hugging Face module as it is. `FusedInference` reads its weights and computes a decoder layer
itself: one matmul for queries, keys and values, one for gate and up, residuals added inside matmuls, and weights laid out
once per version as the CPU's matmul wants them. Operations between matmuls, and matmuls of a few rows, are `CpuKernels` if
they are available. Known architectures only (known_layer.py); it is compared with the module when it is built.

Axis letters: `N` tokens, `D` hidden size, `H` query heads, `K` key/value heads, `E` head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treadle.models.attention import AttentionPlan, PackedAttention
from treadle.models.cpu.decode_kernels import MOST_ROWS, CpuKernels, LayerKernel, cpu_kernels
from treadle.models.cpu.fused_layers import rotate, signed_halves
from treadle.models.cpu.known_layer import KnownLayer, is_known, known_layers, split_heads
from treadle.models.forward import Head, embeddings_of, head_of, hidden_states, mean_gap, packed_logits
from treadle.models.layout import Family, PackedLayout
from treadle.models.load import FORWARD_TOLERANCE

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class InferenceModel:
    """The module itself, as an engine runs it; `kernels` are for attention plans and sampling, if there are any."""

    kernels: CpuKernels | None = None

    def __init__(self, model: PreTrainedModel):
        self.model = model

    def refresh(self) -> None:
        """Read the weights again; called before the first forward pass with each version of them."""

    def release(self) -> None:
        """Free what was made from the weights; the next `refresh` makes it again."""

    def hidden_states(self, token_ids: Tensor, position_ids: Tensor, plan: AttentionPlan) -> Tensor:
        """Run one packed row: token_ids and position_ids int64 [N] → hidden states [N, D]."""
        return hidden_states(self.model, token_ids, position_ids, plan)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [N, V] of hidden states [N, D]."""
        return head_of(self.model).logits(hidden)


def can_fuse(model: PreTrainedModel) -> bool:
    """Return True if `FusedInference` knows the architecture and the CPU's matmul library supports its dtype."""
    weight = embeddings_of(model)
    supported = weight.dtype == torch.float32 or (
        weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
    return is_known(model.config) and weight.device.type == "cpu" and torch.backends.mkldnn.is_available() and supported


def inference_model(model: PreTrainedModel, *, fused: bool) -> InferenceModel:
    """Return the fastest forward pass for this model; the module itself unless `fused`, or if their logits differ."""
    if fused and can_fuse(model):
        found = FusedInference(model)
        if _gap(found) <= FORWARD_TOLERANCE[embeddings_of(model).dtype]:
            return found
    return InferenceModel(model)


@torch.no_grad()
def _gap(fused: FusedInference) -> float:
    """Return the mean distance of the logits from the module's own: the larger one of a short row and a very short one."""
    gaps, model = [], fused.model
    fused.refresh()
    for layout in (PackedLayout((Family(6, (3, 4)),)), PackedLayout((Family(3, (2,)),))):
        tokens = (torch.arange(1, layout.num_tokens + 1) * 7919) % embeddings_of(model).shape[0]
        hidden = fused.hidden_states(tokens, layout.position_ids, PackedAttention(layout))
        gaps.append(mean_gap(fused.logits(hidden).float(), packed_logits(model, tokens, layout)))
    fused.release()
    return max(gaps)


class _Linear:
    """A linear layer, or several with the same input, whose weights are laid out for the CPU's matmul."""

    def __init__(self, *layers: nn.Linear):
        weight: Tensor = torch.cat(tuple(layer.weight for layer in layers)) if len(layers) > 1 else layers[0].weight
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
        self._bias = torch.cat(biases).detach() if biases else None

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """Return the result with `other` added, in the same pass over memory."""
        return torch.ops.mkldnn._linear_pointwise.binary(x, other, self._weight, self._bias, "add")


class _Norm:
    """RMSNorm over the last axis with the weights of the module, in float32 and rounded once.

    Without kernels it is `x w √D / √(|x|² + D eps)`: for a few rows each operation costs more than its arithmetic.
    """

    def __init__(self, norm: Any, kernels: CpuKernels | None):
        weight: Tensor = norm.weight.detach()
        self._dtype, self._kernels, self._eps = weight.dtype, kernels, norm.variance_epsilon
        exact = torch.promote_types(weight.dtype, torch.float32)
        self._weight = weight.to(exact) * (1.0 if kernels is not None else len(weight) ** 0.5)
        self._floor = torch.tensor((len(weight) * self._eps) ** 0.5, dtype=exact)

    def __call__(self, x: Tensor) -> Tensor:
        if self._kernels is not None:
            return self._kernels.rms_norm(x.flatten(0, -2), self._weight, self._eps).view(x.shape)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=self._floor.dtype)
        return torch.mul(x, self._weight).div_(torch.hypot(length, self._floor)).to(self._dtype)


class _Layer:
    """One decoder layer on prepared weights."""

    def __init__(self, layer: KnownLayer, kernels: CpuKernels | None):
        self.declared, self.counts, self.kernels = layer.declared, (layer.heads, layer.kv_heads), kernels
        self.norm_in, self.norm_mlp = _Norm(layer.norm_in, kernels), _Norm(layer.norm_mlp, kernels)
        self.qkv, self.out = _Linear(layer.query, layer.key, layer.value), _Linear(layer.out)
        self.gate_up, self.down = _Linear(layer.gate, layer.up), _Linear(layer.down)
        norms = layer.norms
        self.norms = None if norms is None else (_Norm(norms[0], kernels), _Norm(norms[1], kernels))
        self.kernel = None if kernels is None else LayerKernel(layer, kernels)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, plan: AttentionPlan) -> Tensor:
        if self.kernel is not None and len(x) <= MOST_ROWS:
            own, shared = self.counts
            query, key, value = self.kernel.project(x, cos, sin).split_with_sizes([own, shared, shared], 1)
            return self.kernel.finish(x, plan.attend(query, key, value, self.declared))
        turn = rotate if self.kernels is None else self.kernels.rotate
        qkv = self.qkv(self.norm_in(x))
        query, key, value = split_heads(qkv, self.counts, self.norms, lambda heads: turn(heads, cos, sin))
        x = self.out.plus(plan.attend(query, key, value, self.declared).flatten(1), x)
        return self.down.plus(self._gated(self.gate_up(self.norm_mlp(x))), x)

    def _gated(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) · up of both side by side."""
        if self.kernels is not None:
            return self.kernels.silu_times(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


class FusedInference(InferenceModel):
    """A decoder of a known architecture on prepared copies of its weights (CPU)."""

    def __init__(self, model: PreTrainedModel):
        assert can_fuse(model), f"{model.config.model_type} can't be fused here"
        super().__init__(model)
        self._body: Any = model.base_model
        self.kernels = cpu_kernels(model.config, embeddings_of(model).dtype)
        self._layers: list[_Layer] = []
        self._norm: _Norm | None = None
        self._head: tuple[Head, _Linear] | None = None

    @torch.no_grad()
    def refresh(self) -> None:
        self._layers = [_Layer(known, self.kernels) for _, known in known_layers(self.model)]
        self._norm = _Norm(self._body.norm, self.kernels)
        self._head = head_of(self.model), _Linear(self.model.get_output_embeddings())

    def release(self) -> None:
        self._layers, self._norm, self._head = [], None, None

    def hidden_states(self, token_ids: Tensor, position_ids: Tensor, plan: AttentionPlan) -> Tensor:
        assert self._norm is not None, "refresh() comes first"
        x = F.embedding(token_ids, self._body.embed_tokens.weight)
        cos, sin = signed_halves(*self._body.rotary_emb(x, position_ids=position_ids.unsqueeze(0)))
        for layer in self._layers:
            x = layer(x, cos, sin, plan)
        return self._norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        assert self._head is not None, "refresh() comes first"
        head, linear = self._head
        return head.finish(linear(hidden))
