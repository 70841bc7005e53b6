"""RMSNorm with a backward pass of its own.

Hugging Face writes the norm as six operations, and autograd saves the result of each; on a CPU that costs more than the
attention. `FusedRMSNorm` computes the same in float32 and saves only its input and one number per token. A norm that is
replaced keeps its parameter, so names, checkpoints and sharding stay the same.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from treadle.compiled_formula import OnePass


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return `x · weight / √(mean(x²) + eps)` over the last axis, and the factor on x, [..., 1].

    Computed in float32 or the dtype of x, whichever is more precise, and rounded once.
    """
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    length = torch.linalg.vector_norm(exact, dim=-1, keepdim=True)
    inverse = torch.rsqrt(length.square().div_(x.shape[-1]).add_(eps))
    return exact.mul(inverse).mul_(weight).to(x.dtype), inverse


class FusedRMSNorm(nn.Module):
    """`rms_norm` with its weight."""

    def __init__(self, weight: nn.Parameter, eps: float):
        super().__init__()
        self.weight, self.variance_epsilon = weight, eps

    def forward(self, x: Tensor) -> Tensor:
        return _RMSNorm.apply(x, self.weight, self.variance_epsilon)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}"


@OnePass
def _norm(out: Tensor, inverse: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    normed, factor = rms_norm(x, weight, eps)
    out.copy_(normed)
    inverse.copy_(factor)


@OnePass
def _norm_gradients(of_x: Tensor, grad: Tensor, x: Tensor, inverse: Tensor, weight: Tensor, of_weight: Tensor) -> None:
    """Write the gradient of x and add to that of the weight, in the precision of `inverse`."""
    normed, exact = x * inverse, grad.to(inverse.dtype)
    product = exact * normed
    along = (product * weight).sum(-1, keepdim=True).div_(x.shape[-1])
    of_x.copy_((exact * weight).addcmul_(normed, along, value=-1).mul_(inverse))
    of_weight.add_(product.sum(0))


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        exact = torch.promote_types(x.dtype, torch.float32)
        out, inverse = torch.empty_like(flat), flat.new_empty(len(flat), 1, dtype=exact)
        _norm(out, inverse, flat, whole=(weight, eps))
        ctx.save_for_backward(flat, weight, inverse)
        return out.view(x.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        flat, of_x = grad.reshape(x.shape), torch.empty_like(x)
        of_weight = torch.zeros_like(weight, dtype=inverse.dtype)
        _norm_gradients(of_x, flat, x, inverse, whole=(weight.to(inverse.dtype), of_weight))
        return of_x.view(grad.shape), of_weight.to(weight.dtype), None


def fuse_norms(model: nn.Module) -> int:
    """Replace every norm that computes the same as `FusedRMSNorm`; return their number.

    That is decided by computing with each, not by its name: some architectures add 1 to the weight.
    """
    replaced = 0
    for parent in list(model.modules()):
        for name, norm in list(parent.named_children()):
            if _is_rms_norm(norm):
                part: Any = norm
                setattr(parent, name, FusedRMSNorm(part.weight, part.variance_epsilon).train(part.training))
                replaced += 1
    return replaced


@torch.no_grad()
def _is_rms_norm(norm: Any) -> bool:
    """Return True if the module has one vector of weights and an epsilon, and normalises as RMSNorm does.

    A float32 copy on the CPU computes, because the module itself may have no memory yet.
    """
    if not hasattr(norm, "variance_epsilon") or [name for name, _ in norm.named_parameters()] != ["weight"]:
        return False
    if norm.weight.ndim != 1 or isinstance(norm, FusedRMSNorm):
        return False
    probe = copy.deepcopy(norm).to_empty(device="cpu").float()
    probe.weight.copy_(torch.linspace(0.5, 1.5, probe.weight.numel()))
    x = torch.linspace(-3.0, 2.0, 2 * probe.weight.numel()).view(2, -1)
    try:
        own = probe(x)
    except (RuntimeError, TypeError):
        return False
    ours, _ = rms_norm(x, probe.weight, norm.variance_epsilon)
    return own.shape == ours.shape and torch.allclose(own, ours, rtol=1e-5, atol=1e-5)
