"""Turn a checkpoint's model into a folder for others, and say what a model folder holds."""

from __future__ import annotations

from pathlib import Path

from treadle.errors import ConfigError, ModelError, first_line
from treadle.models.bundled import resolve
from treadle.models.context import context_length
from treadle.models.load import DTYPES, load_config, read_model, save_pretrained
from treadle.models.new_folder import new_folder
from treadle.models.sizes import build_on_meta


def export_model(source: Path, out: Path, dtype: str) -> Path:
    """Write a model folder to `out` in `dtype`, tokenizer included.

    The result loads with `AutoModelForCausalLM.from_pretrained(out)`. Raises `ConfigError` for an unknown dtype or an
    `out` that can't be written or is not empty, `ModelError` if there is no whole model; nothing is left behind then.
    """
    from transformers import AutoTokenizer

    if dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype!r} is unknown; choose {' or '.join(DTYPES)}")
    if not (source / "config.json").is_file():
        raise ModelError(f"no model in {str(source)!r}: it has no config.json")
    with new_folder(out) as work:
        model = read_model(str(source), DTYPES[dtype])
        try:
            save_pretrained(model, work)
            AutoTokenizer.from_pretrained(source, trust_remote_code=False).save_pretrained(work)
        except Exception as error:  # the loaders raise many kinds for the same cause
            raise ModelError(f"can't export {str(source)!r} to {str(out)!r}: {first_line(error)}") from error
    return out


def model_info(path: str) -> str:
    """A few lines about a model: architecture, parameters, layers, vocabulary, context."""
    folder = resolve(path)
    config = load_config(folder)
    model, sizes = build_on_meta(folder, config), config.get_text_config()
    parameters = sum(p.numel() for p in model.parameters())
    return "\n".join(
        [
            f"path        {folder}",
            f"class       {type(model).__name__}",
            f"parameters  {parameters / 1e6:.1f} M",
            f"layers      {sizes.num_hidden_layers}",
            f"hidden size {sizes.hidden_size}",
            f"vocabulary  {sizes.vocab_size}",
            f"context     {context_length(sizes)} tokens",
        ]
    )
