"""A value model: the body of a causal language model, with one number for each position."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from treadle.errors import ModelError
from treadle.models.attention import AttentionPlan
from treadle.models.forward import embeddings_of, hidden_states
from treadle.models.load import check_finite
from treadle.models.trainable import FULL

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HEAD_FILE = "value_head.safetensors"


class ValueModel(nn.Module):
    """A causal language model whose hidden states are read by a linear head; the output layer is not used.

    The head is float32 and starts at zero, so a new critic predicts 0 everywhere.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model
        embeddings, output = embeddings_of(model), model.get_output_embeddings()
        if output is not None and output.weight is not embeddings:
            FULL.freeze(output, lambda _: True)  # it never gets a gradient: AdamW need not hold a state for it
        self.value_head = nn.Linear(embeddings.shape[1], 1, dtype=torch.float32, device=embeddings.device)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def values(self, token_ids: Tensor, position_ids: Tensor, plan: AttentionPlan, rows: Tensor) -> Tensor:
        """Return the values after the tokens at `rows` [K] of a packed row [N], float32 [K]."""
        hidden = hidden_states(self.model, token_ids, position_ids, plan)
        return self.value_head(hidden.index_select(0, rows).float()).squeeze(1)


def value_model_of(folder: Path) -> Callable[[PreTrainedModel], ValueModel]:
    """Return a function that makes value models with the head of a folder, if it has one and the model has memory."""

    def wrap(model: PreTrainedModel) -> ValueModel:
        value = ValueModel(model)
        if not value.value_head.weight.is_meta:
            load_value_head(value, folder)
        return value

    return wrap


def load_value_head(model: ValueModel, folder: Path) -> None:
    """Load the head saved in a critic's folder; without one the head stays new."""
    if (folder / HEAD_FILE).is_file():
        model.value_head.load_state_dict(read_value_head(model, folder))


def read_value_head(model: ValueModel, folder: Path) -> dict[str, Tensor]:
    """Return the head saved in a critic's folder; raise `ModelError` if it is missing or another model's."""
    file = folder / HEAD_FILE
    tensors = load_file(file) if file.is_file() else {}
    for name, param in model.value_head.named_parameters():
        if name not in tensors or tensors[name].shape != param.shape:
            raise ModelError(
                f"{str(file)!r} is not the value head of this model: {name!r} is missing or of another shape"
            )
    check_finite(str(file), tensors.items())
    return tensors


def save_value_head(tensors: dict[str, Tensor], folder: Path) -> None:
    """Write the head's weights (`weight` [1, D] and `bias` [1]) beside the model's files."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / HEAD_FILE)
