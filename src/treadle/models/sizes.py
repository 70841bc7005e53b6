"""The numbers of a model's config.json, checked before a module is built from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from treadle.errors import ModelError, first_line

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_LARGEST = {
    "num_hidden_layers": 1024,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 24,
    "vocab_size": 1 << 26,
    "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "head_dim": 1 << 16,
    "max_position_embeddings": 1 << 40,
}
"""Several times what the largest models have; a module of more would be built for minutes, or never."""

_MOST_LABELS = 1 << 20


def check_labels(folder: Path) -> None:
    """Raise `ModelError` if the config.json of a folder counts more labels than any model has.

    transformers makes a name for each label while it reads the file, so this looks at the file before.
    """
    try:
        found = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return  # the loader reports why it can't be read
    count = found.get("num_labels") if isinstance(found, dict) else None
    if isinstance(count, int) and count > _MOST_LABELS:
        raise ModelError(f"{str(folder)!r}: config.json has num_labels = {count}; it must be at most {_MOST_LABELS}")


def check_sizes(path: str, config: PretrainedConfig) -> None:
    """Raise `ModelError` if a size of the model at `path` is no integer, below 1, or more than any model has.

    A size that the architecture has not, or lists for each layer, is left to the architecture.
    """
    try:
        text_config = config.get_text_config()
        layer = text_config.per_layer_config[0] if text_config.is_heterogeneous else text_config
        sizes = {name: getattr(layer, name, None) for name in _LARGEST}
    except Exception as error:  # properties of architectures compute with what the file has
        raise ModelError(f"{path!r}: config.json does not describe a model: {first_line(error)}") from error
    for name, largest in _LARGEST.items():
        value = sizes[name]
        if value is None or isinstance(value, list | tuple):
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= largest:
            raise ModelError(f"{path!r}: config.json has {name} = {str(value)[:40]}; it must be from 1 to {largest}")


def build_on_meta(path: str, config: PretrainedConfig) -> PreTrainedModel:
    """Build the module of a config without memory for weights; raises `ModelError` for whatever its code raises."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:
        raise ModelError(f"can't build a causal language model from {path!r}: {first_line(error)}") from error
    return model
