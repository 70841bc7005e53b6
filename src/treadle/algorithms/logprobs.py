"""Logprobs and entropy of given tokens straight from hidden states, without ever holding N × V numbers.

The logits are made tile by tile (some rows × some of the vocabulary), used while they are in cache, and thrown
away; the backward pass makes them again. Memory beside the inputs and their gradients is a few tiles.

Axes: `N` rows (tokens to score), `D` hidden size, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

import torch
from jaxtyping import Float, Int64
from torch import Tensor

CPU_TILE = (2048, 1024)
"""Rows and vocabulary of a tile on a CPU, as measured: where all rows are in one tile, a weight's gradient needs no adding up."""
GPU_TILE = (4096, 8192)
"""The same on a GPU, where the number of kernel launches counts and 200 MB do not."""


class LogprobOptions(TypedDict, total=False):
    """What `logprobs_and_entropy` takes by keyword; all of it is optional."""

    bias: Tensor | None  # [V], added to the logits
    logit_scale: float  # factor on the logits (Cohere; 1 / logits_scaling for Granite)
    logit_softcap: float | None  # logits become cap · tanh(logits / cap) (Gemma 2), after the scale
    chunk_rows: int | None  # rows of a tile; None chooses by device
    chunk_vocab: int | None  # vocabulary of a tile; None chooses by device
    with_entropy: bool  # False: no entropy, None is returned in its place
    entropy_grad: bool  # False: the entropy is a plain number for the log, and its gradient costs nothing


