"""Sample the next tokens from logits.

Tokens are sampled by inverse CDF with one uniform number for each row. Sums over blocks of the vocabulary find the block,
and a cumulative sum inside it finds the token. This reads the probabilities twice; `torch.multinomial` draws a random
number for every entry, which takes half of a decode step on CPU.

The uniform number is a hash of the sample's seed and the token's position. Equal logits therefore give a sample the same
tokens whatever else is in the batch, and there is no generator state to save.

A model with padded embeddings has logits for ids that are no token. They are never drawn but count in the logprobs of the
others, which are those of the model's whole distribution, as the trainer computes them.

Axis letters: `B` rows, `V` vocabulary, `U` ids without a token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from treadle.errors import EngineError
from treadle.models.cpu.decode_kernels import CpuKernels
from treadle.types import SamplingParams

BLOCK = 256
ROWS_AT_ONCE = 64
"""Rows sampled together on a CPU: intermediate results of more rows do not fit its caches, which triples the time."""


@dataclass(frozen=True)
class SamplingTensors:
    """The sampling settings of a batch of rows, as tensors [B]. `cuts` is True if any row leaves tokens out.

    The temperature of greedy rows is 1. `all_one`: no row needs its logits divided by a temperature.
    """

    temperature: Tensor
    greedy: Tensor
    top_p: Tensor
    top_k: Tensor
    min_p: Tensor
    any_greedy: bool
    all_one: bool
    cuts: bool

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device) -> SamplingTensors:
        def column(values: Iterable[float], dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor(list(values), dtype=dtype, device=device)

        return cls(
            temperature=column(p.temperature or 1.0 for p in params),
            greedy=column((p.temperature == 0 for p in params), torch.bool),
            top_p=column(p.top_p for p in params),
            top_k=column((p.top_k for p in params), torch.int64),
            min_p=column(p.min_p for p in params),
            any_greedy=any(p.temperature == 0 for p in params),
            all_one=all(p.temperature in (0, 1) for p in params),
            cuts=any(p.temperature > 0 and (p.top_p < 1 or p.top_k > 0 or p.min_p > 0) for p in params),
        )

    @property
    def cut(self) -> Tensor:
        """bool [B]: True for rows that leave tokens out."""
        return ((self.top_p < 1) | (self.top_k > 0) | (self.min_p > 0)) & ~self.greedy

    def part(self, rows: slice) -> SamplingTensors:
        """Return the settings of some of the rows."""
        names = ("temperature", "greedy", "top_p", "top_k", "min_p")
        return replace(self, **{name: getattr(self, name)[rows] for name in names})


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return numbers in [0, 1), float64 [B], which splitmix64 makes of seeds (uint64 [B]) and positions (int [B])."""
    with np.errstate(over="ignore"):
        x = seeds + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sample(
    logits: Tensor,
    settings: SamplingTensors,
    uniform: Tensor,
    kernels: CpuKernels | None = None,
    unused: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw one token for each row.

    Args:
        logits: [B, V]; overwritten at `unused`.
        settings: those of the rows.
        uniform: float64 [B] in [0, 1).
        kernels: compiled functions, used for their dtype if no row leaves tokens out.
        unused: int64 [U], the ids that are never drawn.
    Returns:
        tokens int64 [B], and their logprobs float32 [B] at the row's temperature (1 for greedy rows). For a row that leaves
        tokens out they are renormalised over the rest.
    Raises:
        EngineError: if the logits of a row are not finite; −inf at some tokens is allowed.
    """
    if unused is None:
        return _drawn(logits, settings, uniform, kernels)
    hidden = logits.index_select(1, unused)
    logits.index_fill_(1, unused, -torch.inf)
    tokens, logprobs = _drawn(logits, settings, uniform, kernels)
    scores = torch.cat([logits.gather(1, tokens[:, None]), hidden], dim=1).double() / settings.temperature[:, None]
    gap = torch.logsumexp(scores[:, 1:], dim=1) - (
        scores[:, 0] - logprobs
    )  # log of the unused ids' mass over that of the others
    whole = logprobs - torch.nn.functional.softplus(gap).to(logprobs.dtype)
    return tokens, torch.where(settings.cut, logprobs, whole)


def _drawn(
    logits: Tensor, settings: SamplingTensors, uniform: Tensor, kernels: CpuKernels | None
) -> tuple[Tensor, Tensor]:
    if kernels is not None and logits.dtype == kernels.dtype and not settings.cuts:
        tokens, logprobs, damaged = kernels.draw(logits.contiguous(), settings.temperature, settings.greedy, uniform)
        _refuse_damaged(damaged, len(logits))
        return tokens, logprobs
    if logits.device.type != "cpu" or len(logits) <= ROWS_AT_ONCE:
        return _sample(logits, settings, uniform)
    parts = [slice(start, start + ROWS_AT_ONCE) for start in range(0, len(logits), ROWS_AT_ONCE)]
    drawn = [_sample(logits[rows], settings.part(rows), uniform[rows]) for rows in parts]
    return torch.cat([tokens for tokens, _ in drawn]), torch.cat([logprobs for _, logprobs in drawn])


def _sample(logits: Tensor, settings: SamplingTensors, uniform: Tensor) -> tuple[Tensor, Tensor]:
    weights = logits.float() if logits.dtype != torch.float32 else logits.clone()
    best = weights.argmax(dim=-1) if settings.any_greedy else None
    if not settings.all_one:
        weights.div_(settings.temperature[:, None])
    weights.sub_(weights.amax(dim=-1, keepdim=True)).exp_()
    if settings.cuts:
        weights = _cut(weights, settings)
    tokens, total = _inverse_cdf(weights, uniform)
    if best is not None:
        tokens = torch.where(settings.greedy, best, tokens)
    picked = weights.gather(1, tokens[:, None])[:, 0]
    return tokens, (picked.double() / total).log().float()


def _cut(probs: Tensor, settings: SamplingTensors) -> Tensor:
    """Zero the probabilities [B, V] that min-p, top-k and top-p leave out, in this order, each applied to what is left.

    They need not sum to 1.
    """
    greedy = settings.greedy[:, None]
    floor = settings.min_p[:, None] * probs.max(dim=-1, keepdim=True).values
    kept = torch.where((probs < floor) & ~greedy, 0.0, probs)
    ordered, order = kept.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[1], device=probs.device)[None, :]
    drop = (settings.top_k[:, None] > 0) & (rank >= settings.top_k[:, None])
    ordered = torch.where(drop & ~greedy, 0.0, ordered)
    mass = ordered.sum(dim=-1, keepdim=True)
    before = ordered.cumsum(dim=-1) - ordered
    drop = (settings.top_p[:, None] < 1) & (before >= settings.top_p[:, None] * mass) & (rank > 0)
    ordered = torch.where(drop & ~greedy, 0.0, ordered)
    return torch.zeros_like(probs).scatter_(1, order, ordered)


def _inverse_cdf(probs: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first token whose cumulative sum passes uniform · total, int64 [B], and the total, float64 [B]."""
    rows, vocab = probs.shape
    pad = -vocab % BLOCK
    if pad:
        probs = torch.nn.functional.pad(probs, (0, pad))
    blocks = probs.view(rows, -1, BLOCK)
    sums = blocks.sum(dim=-1).double()
    running = sums.cumsum(dim=-1)
    finite = torch.isfinite(running[:, -1])
    _refuse_damaged(rows - int(finite.sum()), rows)
    target = uniform * running[:, -1]
    block = (running <= target[:, None]).sum(dim=-1).clamp_(max=sums.shape[1] - 1)
    block = _last_positive(sums, block)
    inside = blocks[torch.arange(rows, device=probs.device), block].double()
    rest = target - (running.gather(1, block[:, None]) - sums.gather(1, block[:, None]))[:, 0]
    offset = (inside.cumsum(dim=-1) <= rest[:, None]).sum(dim=-1).clamp_(max=BLOCK - 1)
    return block * BLOCK + _last_positive(inside, offset), running[:, -1]


def _refuse_damaged(damaged: int, rows: int) -> None:
    if damaged:
        raise EngineError(
            f"the logits of {damaged} of {rows} samples are not finite; the weights are damaged or the "
            "training diverged: lower --lr, or resume from an earlier checkpoint"
        )


def _last_positive(weights: Tensor, index: Tensor) -> Tensor:
    """Replace an index of a zero weight, which rounding can lead to, by the nearest positive one before it, or else after."""
    if bool((weights.gather(1, index[:, None]) > 0).all()):
        return index
    places = torch.arange(weights.shape[1], device=weights.device)[None, :]
    positive = weights > 0
    before = torch.where(positive & (places <= index[:, None]), places, -1).max(dim=-1).values
    after = torch.where(positive, places, weights.shape[1]).min(dim=-1).values
    return torch.where(before >= 0, before, after)
