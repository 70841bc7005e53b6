"""How long a sequence may be.

With some rotary positions (longrope, dynamic) the factors of all tokens switch with the length of the sequence. transformers
takes that length from the largest position of the whole row, and a sample that grows past the switch gets other numbers for
the tokens it has already. Neither a packed row nor generation token by token can then equal the model's own forward of the
whole sample. Up to the switch all of them are exact, so that is where such a model's context ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.errors import ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_SWITCHES = {"longrope": "original_max_position_embeddings", "dynamic": "max_position_embeddings"}
"""The setting of a config after which the factors of a type of rotary positions switch."""


def context_length(config: PretrainedConfig) -> int:
    """Return the longest sequence that the model's positions allow and that Treadle computes exactly, in tokens."""
    text = config.get_text_config()
    limits = [length for _, length in _switches(text)]
    if getattr(text, "max_position_embeddings", None):
        limits.append(text.max_position_embeddings)
    return int(min(limits, default=1 << 30))


def context_note(config: PretrainedConfig) -> str:
    """Return why the context ends where it does, in brackets after a space; empty if positions don't switch."""
    found = _switches(config.get_text_config())
    if not found:
        return ""
    kind, length = min(found, key=lambda switch: switch[1])
    return f" (its {kind} positions switch beyond {_SWITCHES[kind]} = {length})"


def check_length(config: PretrainedConfig, longest: int) -> None:
    """Refuse a sequence of `longest` tokens if the model's positions switch within it.

    Raises:
        ModelError: if they do.
    """
    if _switches(config.get_text_config()) and longest > context_length(config):
        raise ModelError(
            f"a sample of {longest} tokens is longer than the model's context of {context_length(config)}"
            f"{context_note(config)}; lower --rollout-max-prompt-len or --rollout-max-response-len"
        )


def _switches(text: PretrainedConfig) -> list[tuple[str, int]]:
    """Return the type of each kind of rotary positions that switches, and the longest sequence before it does."""
    found = getattr(text, "rope_parameters", None) or {}
    switches = []
    for part in [part for part in found.values() if isinstance(part, dict)] or [found]:
        kind = part.get("rope_type", part.get("type"))
        if kind in _SWITCHES:
            length = part.get(_SWITCHES[kind]) or getattr(text, _SWITCHES[kind], None)
            switches += [(kind, int(length))] if length else []
    return switches
