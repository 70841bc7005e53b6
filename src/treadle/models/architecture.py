"""Check that an architecture computes with Treadle what it computes by itself, before any weights are read.

The check runs a miniature of the model (miniature.py): a random model of the same config class with its features, small
enough to build and run in a fraction of a second. Windows, chunks and switches of rotary factors lie within a few tokens,
so one packed row exceeds all of them; the real model would need thousands of tokens. Short sequences lie beside long
ones and share prefixes, and the packed forward and backward pass are compared with transformers' own, of each sequence
alone. An inexact architecture is refused, whatever the cause: a window or a bias that is in the attention mask only,
tokens mixed outside of attention, positions that depend on the row, a lost gradient.

`treadle plan` runs the same check as loading. With the weights loaded, `check_forward` compares once more.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from treadle.errors import ModelError, first_line
from treadle.models.attention import ATTENTION_NAME, register_attention
from treadle.models.cpu import fuse
from treadle.models.forward import packed_logits
from treadle.models.layout import Family, PackedLayout
from treadle.models.miniature import VOCABULARY, miniature, miniature_model
from treadle.models.model_config import context_length

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

TOLERANCE = 1e-3
"""Largest relative error of a token's logits or of a gradient."""
LONGEST = 34


@dataclass(frozen=True, eq=False)
class Probe:
    """A miniature of an architecture twice, with the same weights: as transformers runs it, and as Treadle does."""

    own: PreTrainedModel
    ours: PreTrainedModel
    longest: int

    @property
    def name(self) -> str:
        return type(self.ours).__name__

    def freezes(self, name: str) -> bool:
        """Return True if the architecture does not train the weight `name`, in a model of any size."""
        return _kind_of(name) in {_kind_of(own) for own, p in self.own.named_parameters() if not p.requires_grad}

    def own_logits(self, tokens: Tensor) -> Tensor:
        """Run transformers' forward pass of one sequence [N] → [N, V]."""
        return self.own(input_ids=tokens[None], use_cache=False).logits[0].float()


def _kind_of(name: str) -> str:
    """Return the name of a weight without the numbers of layers."""
    return re.sub(r"\.\d+\.", ".*.", name)


_checked: dict[tuple[str, bool], Probe] = {}


def check_architecture(config: PretrainedConfig, *, fused: bool = True) -> Probe:
    """Compare Treadle's forward and backward pass with transformers' on a miniature; return it for further checks.

    Raises:
        ModelError: if they differ, or if the architecture can't be run on a packed row.
    """
    key = config.to_json_string(use_diff=False), fused
    if key not in _checked:
        _checked[key] = _check(config, fused=fused)
    return _checked[key]


def _check(config: PretrainedConfig, *, fused: bool) -> Probe:
    name = f"{type(config).__name__.removesuffix('Config')} ({config.model_type})"
    with _refusals(name, "a small model of this kind can't be built to check it"):
        probe = _probe(config, fused=fused)
        half = probe.longest // 2
        # A long sequence shares its prefix with a short one; two short ones lie beside it.
        layout = PackedLayout((Family(half, (3, probe.longest - half)), Family(0, (6,)), Family(9, ())))
        tokens = torch.arange(1, layout.num_tokens + 1) * 7919 % (VOCABULARY - 4) + 3
        parts = []
        for _, _, prefix, own in (run for run in layout.runs if run.tokens.stop > run.tokens.start):
            parts.append(probe.own_logits(torch.cat([tokens[prefix], tokens[own]]))[prefix.stop - prefix.start :])
        logits = torch.cat(parts)
        toward = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
        reference = _gradients(probe.own, (logits * toward).sum())
    with _refusals(name, "they can't run on a packed row"):
        ours = packed_logits(probe.ours, tokens, layout)
        gap = token_gap(ours, logits)
        if not gap <= TOLERANCE:
            raise ModelError(
                f"on a packed row a token's logits differ from the model's own by {gap:.2g} standard deviations; its masks, "
                "its positions or its layers depend on other tokens of the row in a way that Treadle does not know"
            )
        _check_gradients(_gradients(probe.ours, (ours * toward).sum()), reference)
    return probe


@torch.no_grad()
def token_gap(ours: Tensor, own: Tensor) -> float:
    """Return the largest mean distance of a token's logits [N, V], in standard deviations of a logit; NaN if any is NaN."""
    return float(((ours - own).abs().mean(-1) / own.std().clamp_min(1e-12)).max())


@contextlib.contextmanager
def _refusals(name: str, what: str) -> Iterator[None]:
    """Turn every error into a `ModelError` of one line that names the architecture; `what` is the default reason."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{name} models are not supported: {error}") from error
    except Exception as error:  # whatever a model's code does with arguments it does not know
        if isinstance(error, KeyError) and error.args == (ATTENTION_NAME,):
            why = "they do not take their attention from transformers' attention interface"
        else:
            why = f"{what} ({type(error).__name__}: {first_line(error)})"
        raise ModelError(f"{name} models are not supported: {why}") from error


def _probe(config: PretrainedConfig, *, fused: bool) -> Probe:
    small = miniature(config)
    own, ours = miniature_model(small, "eager"), miniature_model(small, register_attention())
    ours.load_state_dict(own.state_dict())
    for model in (own, ours):
        switch_dropout_off(model)
    if fused:
        fuse(ours)
    return Probe(own, ours, min(LONGEST, context_length(small)))


def switch_dropout_off(model: nn.Module) -> None:
    """Set every dropout to 0: that of modules, and rates that layers pass to a dropout function or skip a layer by."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and "drop" in name:
                setattr(module, name, 0.0)


def _gradients(model: PreTrainedModel, loss: Tensor) -> dict[str, Tensor]:
    """Return the gradients by name; 0 for a weight that the loss does not depend on."""
    names, parameters = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {name: torch.zeros(()) if grad is None else grad for name, grad in zip(names, found, strict=True)}


def _check_gradients(found: dict[str, Tensor], reference: dict[str, Tensor]) -> None:
    for name, own in reference.items():
        if bool(own.any()) and not bool(found[name].any()):
            raise ModelError(f"on a packed row the weight {name!r} gets no gradient")
    largest = max(float(own.abs().max()) for own in reference.values())
    for name, own in reference.items():
        if not float((found[name] - own).abs().max()) <= TOLERANCE * max(float(own.abs().max()), 1e-3 * largest):
            raise ModelError(f"on a packed row the weight {name!r} gets another gradient than in the model's own pass")
