"""Check that a model folder holds the weights its config.json describes: all of them, no others, and all finite."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from treadle.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

COMPUTED_NAMES = (".masked_bias", ".position_ids", "decoder.version")
"""Ends of names under which old files hold what a model computes by itself; they are no weights."""
MOST_NAMES = 3
"""Weights that a message names."""


def check_weights(path: str, model: PreTrainedModel, found: Mapping[str, Any]) -> None:
    """Check what transformers found while it loaded `model` from `path`.

    transformers draws missing weights at random and leaves out those that the model has no place for, such as the last
    layers of a model whose config.json has fewer. What an architecture says it does not need is not in `found`.

    Args:
        path: the folder or hub id, for messages.
        model: the loaded model.
        found: the loading info that `from_pretrained` gives.
    Raises:
        ModelError: if a weight is missing, has no place in the model, is of another shape, or is not finite.
    """
    for name, stored, wanted in sorted(found["mismatched_keys"])[:1]:
        raise ModelError(
            f"{path!r}: weight {name!r} has shape {tuple(stored)}, but its config.json asks for {tuple(wanted)} "
            f"({len(found['mismatched_keys'])} weights differ so); restore the config.json that belongs to the weights"
        )
    missing = found["missing_keys"]
    unexpected = [name for name in found["unexpected_keys"] if not name.endswith(COMPUTED_NAMES)]
    if missing:
        raise ModelError(
            f"{path!r} lacks {len(missing)} of the weights that its config.json describes ({_names(missing)}); restore "
            "the missing files, or the config.json that belongs to the weights"
        )
    if unexpected:
        raise ModelError(
            f"{path!r} holds {len(unexpected)} weights that its config.json has no place for ({_names(unexpected)}); "
            "restore the config.json that belongs to the weights, or remove them from the files"
        )
    stored = model.state_dict().keys()
    check_finite(path, [*model.named_parameters(), *(pair for pair in model.named_buffers() if pair[0] in stored)])


@torch.no_grad()
def check_finite(path: str, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Raise `ModelError` if a number in one of these named weights is NaN or infinite."""
    for name, weight in weights:
        # A sum reads a weight once and is finite only if every number is; a finite weight's sum may still overflow.
        if bool(torch.isfinite(weight.sum())):
            continue
        bad = int((~torch.isfinite(weight)).sum())
        if bad:
            kind = "NaN" if bool(torch.isnan(weight).any()) else "infinite"
            raise ModelError(
                f"{path!r}: {bad} of {weight.numel()} numbers in weight {name!r} are {kind}; the file is damaged or was "
                "saved after training diverged: use an earlier checkpoint or fetch the model again"
            )


def _names(keys: Collection[str]) -> str:
    named = sorted(keys)[:MOST_NAMES]
    return ", ".join([*map(repr, named), *(["…"] if len(keys) > len(named) else [])])
