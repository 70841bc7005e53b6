"""Load a causal language model from a Hugging Face folder, and check the weights that were read."""

from __future__ import annotations

import timeit
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from treadle.errors import ModelError, first_line
from treadle.models.architecture import Probe, check_architecture, switch_dropout_off
from treadle.models.attention import register_attention
from treadle.models.cpu import fuse
from treadle.models.forward import check_forward
from treadle.models.model_config import load_config
from treadle.models.trainable import FULL

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FORWARD_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}
_COMPUTED_NAMES = (".masked_bias", ".position_ids", "decoder.version")
"""Ends of names under which old files hold what a model computes by itself; they are no weights."""
_MOST_NAMES = 3
"""Weights that a message names."""


def pick_device(device: str) -> torch.device:
    """Return a device by name; `auto` is the GPU if there is one. Raises `ModelError` for a GPU that is missing."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ModelError("--device cuda: torch sees no GPU here; use --device cpu or install a CUDA build of torch")
    return torch.device(device)


def compute_dtype(dtype: str, device: str) -> torch.dtype:
    """Return the dtype of forward and backward; `auto` is bfloat16 if it is clearly faster than float32 here.

    On a GPU that is a hardware fact; on a CPU a matmul of each kind is timed once (about 20 ms).
    """
    if dtype != "auto":
        return DTYPES[dtype]
    if pick_device(device).type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    return torch.bfloat16 if _matmul_seconds(torch.float32) > 1.3 * _matmul_seconds(torch.bfloat16) else torch.float32


def name_of(dtype: torch.dtype) -> str:
    """Return the name that configurations have for a dtype."""
    return str(dtype).removeprefix("torch.")


def _matmul_seconds(dtype: torch.dtype) -> float:
    a, b = torch.ones(256, 512, dtype=dtype), torch.ones(512, 1024, dtype=dtype)
    torch.mm(a, b)
    return min(timeit.repeat(lambda: torch.mm(a, b), number=1, repeat=5))


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

    Weights are in `dtype`. Dropout is switched off, because the policy that is trained must be the one that generates.
    `fused` replaces modules by the fused ones of `models/cpu`.

    Raises:
        ModelError: if the folder is not a causal language model, or its architecture can't be packed.
    """
    probe = check_loadable(path, load_config(path), fused=fused)
    model = read_model(path, dtype, attn_implementation=register_attention())
    module: nn.Module = model
    module.to(device)
    # Reading weights forgets what the architecture freezes.
    _prepare(model, lambda name: not trainable or probe.freezes(name), fused=fused)
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
            ignore_mismatched_sizes=True,  # _check_weights names them
            trust_remote_code=False,
            **options,
        )
    except Exception as error:
        raise ModelError(f"can't load a causal language model from {path!r}: {first_line(error)}") from error
    model: PreTrainedModel
    model, found = read
    _check_weights(path, model, found)
    return model


def build_on_meta(path: str, config: PretrainedConfig, **options: Any) -> PreTrainedModel:
    """Build the module of a config without memory for weights; raises `ModelError` for whatever its code raises."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=False, **options)
    except Exception as error:
        raise ModelError(f"can't build a causal language model from {path!r}: {first_line(error)}") from error
    return model


def empty_model(path: str, dtype: torch.dtype, *, trainable: bool = True, fused: bool = True) -> PreTrainedModel:
    """Return the model of a folder with Treadle's attention and without memory: its weights are on the `meta` device."""
    from transformers import GenerationConfig

    model = build_on_meta(path, load_config(path), dtype=dtype, attn_implementation=register_attention())
    model.tie_weights()
    with suppress(OSError):  # it has no generation_config.json
        model.generation_config = GenerationConfig.from_pretrained(path)
    _prepare(model, lambda _: not trainable, fused=fused)  # what the architecture itself freezes stays frozen
    return model


def _prepare(model: PreTrainedModel, is_frozen: Callable[[str], bool], *, fused: bool) -> None:
    FULL.freeze(model, is_frozen)
    model.eval()
    switch_dropout_off(model)
    if fused:
        fuse(model)


def renames_weights(model: PreTrainedModel, names: list[str]) -> bool:
    """Return True if transformers stores these weights of the model under other names, or in other pieces."""
    from transformers.core_model_loading import revert_weight_conversion

    shapes = {name: p.shape for name, p in model.named_parameters()}
    as_stored = revert_weight_conversion(model, {name: torch.empty(shapes[name], device="meta") for name in names})
    return set(as_stored) != set(names)


def load_parameters(folder: Path) -> dict[str, Tensor]:
    """Return the parameters of a model folder by the names the module has for them, float32 on the CPU.

    Files may name weights otherwise (fused experts, say): transformers knows how, so it reads them.
    """
    return {name: p.detach() for name, p in read_model(str(folder), torch.float32).named_parameters()}


def _check_weights(path: str, model: PreTrainedModel, found: Mapping[str, Any]) -> None:
    """Check what transformers found while it loaded `model` from `path`.

    transformers draws missing weights at random and leaves out those that the model has no place for, such as the last
    layers of a model whose config.json has fewer. What an architecture says it does not need is not in `found`.

    Raises:
        ModelError: if a weight is missing, has no place in the model, is of another shape, or is not finite.
    """
    for name, stored, wanted in sorted(found["mismatched_keys"])[:1]:
        raise ModelError(
            f"{path!r}: weight {name!r} has shape {tuple(stored)}, but its config.json asks for {tuple(wanted)} "
            f"({len(found['mismatched_keys'])} weights differ so); restore the config.json that belongs to the weights"
        )
    missing = found["missing_keys"]
    unexpected = [name for name in found["unexpected_keys"] if not name.endswith(_COMPUTED_NAMES)]
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
    kept = model.state_dict().keys()
    check_finite(path, [*model.named_parameters(), *(pair for pair in model.named_buffers() if pair[0] in kept)])


@torch.no_grad()
def check_finite(path: str, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Raise `ModelError` if a number in one of these named weights is NaN or infinite."""
    for name, weight in weights:
        # A sum reads a weight once and is finite only if every number is; a finite weight's sum may still overflow.
        bad = 0 if bool(torch.isfinite(weight.sum())) else int((~torch.isfinite(weight)).sum())
        if bad:
            kind = "NaN" if bool(torch.isnan(weight).any()) else "infinite"
            raise ModelError(
                f"{path!r}: {bad} of {weight.numel()} numbers in weight {name!r} are {kind}; the file is damaged or was "
                "saved after training diverged: use an earlier checkpoint or fetch the model again"
            )


def _names(keys: Collection[str]) -> str:
    return ", ".join([*map(repr, sorted(keys)[:_MOST_NAMES]), *(["…"] if len(keys) > _MOST_NAMES else [])])
