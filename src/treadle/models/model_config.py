"""A model's config.json: read and checked before a module is built from it, and what Treadle derives from it.

With some rotary positions (longrope, dynamic) the factors of all tokens switch with the length of the sequence. transformers
takes that length from the largest position of the whole row, and a sample that grows past the switch gets other numbers for
the tokens it has already. Neither a packed row nor generation token by token can then equal the model's own forward pass of
the whole sample. Up to the switch all of them are exact, so that is where such a model's context ends.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.errors import ModelError, first_line
from treadle.hub import work_offline_if_cut_off
from treadle.storage.regular_file import NOT_REGULAR, irregular_files, read_regular

if TYPE_CHECKING:
    from transformers import PretrainedConfig

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
"""Several times the largest known models: a module with larger sizes takes minutes to build, or can't be built."""
_MOST_LABELS = 1 << 20
_SWITCHES = {"longrope": "original_max_position_embeddings", "dynamic": "max_position_embeddings"}
"""The setting of a config after which the factors of a type of rotary positions switch."""


def is_model_folder(path: Path) -> bool:
    """Return True if a config.json says what model this is; a run's and a checkpoint's own config.json do not."""
    return "model_type" in _read_json(path)


def load_config(path: str) -> PretrainedConfig:
    """Read a model's config.json, and switch transformers' own reports off: Treadle's errors and warnings replace them.

    Raises:
        ModelError: if there is none, it can't be read, or its sizes are no model's.
    """
    from transformers import AutoConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()

    folder = Path(path)
    if not folder.exists() and path.startswith(("/", "./", "../", "~")):  # else it may be a hub id
        raise ModelError(f"no model at {path!r}: no such folder")
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ModelError(f"{path!r} is not a model folder: it has no config.json")
    for file in irregular_files(folder):
        raise ModelError(f"{path!r} is not a model folder: {file.name} is {NOT_REGULAR}")
    work_offline_if_cut_off(path)
    labels = _read_json(folder).get("num_labels")  # transformers makes a name for each while it reads the file
    if isinstance(labels, int) and labels > _MOST_LABELS:
        raise ModelError(f"{path!r}: config.json has num_labels = {labels}; it must be at most {_MOST_LABELS}")
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # hub, JSON and validation errors alike
        raise ModelError(f"no model at {path!r}: {first_line(error)}") from error
    _check_sizes(path, config)
    # An end-of-sequence id that comes from the class only is removed, or a saved model would end with it.
    named, _ = type(config).get_config_dict(path, local_files_only=True)  # the hub has just been asked
    for part, given in ((config, named), (config.get_text_config(), named.get("text_config", named))):
        if "eos_token_id" not in given and getattr(part, "eos_token_id", None) is not None:
            part.eos_token_id = None
    return config


def _read_json(folder: Path) -> dict[str, Any]:
    """Return what config.json holds; nothing if it can't be read, which the loader reports."""
    try:
        found = json.loads(read_regular(folder / "config.json"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _check_sizes(path: str, config: PretrainedConfig) -> None:
    """Raise `ModelError` if a size of the model at `path` is no integer, below 1, or more than any model has.

    A size that the architecture has not, or lists for each layer, is left to the architecture.
    """
    try:
        text_config = config.get_text_config()
        layer = text_config.per_layer_config[0] if text_config.is_heterogeneous else text_config
        sizes = {name: getattr(layer, name, None) for name in _LARGEST}
    except Exception as error:  # properties of architectures compute with the file's values
        raise ModelError(f"{path!r}: config.json does not describe a model: {first_line(error)}") from error
    for name, value in sizes.items():
        if value is None or isinstance(value, list | tuple):
            continue
        if type(value) is not int or not 1 <= value <= _LARGEST[name]:
            raise ModelError(
                f"{path!r}: config.json has {name} = {str(value)[:40]}; it must be from 1 to {_LARGEST[name]}"
            )


def kv_heads_of(hf_config: PretrainedConfig) -> tuple[int, int]:
    """Return the number of key/value heads of a layer, and their size; the largest of both if layers differ."""
    layers = hf_config.per_layer_config if getattr(hf_config, "is_heterogeneous", False) else [hf_config]
    heads = max(getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads for layer in layers)
    sizes = [getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads for layer in layers]
    return int(heads), int(max(sizes))


def embedding_rows(config: PretrainedConfig) -> int | None:
    """Return the number of ids that a model has embeddings for; None if its config does not say."""
    text = config.get_text_config()
    return int(text.vocab_size) if hasattr(text, "vocab_size") else None


def context_length(config: PretrainedConfig) -> int:
    """Return the longest sequence that the model's positions allow and that Treadle computes exactly, in tokens."""
    text = config.get_text_config()
    limits = [length for length, _ in _switches(text)]
    if getattr(text, "max_position_embeddings", None):
        limits.append(text.max_position_embeddings)
    return int(min(limits, default=1 << 30))


def context_note(config: PretrainedConfig) -> str:
    """Return why the context ends where it does, in brackets after a space; empty if positions don't switch."""
    for length, kind in sorted(_switches(config.get_text_config()))[:1]:
        return f" (its {kind} positions switch beyond {_SWITCHES[kind]} = {length})"
    return ""


def check_length(config: PretrainedConfig, longest: int) -> None:
    """Raise `ModelError` for a sequence of `longest` tokens if the model's positions switch within it."""
    if _switches(config.get_text_config()) and longest > context_length(config):
        raise ModelError(
            f"a sample of {longest} tokens is longer than the model's context of {context_length(config)}"
            f"{context_note(config)}; lower --rollout-max-prompt-len or --rollout-max-response-len"
        )


def _switches(text: PretrainedConfig) -> list[tuple[int, str]]:
    """Return, for each kind of rotary positions that switches, the longest sequence before it does, and its type."""
    found = getattr(text, "rope_parameters", None) or {}
    switches = []
    for part in [part for part in found.values() if isinstance(part, dict)] or [found]:
        kind = part.get("rope_type", part.get("type"))
        if kind in _SWITCHES:
            length = part.get(_SWITCHES[kind]) or getattr(text, _SWITCHES[kind], None)
            switches += [(int(length), kind)] if length else []
    return switches
