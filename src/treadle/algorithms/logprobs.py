"""Logprobs and entropy of given tokens straight from hidden states, without ever holding N × V numbers.

The logits are computed tile by tile (some rows × some of the vocabulary), used while they are in cache, and dropped; the
backward pass computes them again. Memory beside the inputs and their gradients is a few tiles.

Axes: `N` rows (tokens to score), `D` hidden size, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict, Unpack

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from treadle.compiled_formula import OnePass

CPU_TILE = (2048, 1024)
"""Rows and vocabulary of a tile on a CPU, as measured. If all rows are in one tile, a weight's gradient needs no sum over tiles."""
GPU_TILE = (4096, 8192)
"""Rows and vocabulary of a tile on a GPU, where the number of kernel launches matters and 200 MB do not."""


class HeadKernel(Protocol):
    """The same computation in compiled calls, for logits that have neither a bias nor a soft cap.

    `known` is float32 [N, 2]: the factor on the scores `hidden @ weightᵀ`, and the target.
    """

    def fits(self, hidden: Tensor, weight: Tensor) -> bool:
        """Return whether it can compute with these: hidden [N, D] and weight [V, D]."""
        ...

    def sums(self, hidden: Tensor, weight: Tensor, known: Tensor) -> Tensor:
        """Return, for each row, the log of its sum, its target's logit and its mean logit: float32 [N, 3]."""
        ...

    def gradients(
        self, hidden: Tensor, weight: Tensor, known: Tensor, slopes: Tensor, asked: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of hidden and weight, those that are asked for.

        `slopes` is float32 [N, 5]: the log of the row's sum, then share, slope, offset and factor of `_RowGradients`.
        """
        ...


class LogprobOptions(TypedDict, total=False):
    """Optional keywords of `logprobs_and_entropy`."""

    kernel: HeadKernel | None  # computes if it fits
    bias: Tensor | None  # [V], added to the logits
    logit_scale: float  # factor on the logits (Cohere; 1 / logits_scaling for Granite)
    logit_softcap: float | None  # logits become cap · tanh(logits / cap) (Gemma 2), after the scale
    chunk_rows: int | None  # rows of a tile; None chooses by device
    chunk_vocab: int | None  # vocabulary of a tile; None chooses by device
    entropy_grad: bool  # False: the entropy is a plain number for the log, and its gradient costs nothing


def logprobs_and_entropy(
    hidden: Float[Tensor, "N D"],
    weight: Float[Tensor, "V D"],
    targets: Int64[Tensor, " N"],
    temperature: Float[Tensor, " N"] | float = 1.0,
    **options: Unpack[LogprobOptions],
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """Return the logprob of each target token and the entropy of the whole distribution it was drawn from.

    Both are of `softmax(logits / temperature)`, `logits = softcap(logit_scale · (hidden @ weightᵀ + bias))`. The matmuls run
    in the dtype of `hidden` (a weight of another dtype is converted tile by tile), the softmax in float32, or in float64 if
    `hidden` is. Gradients for `hidden`, `weight` and `bias` are exact for both outputs; sums over tiles are kept in float32.
    `temperature` gets no gradient.

    The entropy is always computed: a compiled loop without it would round the logprobs differently, and logprobs of two passes
    are compared.

    Args:
        hidden: float [N, D].
        weight: float [V, D].
        targets: int64 [N], in [0, V).
        temperature: above 0; one number, or float [N].
        options: see `LogprobOptions`.
    Returns:
        Logprobs and entropy, each [N].
    Same idea: Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models" (arXiv 2411.09009).

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
    inverse = (1.0 / torch.as_tensor(temperature)).to(device=hidden.device, dtype=stat_dtype).detach()
    inverse = inverse.expand(num_rows)
    logprobs, entropy = _TiledLogprobs.apply(hidden, weight, bias, targets, inverse, plan)
    return logprobs, entropy


@dataclass(frozen=True, slots=True)
class _Plan:
    kernel: HeadKernel | None = None
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    chunk_rows: int | None = None
    chunk_vocab: int | None = None
    entropy_grad: bool = True

    def kernel_for(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> HeadKernel | None:
        if self.kernel is None or bias is not None or self.logit_softcap is not None:
            return None
        return self.kernel if self.kernel.fits(hidden, weight) else None

    def tile_shape(self, hidden: Tensor, weight: Tensor) -> tuple[int, int]:
        rows, vocab = CPU_TILE if hidden.device.type == "cpu" else GPU_TILE
        rows = max(1, min(self.chunk_rows or rows, hidden.shape[0]))
        rows = -(-hidden.shape[0] // -(-hidden.shape[0] // rows)) if hidden.shape[0] else 1  # tiles of like size
        return rows, max(1, min(self.chunk_vocab or vocab, weight.shape[0]))


def _spans(total: int, size: int) -> Iterator[slice]:
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


def _scores(rows: Tensor, weight: Tensor, memory: Tensor) -> Tensor:
    """Return the scores of the head for one tile, in the dtype of the rows."""
    out = memory[: rows.shape[0] * weight.shape[0]].view(rows.shape[0], weight.shape[0])
    return torch.mm(rows, weight.t(), out=out)


def _logits(
    scores: Tensor, inverse_temperature: Tensor, bias: Tensor | None, plan: _Plan
) -> tuple[Tensor, Tensor | None]:
    """Return the logits of a tile in the softmax's dtype, and their slope if they have a soft cap."""
    logits = scores.to(inverse_temperature.dtype)
    if bias is not None:
        logits = logits + bias
    logits = logits * plan.logit_scale
    if plan.logit_softcap is None:
        return logits * inverse_temperature, None
    tanh = torch.tanh(logits / plan.logit_softcap)
    return tanh * plan.logit_softcap * inverse_temperature, 1 - tanh.square()


@OnePass
def _take_in(sums: Tensor, scores: Tensor, known: Tensor, columns: Tensor, bias: Tensor | None, plan: _Plan) -> None:
    """Add one more tile to the sums of rows.

    Args:
        sums: [N, 3]: the log of the sum, the target's logit and the mean logit.
        known: [N, 2]: the inverse temperature and the target, a float as the columns are, which a loop compares quickly.
    """
    (log_sum, target_logit, mean_logit), (inverse_temperature, target) = sums.split(1, 1), known.split(1, 1)
    logits, _ = _logits(scores, inverse_temperature, bias, plan)
    most = logits.amax(1, keepdim=True)
    shares = torch.exp(logits - most)
    total = shares.sum(1, keepdim=True)
    tile_log_sum = most + torch.log(total)
    joined = torch.logaddexp(log_sum, tile_log_sum)
    target_logit = target_logit + torch.where(columns == target, logits, 0.0).sum(1, keepdim=True)
    mean = (shares * logits).sum(1, keepdim=True) / total
    mean_logit = torch.lerp(mean_logit, mean, torch.exp(tile_log_sum - joined))
    sums.copy_(torch.cat([joined, target_logit, mean_logit], dim=1))


def _scaled(known: Tensor, plan: _Plan) -> Tensor:
    """Return what a kernel knows of rows, from the inverse temperature and the target [N, 2]."""
    return known * known.new_tensor([plan.logit_scale, 1.0])


def _sums(hidden: Tensor, weight: Tensor, bias: Tensor | None, known: Tensor, plan: _Plan) -> Tensor:
    """Return what `_take_in` finds in all tiles, [N, 3]; `known` holds the inverse temperature and the target [N, 2]."""
    tile = plan.tile_shape(hidden, weight)
    memory = hidden.new_empty(tile[0] * tile[1])
    sums = torch.zeros(len(hidden), 3, dtype=known.dtype, device=hidden.device)
    sums[:, 0] = -torch.inf
    for columns in _spans(weight.shape[0], tile[1]):
        tile_weight = weight[columns].to(hidden.dtype)
        numbers = torch.arange(columns.start, columns.stop, dtype=known.dtype, device=hidden.device)
        tile_bias = None if bias is None else bias[columns]
        for rows in _spans(hidden.shape[0], tile[0]):
            scores = _scores(hidden[rows], tile_weight, memory)
            _take_in(sums[rows], scores, known[rows], whole=(numbers, tile_bias, plan))
    return sums


class _TiledLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        inverse_temperature: Tensor,
        plan: _Plan,
    ) -> tuple[Tensor, Tensor]:
        known = torch.stack([inverse_temperature, targets.to(inverse_temperature.dtype)], dim=1)
        kernel = plan.kernel_for(hidden, weight, bias)
        if kernel is None:
            sums = _sums(hidden, weight, bias, known, plan)
        else:
            sums = kernel.sums(hidden, weight, _scaled(known, plan))
        log_sum, target_logit, mean_logit = sums.unbind(1)
        entropy = log_sum - mean_logit
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, known, log_sum, entropy)
        if not plan.entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return target_logit - log_sum, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, known, log_sum, entropy = ctx.saved_tensors
        if not ctx.plan.entropy_grad:
            grad_entropy = None
        if grad_logprobs is None and grad_entropy is None:
            return None, None, None, None, None, None
        share = torch.zeros_like(log_sum) if grad_logprobs is None else grad_logprobs
        if grad_entropy is None:  # the gradient of its logprob is then a factor of the whole row
            ones = torch.ones_like(log_sum)
            slopes, factor = (ones, torch.zeros_like(ones), ones), -share
        else:
            slopes = (share, grad_entropy, share + grad_entropy * entropy)
            factor = -torch.ones_like(log_sum)
        rows = torch.cat([known, torch.stack([log_sum, *slopes], dim=1)], dim=1)
        factor = (factor * known[:, 0] * ctx.plan.logit_scale).unsqueeze(1)
        asked = tuple(ctx.needs_input_grad[:3])
        kernel = ctx.plan.kernel_for(hidden, weight, bias)
        if kernel is not None:
            every = torch.cat([rows[:, 2:], factor], dim=1)
            found = kernel.gradients(hidden, weight, _scaled(known, ctx.plan), every, asked[:2])
            return *found, None, None, None, None
        return *_input_gradients(hidden, weight, bias, _RowGradients(rows, factor), ctx.plan, asked), None, None, None


@dataclass(frozen=True, slots=True)
class _RowGradients:
    """What the backward pass knows of every row: the six numbers that `_tile_gradient` reads [N, 6], and a factor [N, 1].

    With P = softmax and H the entropy: d logprob / d logits = onehot - P, and d H / d logits = -P (log P + H). So the gradient
    of a row is `factor` · (P (slope · log P + offset) - share · onehot).
    """

    known: Tensor
    factor: Tensor


@OnePass
def _tile_gradient(scores: Tensor, known: Tensor, columns: Tensor, bias: Tensor | None, plan: _Plan) -> None:
    """Replace the scores of a tile by the gradient with respect to them, up to a factor of the row."""
    inverse_temperature, target, log_sum, share, slope, offset = known.split(1, 1)
    logits, cap_slope = _logits(scores, inverse_temperature, bias, plan)
    log_probs = logits - log_sum
    gradient = torch.exp(log_probs) * (slope * log_probs + offset)
    gradient = gradient - torch.where(columns == target, share, 0.0)
    scores.copy_(gradient if cap_slope is None else gradient * cap_slope)


def _input_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, gradients: _RowGradients, plan: _Plan, asked: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    tile = plan.tile_shape(hidden, weight)
    known, factor = gradients.known, gradients.factor
    exact = known.dtype
    memory = hidden.new_empty(tile[0] * tile[1])
    scaled_hidden = (hidden * factor).to(hidden.dtype)
    sum_hidden = torch.zeros_like(hidden, dtype=exact) if asked[0] else None
    grad_weight = torch.empty_like(weight) if asked[1] else None
    grad_bias = torch.empty_like(bias) if asked[2] and bias is not None else None
    whole = tile[0] >= hidden.shape[0] > 0 and weight.dtype == hidden.dtype  # one tile of rows: nothing to add up
    for columns in _spans(weight.shape[0], tile[1]):
        tile_weight = weight[columns].to(hidden.dtype)
        numbers = torch.arange(columns.start, columns.stop, dtype=exact, device=hidden.device)
        tile_bias = None if bias is None else bias[columns]
        # A sum of its own only where the gradient's dtype is too coarse to add up in.
        sum_weight = None
        if grad_weight is not None and not whole:
            same = grad_weight.dtype == exact
            sum_weight = grad_weight[columns].zero_() if same else torch.zeros_like(tile_weight, dtype=exact)
        sum_bias = torch.zeros_like(tile_weight[:, 0], dtype=exact) if grad_bias is not None else None
        for rows in _spans(hidden.shape[0], tile[0]):
            scores = _scores(hidden[rows], tile_weight, memory)
            _tile_gradient(scores, known[rows], whole=(numbers, tile_bias, plan))
            if sum_bias is not None:
                sum_bias += (scores.t() @ factor[rows].to(scores.dtype)).squeeze(1)
            if sum_hidden is not None:
                _add_product(sum_hidden[rows], scores, tile_weight)
            if grad_weight is not None and whole:
                torch.mm(scores.t(), scaled_hidden, out=grad_weight[columns])
            elif sum_weight is not None:
                _add_product(sum_weight, scores.t(), scaled_hidden[rows])
        if grad_weight is not None and sum_weight is not None and grad_weight.dtype != exact:
            grad_weight[columns] = sum_weight
        if grad_bias is not None and sum_bias is not None:
            grad_bias[columns] = sum_bias
    grad_hidden = None
    if sum_hidden is not None:
        grad_hidden = sum_hidden.mul_(factor).to(hidden.dtype)
    return grad_hidden, grad_weight, grad_bias


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left @ right` to `total` in place, in the precision of `total`."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)
