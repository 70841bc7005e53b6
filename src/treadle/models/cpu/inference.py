"""The forward pass an engine runs: the same numbers as training's, with fewer and larger operations.

`plain` is the Hugging Face module as it is. `fused` reads its weights and computes a decoder layer itself: one
matmul for queries, keys and values, one for gate and up, the residual inside the matmuls that it is added to, weights
laid out once per version as the CPU's matmul wants them. What is between matmuls, and for a few rows the matmuls too, are
`CpuKernels` where they can be had. It exists for architectures whose layer it knows, is checked against the module when
it is built, and tests hold one against the other.

Axis letters: `N` tokens, `D` hidden size, `H` query heads, `K` key/value heads, `E` head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treadle.models.attention import AttentionPlan, LayerAttention, PackedAttention
from treadle.models.cpu.decode_kernels import MOST_ROWS, CpuKernels, LayerKernel, cpu_kernels
from treadle.models.cpu.fused_layers import rotate, signed_halves
from treadle.models.cpu.known_layer import KnownLayer, is_known, known_layers, split_heads
from treadle.models.forward import Head, embeddings_of, head_of, hidden_states
from treadle.models.layout import Family, PackedLayout
from treadle.models.load import FORWARD_TOLERANCE

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class InferenceModel(Protocol):
    """A model as an engine sees it; `kernels` are for its attention plans, where there are any."""

    kernels: CpuKernels | None

    def refresh(self) -> None:
        """Read the weights again; called before the first forward pass with each version of them."""
        ...

    def release(self) -> None:
        """Give up the memory of what was made from the weights; the next `refresh` makes it again."""
        ...

    def hidden_states(self, token_ids: Tensor, position_ids: Tensor, plan: AttentionPlan) -> Tensor:
        """One packed row: token_ids and position_ids int64 [N] → hidden states [N, D]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, D] → logits [N, V]."""
        ...


class PlainInference:
    """The module itself."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.kernels: CpuKernels | None = None

    def refresh(self) -> None:
        return

    def release(self) -> None:
        return

    def hidden_states(self, token_ids: Tensor, position_ids: Tensor, plan: AttentionPlan) -> Tensor:
        return hidden_states(self.model, token_ids, position_ids, plan)

    def logits(self, hidden: Tensor) -> Tensor:
        return head_of(self.model).logits(hidden)


