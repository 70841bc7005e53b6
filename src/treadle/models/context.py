"""How long a sequence may be."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def context_length(config: PretrainedConfig) -> int:
    """Return the longest sequence for which the model computes one and the same function of its tokens, in tokens.

    That is what its positions allow; with rotary factors that switch with the length of the sequence (longrope, dynamic),
    the length up to which they don't. Beyond it the numbers of a prefix depend on what follows: neither a sequence that
    grows token by token nor a packed row can equal the model's own forward pass of the whole.
    """
    config = config.get_text_config()
    limits = [switch for _, switch in _switching_positions(config)]
    if getattr(config, "max_position_embeddings", None):
        limits.append(config.max_position_embeddings)
    return int(min(limits, default=1 << 30))


def context_note(config: PretrainedConfig) -> str:
    """Return why the context is shorter than the model's positions, in brackets after a space; empty if it is not."""
    config = config.get_text_config()
    for kind, switch in _switching_positions(config):
        if switch == context_length(config):
            return f" (its {kind} positions change beyond original_max_position_embeddings = {switch})"
    return ""


def _switching_positions(config: PretrainedConfig) -> list[tuple[str, int]]:
    """Return the type of each kind of rotary positions that switches with the length, and the length."""
    found = getattr(config, "rope_parameters", None) or {}
    parts = [part for part in found.values() if isinstance(part, dict)] or [found]
    switching = []
    for part in parts:
        kind, switch = part.get("rope_type", part.get("type")), part.get("original_max_position_embeddings")
        switch = switch or getattr(config, "original_max_position_embeddings", None)
        if kind == "longrope" and switch:
            switching.append((kind, int(switch)))
    return switching
