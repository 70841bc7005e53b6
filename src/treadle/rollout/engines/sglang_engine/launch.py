"""How an SGLang server is started: its arguments and its environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from treadle.models.model_config import context_length, kv_heads_of, load_config
from treadle.rollout.engines.server_kind import Argument, ServerKind, ServerLaunch, probe_interpreter
from treadle.rollout.engines.sglang_engine.dialect import SglangDialect
from treadle.weights import sglang_group
from treadle.weights.base import DTYPES

_SPARE_TOKENS = 8
"""SGLang keeps a few tokens of the context for itself. It is given as many more, so that all of it can be used."""


def arguments_of(launch: ServerLaunch, given: Mapping[str, Argument]) -> dict[str, Argument]:
    """Return the server's arguments besides those of every kind of server."""
    config = load_config(launch.model_path)
    own: dict[str, Argument] = {
        "model-path": launch.model_path,
        "random-seed": launch.seed,
        "max-running-requests": launch.max_num_seqs,
        "log-level-http": "warning",
    }
    if launch.device == "cpu":
        shape = config.get_text_config()
        kv_heads, head_dim = kv_heads_of(shape)
        token_bytes = 2 * shape.num_hidden_layers * kv_heads * head_dim * DTYPES[launch.dtype].itemsize
        tokens = int(launch.kv_cache_gib * 2**30) // token_bytes
        own |= {"device": "cpu", "max-total-tokens": tokens, "skip-server-warmup": True}
    else:
        # The weights would be gone after a sleep without a copy on the CPU.
        own |= {"enable-memory-saver": True, "enable-weights-cpu-backup": True}
    length = int(str(given.get("context-length") or context_length(config)))
    return {**own, **given, "context-length": length + _SPARE_TOKENS}


def variables_of(launch: ServerLaunch) -> dict[str, str]:
    """Return the server's variables; raises `EngineError` if its interpreter has no SGLang."""
    probe_interpreter(launch.python, "sglang")
    found = {
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # by the spare tokens
        "SGLANG_REQUEST_STATE_WAIT_TIMEOUT": "1",  # seconds until it notices that a caller has left
    }
    if launch.device == "cpu":
        found["SGLANG_USE_CPU_ENGINE"] = "1"
    return found


def dialect_of(folder: Path, dtype: torch.dtype, device: str) -> SglangDialect:
    """Return the dialect of a server of the model in a folder."""
    shape = load_config(str(folder)).get_text_config()
    return SglangDialect(folder, dtype, tied=bool(getattr(shape, "tie_word_embeddings", False)))


SGLANG = ServerKind(
    name="SGLang",
    module="sglang.launch_server",
    length_argument="context_length",
    broadcast=sglang_group.NAME,
    prefix="SGLANG",
    hint="was it started without --api-key?",
    dialect=dialect_of,
    arguments=arguments_of,
    variables=variables_of,
)
