"""Attention's projections and the gated MLP of a decoder layer with backward passes of their own.

On a CPU a training step spends as long moving activations through memory as in matmuls. Here queries, keys and values
come from one matmul, and elementwise operations are one pass (compiled_formula.py). A module that is replaced keeps its
parameters under the same names, so that checkpoints, sharding and the engine stay the same. Other inputs than a packed
row go to the module itself.

Axis letters: `N` tokens, `D` hidden size, `F` units of the MLP, `H` heads, `E` head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from treadle.compiled_formula import OnePass
from treadle.models.attention import PLAN_KEY
from treadle.models.cpu.known_layer import declared_attention, known_layers, split_heads
from treadle.models.cpu.matmul import weight_gradient


@OnePass
def _gate(hidden: Tensor, gated: Tensor, upped: Tensor) -> None:
    hidden.copy_(F.silu(gated) * upped)


@OnePass
def _gate_gradients(
    hidden: Tensor, of_gated: Tensor, of_upped: Tensor, of_hidden: Tensor, gated: Tensor, upped: Tensor
) -> None:
    """Write the gradients of both, and their product again."""
    active = F.silu(gated)
    hidden.copy_(active * upped)
    of_upped.copy_(of_hidden * active)
    of_gated.copy_(torch.ops.aten.silu_backward(of_hidden * upped, gated))


class _GatedMLP(torch.autograd.Function):
    """`(silu(x Wgᵀ) · (x Wuᵀ)) Wdᵀ`; x [N, D] → [N, D]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        gated, upped = x @ gate.T, x @ up.T
        hidden = torch.empty_like(gated)
        _gate(hidden, gated, upped)
        ctx.save_for_backward(x, gated, upped, gate, up, down)
        return hidden @ down.T

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x, gated, upped, gate, up, down = ctx.saved_tensors
        of_hidden = grad @ down
        hidden, of_gated, of_upped = (torch.empty_like(gated) for _ in range(3))
        _gate_gradients(hidden, of_gated, of_upped, of_hidden, gated, upped)
        of_x = torch.addmm(of_gated @ gate, of_upped, up)
        return of_x, weight_gradient(of_gated, x), weight_gradient(of_upped, x), weight_gradient(grad, hidden)


class _StackedLinear(torch.autograd.Function):
    """Linear layers with the same input, side by side: x [N, D], weights [O, D], biases [O] or none → [N, sum of O]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, *weights_and_biases: Tensor) -> Tensor:
        weights, biases = weights_and_biases[:count], weights_and_biases[count:]
        ctx.save_for_backward(x, *weights)
        ctx.has_biases = bool(biases)
        return F.linear(x, _stacked(weights), _stacked(biases) if biases else None)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        sizes = [len(weight) for weight in weights]
        of_weights = weight_gradient(grad, x).split(sizes)
        of_biases = grad.sum(0).split(sizes) if ctx.has_biases else ()
        return grad @ _stacked(weights), None, *of_weights, *of_biases


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))


@OnePass
def _rotation(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    out.copy_(rotate(x, cos, sin))


class _Rotation(torch.autograd.Function):
    """Rotary positions: x [N, H, E] · cos + (its halves swapped) · sin, with cos and sin [N, 1, E] of `signed_halves`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        _rotation(out, x, cos, sin)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        out = torch.empty_like(grad, memory_format=torch.contiguous_format)
        _rotation(out, grad, cos, -sin)
        return out, None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions as `_Rotation` does; a negated sine is the inverse."""
    one, other = x.chunk(2, dim=-1)
    return torch.cat([other, one], dim=-1).mul_(sin).addcmul_(x, cos)


def signed_halves(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin for `rotate`, [N, 1, E]: those of transformers, [1, N, E], with the first half of sin negated."""
    half = sin.shape[-1] // 2
    return cos[0, :, None], torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)[0, :, None]


class _Fused(nn.Module):
    """Takes the place of a module and keeps its children under their names; calls it if the input is not a packed row's."""

    def __init__(self, module: Any):
        super().__init__()
        for name, child in module.named_children():
            self.add_module(name, child)
        self._replaced = (module,)  # in a tuple, so that its parameters are not registered twice


class FusedMLP(_Fused):
    """A gated MLP with SiLU and without biases."""

    def forward(self, x: Tensor) -> Tensor:
        own: Any = self
        weights = own.gate_proj.weight, own.up_proj.weight, own.down_proj.weight
        if isinstance(weights[0], DTensor):  # tensor parallel: the linear layers communicate
            return self._replaced[0](x)
        return _GatedMLP.apply(x.flatten(0, -2), *weights).view_as(x)


class FusedAttention(_Fused):
    """Attention with rotary positions, of one packed row."""

    def __init__(self, attention: Any):
        super().__init__(attention)
        self.declared, self.head_dim = declared_attention(attention), attention.head_dim

    def forward(self, hidden_states: Tensor, position_embeddings: Any = None, **kwargs: Any) -> tuple[Tensor, Any]:
        own: Any = self
        plan = kwargs.get(PLAN_KEY)
        if plan is None or isinstance(own.q_proj.weight, DTensor):
            return self._replaced[0](hidden_states, position_embeddings=position_embeddings, **kwargs)
        layers = own.q_proj, own.k_proj, own.v_proj
        biases = [layer.bias for layer in layers if layer.bias is not None]
        weights = [layer.weight for layer in layers]
        qkv = _StackedLinear.apply(hidden_states.squeeze(0), len(layers), *weights, *biases)
        counts = own.q_proj.out_features // self.head_dim, own.k_proj.out_features // self.head_dim
        norms = (own.q_norm, own.k_norm) if hasattr(own, "q_norm") else None
        turns = signed_halves(*position_embeddings)
        query, key, value = split_heads(qkv, counts, norms, lambda heads: _Rotation.apply(heads, *turns))
        out = plan.attend(query, key, value, self.declared)
        bias = () if own.o_proj.bias is None else (own.o_proj.bias,)
        return _StackedLinear.apply(out.flatten(1), 1, own.o_proj.weight, *bias).unsqueeze(0), None


def fuse_layers(model: Any) -> int:
    """Replace attention and MLP of the layers of a known architecture, if their biases allow; return how many it has."""
    count = 0
    for layer, known in known_layers(model):
        count += 1
        if all(part.bias is None for part in (known.gate, known.up, known.down)):
            layer.mlp = FusedMLP(layer.mlp)
        if len({part.bias is None for part in (known.query, known.key, known.value)}) == 1:
            layer.self_attn = FusedAttention(layer.self_attn)
    return count
