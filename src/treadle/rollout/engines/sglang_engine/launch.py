"""Starting an SGLang server: its arguments and its variables."""

from __future__ import annotations

import asyncio
import os

from treadle.errors import EngineError
from treadle.models.model_config import context_length, kv_heads_of, load_config
from treadle.rollout.engines.server_engine import ServerEngine
from treadle.rollout.engines.server_process import ServerCommand, free_port
from treadle.rollout.engines.server_start import (
    Argument,
    Client,
    ServerLaunch,
    ask_interpreter,
    connect_server,
    start_server,
    words_of,
)
from treadle.weights.base import DTYPES

_PROBE = "import importlib.util, sys; sys.exit(0 if importlib.util.find_spec('sglang') else 9)"
_SPARE_TOKENS = 8
"""SGLang keeps a few tokens of the context for itself: it is told of as many more, so that all of it can be used."""


async def start_sglang(launch: ServerLaunch, client: Client, name: str = "the SGLang server") -> ServerEngine:
    """Start a server on this machine and wait until it serves; `EngineError` or `DeadlineError` where it does not."""
    await asyncio.to_thread(check_interpreter, launch.python)
    port = free_port()
    args = [launch.python, "-m", "sglang.launch_server", *arguments_of(launch, port)]
    command = ServerCommand(name, args, variables_of(launch), launch.log)
    return await start_server(command, port, client, launch.start_seconds)


async def connect_sglang(address: str, client: Client, *, seconds: float, name: str = "") -> ServerEngine:
    """Reach a server that somebody else runs; it must have been started as the page on engines says."""
    hint = "was it started without --api-key? See the page on engines"
    return await connect_server(
        address, client, name=name or f"the SGLang server at {address}", seconds=seconds, hint=hint
    )


def check_interpreter(python: str) -> None:
    """Raise `EngineError` where an interpreter does not run or has no SGLang."""
    if ask_interpreter(python, _PROBE, "sglang").returncode != 0:
        raise EngineError(f"{python} has no sglang; install it there or name another interpreter with --engine-python")


def arguments_of(launch: ServerLaunch, port: int) -> list[str]:
    """The server's command line after the module's name."""
    given = {name.replace("_", "-"): value for name, value in launch.arguments.items()}
    length = given.pop("context-length", None) or context_length(load_config(launch.model_path))
    own: dict[str, Argument] = {
        "model-path": launch.model_path,
        "host": "127.0.0.1",
        "port": str(port),
        "dtype": launch.dtype,
        "context-length": str(int(str(length)) + _SPARE_TOKENS),
        "random-seed": str(launch.seed),
        "max-running-requests": str(launch.max_num_seqs),
        "log-level-http": "warning",
    }
    if launch.device == "cpu":
        own |= {"device": "cpu", "max-total-tokens": str(kv_tokens(launch)), "skip-server-warmup": True}
    else:
        # The weights would be gone after a sleep without a copy on the CPU.
        own |= {"enable-memory-saver": True, "enable-weights-cpu-backup": True}
    if launch.gpus > 1:
        own["tensor-parallel-size"] = str(launch.gpus)  # unless the user shares them out otherwise
    return words_of(own, given)


def kv_tokens(launch: ServerLaunch) -> int:
    """How many tokens' keys and values there is room for."""
    shape = load_config(launch.model_path).get_text_config()
    kv_heads, head_dim = kv_heads_of(shape)
    token_bytes = 2 * shape.num_hidden_layers * kv_heads * head_dim * DTYPES[launch.dtype].itemsize
    return int(launch.kv_cache_gib * 2**30) // token_bytes


def variables_of(launch: ServerLaunch) -> dict[str, str]:
    """Variables of the server: no look at a hub, and its share of a CPU machine."""
    found = {
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # by the spare tokens
        "SGLANG_REQUEST_STATE_WAIT_TIMEOUT": "1",  # how soon it sees, in seconds, that a caller is gone
    }
    if launch.device == "cpu":
        found["SGLANG_USE_CPU_ENGINE"] = "1"
        if launch.threads is not None:
            found["OMP_NUM_THREADS"] = str(launch.threads)
    return {**found, **{name: os.environ[name] for name in found if name.startswith("SGLANG") and name in os.environ}}