def can_fuse(model: PreTrainedModel) -> bool:
    """True where `FusedInference` knows the architecture and the CPU's matmul library is there."""
    weight = embeddings_of(model)
    supported = weight.dtype == torch.float32 or (
        weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
    return is_known(model.config) and weight.device.type == "cpu" and torch.backends.mkldnn.is_available() and supported


def inference_model(model: PreTrainedModel, *, fused: bool) -> InferenceModel:
    """The quickest forward pass there is for this model; the plain one where `fused` is False or differs from it."""
    if fused and can_fuse(model):
        found = FusedInference(model)
        if _gap(found) <= FORWARD_TOLERANCE[embeddings_of(model).dtype]:
            return found
    return PlainInference(model)


@torch.no_grad()
def _gap(fused: FusedInference) -> float:
    """Mean distance of the logits from the module's own, in standard deviations of a logit; the larger of a short row's and a very short one's."""
    model, gaps = fused.model, []
    fused.refresh()
    for layout in (PackedLayout((Family(6, (3, 4)),)), PackedLayout((Family(3, (2,)),))):
        tokens = (torch.arange(1, layout.num_tokens + 1) * 7919) % embeddings_of(model).shape[0]
        ours, own = (
            part.logits(part.hidden_states(tokens, layout.position_ids, PackedAttention(layout))).float()
            for part in (fused, PlainInference(model))
        )
        gaps.append(float((ours - own).abs().mean() / own.std().clamp_min(1e-12)))
    fused.release()
    return max(gaps)


class _Linear:
    """A linear layer whose weights (several stacked, where given) are laid out for the CPU's matmul."""

    def __init__(self, *layers: nn.Linear):
        weight: Tensor = torch.cat(tuple(layer.weight for layer in layers)) if len(layers) > 1 else layers[0].weight
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
        self._bias = torch.cat(biases).detach() if biases else None

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """With `other` added, in the same pass over the result."""
        return torch.ops.mkldnn._linear_pointwise.binary(x, other, self._weight, self._bias, "add")


class _Norm:
    """RMSNorm over the last axis with the weights of the module, in float32 and rounded once.

    Without kernels in few operations, for at few rows each costs more than its arithmetic: `x w √D / √(|x|² + D eps)`.
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


@dataclass(frozen=True)
class _Layer:
    """The prepared weights of one decoder layer."""

    attention: LayerAttention
    norm_in: _Norm
    qkv: _Linear
    norms: tuple[_Norm, _Norm] | None  # of queries and keys, head by head (Qwen3)
    out: _Linear
    norm_mlp: _Norm
    gate_up: _Linear
    down: _Linear
    kernel: LayerKernel | None  # for few rows

    @classmethod
    def of(cls, layer: KnownLayer, kernels: CpuKernels | None) -> _Layer:
        norms = layer.norms
        return cls(
            layer.declared,
            _Norm(layer.norm_in, kernels),
            _Linear(layer.query, layer.key, layer.value),
            None if norms is None else (_Norm(norms[0], kernels), _Norm(norms[1], kernels)),
            _Linear(layer.out),
            _Norm(layer.norm_mlp, kernels),
            _Linear(layer.gate, layer.up),
            _Linear(layer.down),
            None if kernels is None else LayerKernel(layer, kernels),
        )


class FusedInference:
    """A decoder of a known architecture on prepared copies of its weights (CPU)."""

    def __init__(self, model: PreTrainedModel):
        assert can_fuse(model), f"{model.config.model_type} can't be fused here"
        self.model = model
        config = model.config
        self.kernels = cpu_kernels(config, embeddings_of(model).dtype)
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._split = [self._heads, self._kv_heads, self._kv_heads]
        self._layers: Sequence[_Layer] = ()
        self._norm: _Norm | None = None
        self._head: tuple[Head, _Linear] | None = None

    @torch.no_grad()
    def refresh(self) -> None:
        body: Any = self.model.base_model
        self._layers = [_Layer.of(known, self.kernels) for _, known in known_layers(self.model)]
        self._norm = _Norm(body.norm, self.kernels)
        self._head = (head_of(self.model), _Linear(self.model.get_output_embeddings()))

    def release(self) -> None:
        self._layers, self._norm, self._head = (), None, None

    def hidden_states(self, token_ids: Tensor, position_ids: Tensor, plan: AttentionPlan) -> Tensor:
        assert self._norm is not None, "refresh() comes first"
        body: Any = self.model.base_model
        x = F.embedding(token_ids, body.embed_tokens.weight)
        cos, sin = body.rotary_emb(x, position_ids=position_ids.unsqueeze(0))
        cos, sin = signed_halves(cos, sin)
        counts, turn = (self._heads, self._kv_heads), rotate if self.kernels is None else self.kernels.rotate
        for layer in self._layers:
            if layer.kernel is not None and len(x) <= MOST_ROWS:
                heads = layer.kernel.project(x, cos, sin)
                query, key, value = heads.split(self._split, dim=1)
                attended = plan.attend(query, key, value, layer.attention)
                x = layer.kernel.finish(x, attended)
                continue
            qkv = layer.qkv(layer.norm_in(x))
            query, key, value = split_heads(qkv, counts, layer.norms, lambda heads: turn(heads, cos, sin))
            attended = plan.attend(query, key, value, layer.attention)
            x = layer.out.plus(attended.flatten(1), x)
            x = layer.down.plus(self._gated(layer.gate_up(layer.norm_mlp(x))), x)
        return self._norm(x)

    def _gated(self, gate_up: Tensor) -> Tensor:
        """silu(gate) · up of both side by side."""
        if self.kernels is not None:
            return self.kernels.silu_times(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def logits(self, hidden: Tensor) -> Tensor:
        assert self._head is not None, "refresh() comes first"
        head, linear = self._head
        return head.finish(linear(hidden))