def logprobs_and_entropy(
    hidden: Float[Tensor, "N D"],
    weight: Float[Tensor, "V D"],
    targets: Int64[Tensor, " N"],
    temperature: Float[Tensor, " N"] | float = 1.0,
    **options: Unpack[LogprobOptions],
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"] | None]:
    """Logprob of each target token and entropy of the whole distribution it was drawn from.

    Both are of `softmax(logits / temperature)`, `logits = softcap(logit_scale · (hidden @ weightᵀ + bias))`. The
    matmuls run in the dtype of `hidden` (a weight of another dtype is converted tile by tile), the softmax in
    float32, or in float64 where `hidden` is. Gradients go to `hidden`, `weight` and `bias` where they ask for one,
    exact for both outputs; sums over tiles are kept in float32. `temperature` gets no gradient.

    `targets` must lie in [0, V); a temperature must be above 0. For the options see `LogprobOptions`. Same idea:
    Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models" (cut cross-entropy), arXiv 2411.09009.

        >>> hidden, weight = torch.zeros(1, 3), torch.ones(4, 3)      # four equally likely tokens
        >>> logprobs, entropy = logprobs_and_entropy(hidden, weight, torch.tensor([2]))
        >>> round(logprobs.item(), 4), round(entropy.item(), 4)
        (-1.3863, 1.3863)
    """
    bias = options.pop("bias", None)
    plan = _Plan(**options)  # type: ignore[misc]  # a key it does not know is a TypeError that names it
    num_rows, vocab = hidden.shape[0], weight.shape[0]
    assert targets.shape == (num_rows,), f"targets have shape {tuple(targets.shape)}, hidden has {num_rows} rows"
    if num_rows:
        low, high = torch.stack(torch.aminmax(targets)).tolist()
        assert 0 <= low <= high < vocab, f"targets lie in [{low}, {high}], the vocabulary has {vocab} tokens"
    stat_dtype = torch.promote_types(hidden.dtype, torch.float32)
    inverse = None if isinstance(temperature, float | int) and temperature == 1 else 1.0 / torch.as_tensor(temperature)
    if inverse is not None:
        inverse = inverse.to(device=hidden.device, dtype=stat_dtype).expand(num_rows).detach()
    logprobs, entropy = _TiledLogprobs.apply(hidden, weight, bias, targets, inverse, plan)
    return logprobs, entropy


@dataclass(frozen=True, slots=True)
class _Plan:
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    chunk_rows: int | None = None
    chunk_vocab: int | None = None
    with_entropy: bool = True
    entropy_grad: bool = True

    def tile_shape(self, hidden: Tensor, weight: Tensor) -> tuple[int, int]:
        rows, vocab = CPU_TILE if hidden.device.type == "cpu" else GPU_TILE
        rows = max(1, min(self.chunk_rows or rows, hidden.shape[0]))
        rows = -(-hidden.shape[0] // -(-hidden.shape[0] // rows)) if hidden.shape[0] else 1  # tiles of like size
        return rows, max(1, min(self.chunk_vocab or vocab, weight.shape[0]))


def _spans(total: int, size: int) -> Iterator[slice]:
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


class _Scratch:
    """Buffers for one tile, made once and used again for every tile."""

    def __init__(self, hidden: Tensor, stat_dtype: torch.dtype, shape: tuple[int, int]):
        self._numel = shape[0] * shape[1]
        self._device = hidden.device
        self._dtypes = {"matmul": hidden.dtype}
        self._stat_dtype = stat_dtype
        self._buffers: dict[str, Tensor] = {}

    def get(self, name: str, rows: int, columns: int) -> Tensor:
        if name not in self._buffers:
            dtype = self._dtypes.get(name, self._stat_dtype)
            self._buffers[name] = torch.empty(self._numel, dtype=dtype, device=self._device)
        return self._buffers[name][: rows * columns].view(rows, columns)


def _logits_tile(rows: Tensor, weight: Tensor, bias: Tensor | None, plan: _Plan, scratch: _Scratch) -> Tensor:
    """Logits of one tile before the temperature, in the softmax's dtype; with a soft cap, `tanh` is in "tanh"."""
    shape = (rows.shape[0], weight.shape[0])
    logits = scratch.get("logits", *shape)
    if logits.dtype == rows.dtype:
        torch.mm(rows, weight.t(), out=logits)
    else:
        logits.copy_(torch.mm(rows, weight.t(), out=scratch.get("matmul", *shape)))
    if bias is not None:
        logits.add_(bias)
    if plan.logit_scale != 1.0:
        logits.mul_(plan.logit_scale)
    if plan.logit_softcap is not None:
        tanh = torch.div(logits, plan.logit_softcap, out=scratch.get("tanh", *shape)).tanh_()
        torch.mul(tanh, plan.logit_softcap, out=logits)
    return logits


def _local_targets(targets: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Column of each target inside a tile, and True where it lies in the tile at all."""
    local = targets - columns.start
    width = columns.stop - columns.start
    return local.clamp(0, width - 1).unsqueeze(1), (local >= 0) & (local < width)


class _TiledLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        inverse_temperature: Tensor | None,
        plan: _Plan,
    ) -> tuple[Tensor, Tensor | None]:
        stat_dtype = torch.promote_types(hidden.dtype, torch.float32)
        tile = plan.tile_shape(hidden, weight)
        scratch = _Scratch(hidden, stat_dtype, tile)
        log_sum = hidden.new_full((hidden.shape[0],), -torch.inf, dtype=stat_dtype)
        target_logit, mean_logit = torch.zeros_like(log_sum), torch.zeros_like(log_sum)
        for columns in _spans(weight.shape[0], tile[1]):
            tile_weight = weight[columns].to(hidden.dtype)
            tile_bias = None if bias is None else bias[columns]
            for rows in _spans(hidden.shape[0], tile[0]):
                logits = _logits_tile(hidden[rows], tile_weight, tile_bias, plan, scratch)
                if inverse_temperature is not None:
                    logits.mul_(inverse_temperature[rows].unsqueeze(1))
                local, inside = _local_targets(targets[rows], columns)
                target_logit[rows] += torch.where(inside, logits.gather(1, local).squeeze(1), 0.0)
                # The fused softmax is the quickest way to exp and sum; its largest entry is 1 / sum(exp(x - max)).
                probs = torch.softmax(logits, 1, out=scratch.get("probs", *logits.shape))
                tile_log_sum = logits.amax(1) - probs.amax(1).log()
                joined = torch.logaddexp(log_sum[rows], tile_log_sum)
                if plan.with_entropy:
                    share = (tile_log_sum - joined).exp()
                    mean_logit[rows] = torch.lerp(mean_logit[rows], probs.mul_(logits).sum(1), share)
                log_sum[rows] = joined
        entropy = log_sum - mean_logit if plan.with_entropy else None
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, targets, inverse_temperature, log_sum, entropy)
        if entropy is not None and not plan.entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return target_logit - log_sum, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, inverse_temperature, log_sum, entropy = ctx.saved_tensors
        if not ctx.plan.entropy_grad:
            grad_entropy = None
        if grad_logprobs is None and grad_entropy is None:
            return None, None, None, None, None, None
        zero = torch.zeros_like(log_sum)
        rows = _RowGradients(
            targets=targets,
            inverse_temperature=inverse_temperature,
            log_sum=log_sum,
            entropy=entropy,
            logprobs=zero if grad_logprobs is None else grad_logprobs,
            entropy_grad=grad_entropy,
        )
        wanted = tuple(ctx.needs_input_grad[:3])
        return *_input_gradients(hidden, weight, bias, rows, ctx.plan, wanted), None, None, None


@dataclass(frozen=True, slots=True)
class _RowGradients:
    """What the backward pass knows of every row; all [N]."""

    targets: Tensor
    inverse_temperature: Tensor | None
    log_sum: Tensor
    entropy: Tensor | None
    logprobs: Tensor  # gradient that reached the logprobs
    entropy_grad: Tensor | None  # gradient that reached the entropy

    def factor(self, scale: float) -> Tensor:
        """What a row of `_gradient_tile` is to be multiplied by; done on [N, D] instead of on every tile."""
        base = torch.full_like(self.log_sum, -scale) if self.entropy_grad is not None else -scale * self.logprobs
        return base if self.inverse_temperature is None else base * self.inverse_temperature


def _gradient_tile(
    logits: Tensor, gradients: _RowGradients, rows: slice, columns: slice, plan: _Plan, scratch: _Scratch
) -> Tensor:
    """Gradient with respect to the logits of one tile, up to the factor of its row; overwrites `logits`.

    With P = softmax and H the entropy: d logprob / d logits = onehot - P, and d H / d logits = -P (log P + H).
    """
    if gradients.inverse_temperature is not None:
        logits.mul_(gradients.inverse_temperature[rows].unsqueeze(1))
    log_probs = logits.sub_(gradients.log_sum[rows].unsqueeze(1))
    target_share = torch.ones_like(gradients.log_sum[rows])
    if gradients.entropy_grad is None:
        tile = log_probs.exp_()
    else:
        assert gradients.entropy is not None
        target_share, slope = gradients.logprobs[rows], gradients.entropy_grad[rows]
        offset = target_share + slope * gradients.entropy[rows]
        tile = torch.exp(log_probs, out=scratch.get("probs", *logits.shape))
        tile.mul_(log_probs.mul_(slope.unsqueeze(1)).add_(offset.unsqueeze(1)))
    local, inside = _local_targets(gradients.targets[rows], columns)
    tile.scatter_add_(1, local, torch.where(inside, -target_share, 0.0).unsqueeze(1))
    if plan.logit_softcap is not None:
        tanh = scratch.get("tanh", *logits.shape)
        tile.mul_(tanh.square_().neg_().add_(1.0))
    return tile


def _input_gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gradients: _RowGradients,
    plan: _Plan,
    wanted: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    tile = plan.tile_shape(hidden, weight)
    stat_dtype = gradients.log_sum.dtype
    scratch = _Scratch(hidden, stat_dtype, tile)
    factor = gradients.factor(plan.logit_scale)
    scaled_hidden = (hidden * factor.unsqueeze(1)).to(hidden.dtype) if wanted[1] else None
    sum_hidden = torch.zeros_like(hidden, dtype=stat_dtype) if wanted[0] else None
    grad_weight = torch.empty_like(weight) if wanted[1] else None
    grad_bias = torch.empty_like(bias) if wanted[2] and bias is not None else None
    whole = tile[0] >= hidden.shape[0] > 0 and weight.dtype == hidden.dtype  # then there is nothing to add up
    for columns in _spans(weight.shape[0], tile[1]):
        tile_weight = weight[columns].to(hidden.dtype)
        tile_bias = None if bias is None else bias[columns]
        # A sum of its own only where the gradient's dtype is too coarse to add up in.
        sum_weight = None
        if grad_weight is not None and not whole:
            same = grad_weight.dtype == stat_dtype
            sum_weight = grad_weight[columns].zero_() if same else torch.zeros_like(tile_weight, dtype=stat_dtype)
        sum_bias = torch.zeros_like(tile_weight[:, 0], dtype=stat_dtype) if grad_bias is not None else None
        for rows in _spans(hidden.shape[0], tile[0]):
            logits = _logits_tile(hidden[rows], tile_weight, tile_bias, plan, scratch)
            exact = _gradient_tile(logits, gradients, rows, columns, plan, scratch)
            if sum_bias is not None:
                sum_bias += exact.t() @ factor[rows]
            in_dtype = exact
            if exact.dtype != hidden.dtype:
                in_dtype = scratch.get("matmul", *exact.shape).copy_(exact)
            if sum_hidden is not None:
                _add_product(sum_hidden[rows], in_dtype, tile_weight)
            if grad_weight is not None and scaled_hidden is not None and whole:
                torch.mm(in_dtype.t(), scaled_hidden, out=grad_weight[columns])
            elif sum_weight is not None and scaled_hidden is not None:
                _add_product(sum_weight, in_dtype.t(), scaled_hidden[rows])
        if grad_weight is not None and sum_weight is not None and grad_weight.dtype != stat_dtype:
            grad_weight[columns] = sum_weight
        if grad_bias is not None and sum_bias is not None:
            grad_bias[columns] = sum_bias
    grad_hidden = None
    if sum_hidden is not None:
        grad_hidden = sum_hidden.mul_(factor.unsqueeze(1)).to(hidden.dtype)
    return grad_hidden, grad_weight, grad_bias


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left @ right` to `total` in place, in the precision of `total`."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)
