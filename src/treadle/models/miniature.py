"""A small random model with the features of a large one, on which an architecture is checked without its weights.

Sizes shrink: widths, heads, layers, experts, vocabulary. So does every length at which an architecture changes what it
does (windows, chunks, the length at which rotary factors switch), so that a few dozen tokens are past all of them.
Everything else stays: flags, kinds of layers, activations, scales.
"""

from __future__ import annotations

import copy
import re
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

HEADS, HEAD_SIZE = 4, 16
CONTEXT = 64
"""Positions of a miniature whose config limits them."""
SWITCH = 24
"""Length at which rotary factors of a miniature switch."""
WINDOW = 5
EXPERTS = 6
VOCABULARY = 96
MOST_LAYERS = 6
SEED = 20

_RULES = (
    (r"original_max_position", SWITCH),
    (r"max_(target_|source_)?(position|seq)|n_positions|n_ctx|(context|model_max)_length", CONTEXT),
    (r"window|chunk_size|local_attention|topk$|topk_blocks$|_extent$|(^|_)block_size", WINDOW),
    (r"^topk_group$", 1),
    (r"^(n|num_expert)_group$|num_experts_per_tok|moe_(k|topk)|top_k_experts", 2),
    (r"expert", EXPERTS),
    (r"mamba.*heads$", 2 * HEADS),
    (r"mamba_d_ssm$", 2 * HEADS * HEAD_SIZE),
    (r"mamba_d_head$", HEAD_SIZE),
    (r"mamba.*d_state|state_size$", HEAD_SIZE),
    (r"vocab", VOCABULARY),
    (r"layers_per|first_k|offset|interval|period|dense_layers|kv_shared|_step$|pattern", 2),
    (r"(key_value|kv).*heads$", HEADS),
    (r"(^|_)(head|heads)$", HEADS),
    (r"(rope|rotary)_(head_)?dim$", HEAD_SIZE // 2),
    (r"head_(dim|size)$|headdim$|kv_channels|dim_head|d_head$", HEAD_SIZE),
    (r"(intermediate|ffn|feed_forward|mlp).*|^d(im)?_?ff$|inner", 32),
    (r"hidden_size$|n_embd|d_model|emb(ed)?(ding)?_(dim|size)$|embed_proj_dim|lru_width", HEADS * HEAD_SIZE),
)
_FIXED = frozenset({HEADS, HEAD_SIZE, HEADS * HEAD_SIZE, VOCABULARY})
"""Sizes that fit each other; they are set even if the model's are smaller."""
_LAYER_COUNTS = r"^n(um)?_(hidden_)?layers?$|^(encoder|decoder)_layers$|^num_(en|de)coder_layers$|^num_blocks$"
_TOKENS = r"_(token_)?(id|ids|index|idx)$"
_KEPT = r"cycles$|^seed$|^expand|_expand$|n_langs|num_codebooks|groups$|^hc_|ngram|altup|conv"
_APART = frozenset({"model_type", "transformers_version", "rope_parameters", "per_layer_config"})
"""Fields that are not sizes."""


def miniature(large: PretrainedConfig) -> PretrainedConfig:
    """Return a small config of the same class and with the same features."""
    layers = _kept_layers(large)
    apart: dict[str, dict[str, Any]] = large.to_dict().get("per_layer_config") or {}
    small = type(large).from_dict({**large.to_dict(), "per_layer_config": {}}) if apart else copy.deepcopy(large)
    for name in small.sub_configs:
        part = getattr(small, name, None)
        if part is not None and not isinstance(part, dict):
            setattr(small, name, miniature(part))
    for name, value in large.to_dict().items():
        if name in small.sub_configs or name in _APART:
            continue
        if re.search(_LAYER_COUNTS, name) and isinstance(value, int):
            shrunk: Any = len(layers)
        elif isinstance(value, list) and len(value) == _num_layers(large):
            shrunk = [_shrunk(name, value[i], large) for i in layers]
        else:
            shrunk = _shrunk(name, value, large)
        if shrunk != value:
            setattr(small, name, shrunk)
    if getattr(large, "qk_nope_head_dim", None):  # a key's head is a part with positions beside one without
        if large.head_dim == large.qk_rope_head_dim:
            small.head_dim = small.qk_rope_head_dim
        small.qk_head_dim = small.qk_nope_head_dim + small.qk_rope_head_dim
    rope = getattr(large, "rope_parameters", None)
    if rope:
        small.rope_parameters = _shrunk_rope(rope, small)
    if not apart:
        return small
    wide = {
        f"{i:02d}": {name: 2 * _shrunk(name, value, large) for name, value in apart[f"{layer:02d}"].items()}
        for i, layer in enumerate(layers)
        if apart.get(f"{layer:02d}")
    }  # twice as wide: unlike the other layers
    return type(large).from_dict({**small.to_dict(), "per_layer_config": wide})


def _num_layers(large: PretrainedConfig) -> int:
    return int(getattr(large, "num_hidden_layers", None) or 2)


def _kept_layers(large: PretrainedConfig) -> list[int]:
    """Return two layers of each kind the config lists, in their order; without lists, the first few."""
    count = _num_layers(large)
    lists = [v for v in large.to_dict().values() if isinstance(v, list) and len(v) == count and count > 2]
    kinds = [tuple(str(values[i]) for values in lists) for i in range(count)]
    kept: list[int] = []
    for i, kind in enumerate(kinds):
        if sum(kinds[j] == kind for j in kept) < (2 if len(set(kinds)) <= MOST_LAYERS // 2 else 1):
            kept.append(i)
    if not lists:
        kept = list(range(min(count, 4)))
    return kept[:MOST_LAYERS]


def _shrunk(name: str, value: Any, large: PretrainedConfig) -> Any:
    """Return the small value of a config field; what is not a size stays."""
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if re.search(_TOKENS, name):
        return value if value < VOCABULARY else 1
    if re.search(_KEPT, name):
        return value
    if re.search(r"(key_value|kv).*heads$", name):
        if value == getattr(large, "num_attention_heads", None):
            return HEADS if value > 2 else value  # as many as the rule for heads gives
        return 1 if value == 1 else HEADS // 2
    if name == "attention_hidden_size":  # a multiple of the model's width
        return HEADS * HEAD_SIZE * value // large.hidden_size
    for pattern, size in _RULES:
        if re.search(pattern, name):
            return size if size in _FIXED and value > 2 else min(value, size)
    return min(value, 8)


def _width_of_head(small: PretrainedConfig) -> int:
    """Return the size of a head that the config does not name: a model with one or two heads keeps them, and they are wide."""
    heads = getattr(small, "num_attention_heads", None)
    return HEADS * HEAD_SIZE // heads if isinstance(heads, int) and heads <= 2 else HEAD_SIZE


def _shrunk_rope(rope: dict[str, Any], small: PretrainedConfig) -> dict[str, Any]:
    """Return the parameters of rotary positions for small heads, with factors that switch at `SWITCH` tokens."""
    if any(isinstance(value, dict) for value in rope.values()):
        return {k: _shrunk_rope(v, small) if isinstance(v, dict) else v for k, v in rope.items()}
    size = getattr(small, "head_dim", None) or _width_of_head(small)
    angles = int(size * rope.get("partial_rotary_factor", 1.0)) // 2
    out = dict(rope)
    for name, value in rope.items():
        if name == "original_max_position_embeddings":
            out[name] = min(value, SWITCH)
        elif name.endswith("_factor") and isinstance(value, list):
            out[name] = [value[i * len(value) // angles] for i in range(angles)]
        elif name == "mrope_section":
            parts = [max(1, angles * part // sum(value)) for part in value]
            out[name] = [angles - sum(parts[1:]), *parts[1:]]
    return out


def miniature_model(config: PretrainedConfig, attention: str) -> PreTrainedModel:
    """Return a random float32 model of a (small) config on the CPU, in eval mode; random states stay as they were."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(SEED)  # not torch.manual_seed, which seeds every device
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=torch.float32, attn_implementation=attention, trust_remote_code=False
        )
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim < 2 or name.endswith("bias"):
                    parameter.add_(0.2 * torch.randn_like(parameter))
                else:
                    parameter.normal_(std=0.15)
    return model.eval()
