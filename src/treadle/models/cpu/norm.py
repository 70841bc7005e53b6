"""RMSNorm with a backward pass of its own.

Hugging Face writes the norm as six operations, and autograd keeps and walks each; on a CPU that costs more than the
attention. `FusedRMSNorm` computes the same in float32 and keeps only its input and one number a token. A norm that is
replaced keeps its parameter, so names, checkpoints and sharding do not notice.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from treadle.compiled_formula import OnePass


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`x · weight / √(mean(x²) + eps)` over the last axis, float32 inside, rounded once; and what x is multiplied by, [..., 1]."""
    exact = x.to(_exact(x.dtype))
    length = torch.linalg.vector_norm(exact, dim=-1, keepdim=True)
    inverse = torch.rsqrt(length.square().div_(x.shape[-1]).add_(eps))
    return exact.mul(inverse).mul_(weight).to(x.dtype), inverse


def _exact(dtype: torch.dtype) -> torch.dtype:
    """What a norm is computed in: float32, or more."""
    return torch.promote_types(dtype, torch.float32)


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
    """Writes the gradient of x, adds to that of the weight; in the precision of `inverse`."""
    normed, exact = x * inverse, grad.to(inverse.dtype)
    product = exact * normed
    along = (product * weight).sum(-1, keepdim=True).div_(x.shape[-1])
    of_x.copy_((exact * weight).addcmul_(normed, along, value=-1).mul_(inverse))
    of_weight.add_(product.sum(0))


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        out, inverse = torch.empty_like(flat), flat.new_empty(len(flat), 1, dtype=_exact(x.dtype))
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
    """Replace every norm that computes what `FusedRMSNorm` does, and return how many there were.

    Which ones do is tried on random numbers, not read from a name: some architectures add 1 to the weight.
    """
    replaced = 0
    for parent in list(model.modules()):
        for name, norm in list(parent.named_children()):
            part: Any = norm
            if _is_rms_norm(part):
                setattr(parent, name, FusedRMSNorm(part.weight, part.variance_epsilon).train(part.training))
                replaced += 1
    return replaced


@torch.no_grad()
def _is_rms_norm(norm: Any) -> bool:
    """True where the module has one vector of weights and an epsilon, and normalises as RMSNorm does.

    Tried on a float32 copy on the CPU, for the module itself may have no memory yet.
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
