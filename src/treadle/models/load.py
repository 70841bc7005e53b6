"""Load a causal language model from a Hugging Face folder, and write one."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from treadle.errors import ModelError, first_line
from treadle.hub import work_offline_if_cut_off
from treadle.models.architecture import Probe, check_architecture, switch_dropout_off
from treadle.models.attention import register_attention
from treadle.models.cpu import fuse
from treadle.models.forward import check_forward
from treadle.models.sizes import check_labels, check_sizes
from treadle.models.trainable import FULL
from treadle.models.weight_checks import check_weights
from treadle.storage.regular_file import NOT_REGULAR, irregular_files, read_regular

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FORWARD_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}


def pick_device(device: str) -> torch.device:
    """`auto` is the GPU where there is one; a GPU that is asked for and missing is refused."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ModelError("--device cuda: torch sees no GPU here; use --device cpu or install a CUDA build of torch")
    return torch.device(device)


def compute_dtype(dtype: str, device: str) -> torch.dtype:
    """The dtype of forward and backward; `auto` is bfloat16 where it is clearly faster than float32 here.

    On a GPU that is a hardware fact; on a CPU a matmul of each kind is timed once (about 20 ms).
    """
    if dtype != "auto":
        return DTYPES[dtype]
    where = pick_device(device)
    if where.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    return torch.bfloat16 if _matmul_seconds(torch.float32) > 1.3 * _matmul_seconds(torch.bfloat16) else torch.float32


def name_of(dtype: torch.dtype) -> str:
    """The name a configuration has for a compute dtype."""
    return next(name for name, known in DTYPES.items() if known == dtype)


def _matmul_seconds(dtype: torch.dtype) -> float:
    a, b = torch.ones(256, 512, dtype=dtype), torch.ones(512, 1024, dtype=dtype)
    torch.mm(a, b)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - start)
    return best


def is_model_folder(path: Path) -> bool:
    """True where a config.json says what model this is; a run's and a checkpoint's own config.json do not."""
    file = path / "config.json"
    try:
        found = json.loads(read_regular(file))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and "model_type" in found


def load_config(path: str) -> PretrainedConfig:
    """Read a model's config.json; raises `ModelError` with the path if it can't be read or its sizes are no model's.

    transformers' own reports are switched off here, where every model begins: what matters in them is an error or a
    warning of ours.
    """
    from transformers import AutoConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()

    if not Path(path).exists() and path.startswith(("/", "./", "../", "~")):  # else it may be a hub id
        raise ModelError(f"no model at {path!r}: no such folder")
    if Path(path).is_dir() and not (Path(path) / "config.json").is_file():
        raise ModelError(f"{path!r} is not a model folder: it has no config.json")
    for file in irregular_files(Path(path)):
        raise ModelError(f"{path!r} is not a model folder: {file.name} is {NOT_REGULAR}")
    work_offline_if_cut_off(path)
    check_labels(Path(path))
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # hub, JSON and validation errors alike
        raise ModelError(f"no model at {path!r}: {first_line(error)}") from error
    check_sizes(path, config)
    _forget_default_ends(path, config)
    return config


def _forget_default_ends(path: str, config: PretrainedConfig) -> None:
    """Remove the end-of-sequence id that the config has from its class only, lest a saved model ends with it."""
    named, _ = type(config).get_config_dict(path, local_files_only=True)  # the hub has just been asked
    for part, given in ((config, named), (config.get_text_config(), named.get("text_config", named))):
        if "eos_token_id" not in given and getattr(part, "eos_token_id", None) is not None:
            part.eos_token_id = None


def check_loadable(path: str, config: PretrainedConfig, *, fused: bool = True) -> Probe:
    """Check the architecture of the model at `path` without its weights; return what `check_architecture` does.

    Raises:
        ModelError: if it is not a causal language model, or not a supported one.
    """
    from transformers import AutoModelForCausalLM

    if type(config) not in AutoModelForCausalLM._model_mapping:
        kind = type(config).__name__.removesuffix("Config")
        raise ModelError(f"can't load a causal language model from {path!r}: {kind} ({config.model_type}) is none")
    try:
        return check_architecture(config, fused=fused)
    except ModelError as error:
        raise ModelError(f"{path!r}: {error}") from error


