"""The one description of a decoder layer that fused training, prepared inference and the C++ kernels read.

The layer is: norm, attention with rotary positions (and norms of queries and keys, if it has them), norm, gated MLP with
SiLU; both halves are residual.

Axis letters: `N` tokens, `H` query heads, `K` key/value heads, `E` head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from treadle.models.attention import PLAN_KEY, LayerAttention, LayerRecorder

KNOWN_MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Architectures whose layers fit the description."""


def is_known(config: Any) -> bool:
    """Return True if the layers of a model with this config fit the description."""
    return config.model_type in KNOWN_MODEL_TYPES and config.hidden_act == "silu"


class KnownLayer:
    """The parts of one decoder layer; the norms of queries and keys are None unless it has them."""

    def __init__(self, layer: Any):
        self.norm_in, self.norm_mlp = layer.input_layernorm, layer.post_attention_layernorm
        part: Any = layer.self_attn
        self.query, self.key, self.value, self.out = part.q_proj, part.k_proj, part.v_proj, part.o_proj
        self.norm_query, self.norm_key = getattr(part, "q_norm", None), getattr(part, "k_norm", None)
        self.gate, self.up, self.down = layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj
        self.heads, self.kv_heads = (len(x.weight) // part.head_dim for x in (part.q_proj, part.k_proj))
        self.head_size, self._attention = part.head_dim, part

    @property
    def norms(self) -> tuple[Any, Any] | None:
        """The norms of queries and keys."""
        return None if self.norm_query is None else (self.norm_query, self.norm_key)

    @property
    def declared(self) -> LayerAttention:
        """What the attention module passes to the attention function besides queries, keys and values."""
        return getattr(self._attention, "declared", None) or declared_attention(self._attention)


def known_layers(model: Any) -> Iterator[tuple[Any, KnownLayer]]:
    """Yield each decoder layer of a model with its description; nothing if the architecture is not known."""
    if is_known(model.config):
        for layer in model.base_model.layers:
            yield layer, KnownLayer(layer)


def split_heads(
    qkv: Tensor, counts: tuple[int, int], norms: tuple[Any, Any] | None, turn: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Split the result of the three projections into heads.

    Args:
        qkv: [N, (H + 2·K)·E], queries, keys and values side by side.
        counts: H and K.
        norms: those of queries and keys, applied to each head.
        turn: applies the positions to [N, H + K, E].
    Returns:
        Queries [N, H, E], keys and values [N, K, E].
    """
    own, shared = counts  # `split_with_sizes` skips a Python function of `split`, which costs microseconds a layer
    query_key, value = qkv.view(len(qkv), own + 2 * shared, -1).split_with_sizes([own + shared, shared], 1)
    if norms is not None:
        query, key = query_key.split_with_sizes([own, shared], 1)
        query_key = torch.cat([norms[0](query), norms[1](key)], dim=1)
    query, key = turn(query_key).split_with_sizes([own, shared], 1)
    return query, key, value


def declared_attention(attention: Any) -> LayerAttention:
    """Return what an attention module passes to the attention function besides queries, keys and values.

    The module runs once, on tensors without memory: a window counts only if the module applies it. A Llama config may
    name a `sliding_window` that its layers ignore.
    """
    weights = {name: torch.empty_like(p, device="meta") for name, p in attention.named_parameters()}
    first = attention.q_proj
    hidden, turn = (
        torch.empty(1, 1, size, dtype=first.weight.dtype, device="meta")
        for size in (first.in_features, attention.head_dim)
    )
    recorder = LayerRecorder()
    known = {"position_embeddings": (turn, turn), "attention_mask": None, PLAN_KEY: recorder}
    with torch.no_grad():
        torch.func.functional_call(attention, weights, (hidden,), known)
    (call,) = recorder.calls
    return call.layer
