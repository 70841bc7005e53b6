"""Write a model folder, whole or not at all, and describe one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from treadle.errors import ConfigError, ModelError, first_line
from treadle.models.load import DTYPES, build_on_meta, name_of, read_model
from treadle.models.model_config import context_length, load_config
from treadle.models.trainable import FULL
from treadle.storage.new_folder import new_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def save_model(model: PreTrainedModel, state: dict[str, torch.Tensor], folder: Path) -> None:
    """Write a model folder (config, generation config, safetensors) with the weights in `state`.

    Tied weights are written once; what is not trained is written as it is. The folder loads with
    `AutoModelForCausalLM.from_pretrained`.
    """
    _save_pretrained(model, folder, state_dict={**FULL.untrained(model), **state})
    dtypes = {t.dtype for t in state.values() if t.is_floating_point()}
    if len(dtypes) == 1:
        _write_dtype(folder, dtypes.pop())


def write_model_config(model: PreTrainedModel, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write what a model folder has beside its weights, which are in `dtype`."""
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    _write_generation_config(model, folder)
    _write_dtype(folder, dtype)


def export_model(source: Path, out: Path, dtype: str) -> Path:
    """Write a model folder to `out` in `dtype`, tokenizer included, for `AutoModelForCausalLM.from_pretrained(out)`.

    Raises:
        ConfigError: if the dtype is unknown, or `out` is not empty or can't be written.
        ModelError: if `source` is not a whole model; nothing is left behind then.
    """
    from transformers import AutoTokenizer

    if dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype!r} is unknown; choose {' or '.join(DTYPES)}")
    if not (source / "config.json").is_file():
        raise ModelError(f"no model in {str(source)!r}: it has no config.json")
    with new_folder(out) as work:
        model = read_model(str(source), DTYPES[dtype])
        try:
            _save_pretrained(model, work)
            AutoTokenizer.from_pretrained(source, trust_remote_code=False).save_pretrained(work)
        except Exception as error:  # the loaders raise many kinds for the same cause
            raise ModelError(f"can't export {str(source)!r} to {str(out)!r}: {first_line(error)}") from error
    return out


def model_info(folder: str) -> str:
    """Describe a model in a few lines: architecture, parameters, layers, vocabulary, context."""
    config = load_config(folder)
    model, sizes = build_on_meta(folder, config), config.get_text_config()
    facts = {
        "path": folder,
        "class": type(model).__name__,
        "parameters": f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M",
        "layers": sizes.num_hidden_layers,
        "hidden size": sizes.hidden_size,
        "vocabulary": sizes.vocab_size,
        "context": f"{context_length(sizes)} tokens",
    }
    return "\n".join(f"{name:<12}{fact}" for name, fact in facts.items())


def _save_pretrained(model: PreTrainedModel, folder: Path, **options: Any) -> None:
    """Write a model folder as transformers does, the generation config as it is.

    transformers loads a generation config that it refuses to save, such as one with a temperature and no `do_sample`.
    """
    from transformers import GenerationConfig

    own = model.generation_config
    model.generation_config = None if own is None else GenerationConfig()
    try:
        model.save_pretrained(folder, **options)
    finally:
        model.generation_config = own
    _write_generation_config(model, folder)


def _write_generation_config(model: PreTrainedModel, folder: Path) -> None:
    if model.generation_config is not None:
        model.generation_config.to_json_file(folder / "generation_config.json", keys_to_pop=["compile_config"])


def _write_dtype(folder: Path, dtype: torch.dtype) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = name_of(dtype)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