def load_model(
    path: str, dtype: torch.dtype, device: torch.device, *, trainable: bool = True, fused: bool = True
) -> PreTrainedModel:
    """Load a model with Treadle's attention and check that packing is exact for it.

    Weights are in `dtype`; dropout is switched off, since the policy that is trained must be the one that
    generates. `fused` replaces norms (`models/cpu/norm.py`), attention's projections and the MLP (`models/cpu/fused_layers.py`) by ours.
    Raises `ModelError` for a folder that is not a causal language model or an architecture that can't be packed.
    """
    probe = check_loadable(path, load_config(path), fused=fused)
    model = read_model(path, dtype, attn_implementation=register_attention())
    module: torch.nn.Module = model
    module.to(device)
    FULL.freeze(model, lambda name: not trainable or probe.freezes(name))  # reading weights forgets what was frozen
    model.eval()
    switch_dropout_off(model)
    if fused:
        fuse(model)
    check_forward(model, FORWARD_TOLERANCE[dtype])
    return model


def read_model(path: str, dtype: torch.dtype, **options: Any) -> PreTrainedModel:
    """Read a model folder as transformers does, with `options` for it; raises `ModelError` unless every weight fits."""
    from transformers import AutoModelForCausalLM

    config = load_config(path)
    try:
        read: Any = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # check_weights names them
            trust_remote_code=False,
            **options,
        )
    except Exception as error:
        raise ModelError(f"can't load a causal language model from {path!r}: {first_line(error)}") from error
    model: PreTrainedModel
    model, found = read
    check_weights(path, model, found)
    return model


def empty_model(path: str, dtype: torch.dtype, *, trainable: bool = True, fused: bool = True) -> PreTrainedModel:
    """The model of a folder with Treadle's attention and without memory: its weights are on the `meta` device."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    config = load_config(path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=register_attention(), trust_remote_code=False
        )
    model.tie_weights()
    with suppress(OSError):  # it has no generation_config.json
        model.generation_config = GenerationConfig.from_pretrained(path)
    FULL.freeze(model, lambda name: not trainable)  # what the architecture itself freezes stays frozen
    model.eval()
    switch_dropout_off(model)
    if fused:
        fuse(model)
    return model


def renames_weights(model: PreTrainedModel, names: list[str]) -> bool:
    """True where transformers stores these weights of the model under other names, or in other pieces."""
    from transformers.core_model_loading import revert_weight_conversion

    shapes = {name: p.shape for name, p in model.named_parameters()}
    as_stored = revert_weight_conversion(model, {name: torch.empty(shapes[name], device="meta") for name in names})
    return set(as_stored) != set(names)


def load_parameters(folder: Path) -> dict[str, torch.Tensor]:
    """The parameters of a model folder by the names the module has for them, float32 on the CPU.

    Files may name weights otherwise (fused experts, say): transformers knows how, so it reads them.
    """
    model = read_model(str(folder), torch.float32)
    return {name: p.detach() for name, p in model.named_parameters()}


def save_model(model: PreTrainedModel, state: dict[str, torch.Tensor], folder: Path) -> None:
    """Write a model folder (config, generation config, safetensors) with the weights in `state`.

    Tied weights are written once; what is not trained is written as it is. The folder loads with
    `AutoModelForCausalLM.from_pretrained`.
    """
    save_pretrained(model, folder, state_dict={**FULL.untrained(model), **state})
    dtypes = {t.dtype for t in state.values() if t.is_floating_point()}
    if len(dtypes) == 1:
        _write_dtype(folder, dtypes.pop())


def save_pretrained(model: PreTrainedModel, folder: Path, **options: Any) -> None:
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


def write_model_config(model: PreTrainedModel, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write what a model folder has beside its weights, which are in `dtype`."""
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    _write_generation_config(model, folder)
    _write_dtype(folder, dtype)


def _write_generation_config(model: PreTrainedModel, folder: Path) -> None:
    if model.generation_config is not None:
        model.generation_config.to_json_file(folder / "generation_config.json", keys_to_pop=["compile_config"])


def _write_dtype(folder: Path, dtype: torch.dtype) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def kv_heads_of(hf_config: PretrainedConfig) -> tuple[int, int]:
    """How many key/value heads a layer has, and their size; of layers that differ, the largest of both."""
    layers = hf_config.per_layer_config if getattr(hf_config, "is_heterogeneous", False) else [hf_config]
    heads = max(getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads for layer in layers)
    sizes = [getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads for layer in layers]
    return int(heads), int(max(sizes))


def embedding_rows(config: PretrainedConfig) -> int | None:
    """Return how many ids a model has embeddings for; None if its config does not say."""
    text = config.get_text_config()
    return int(text.vocab_size) if hasattr(text, "vocab_size") else None
