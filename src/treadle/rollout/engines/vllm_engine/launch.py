"""How a vLLM server is started: its arguments, its environment variables, and the plugin on its import path."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import treadle
from treadle.errors import EngineError
from treadle.rollout.engines.server_kind import Argument, ServerKind, ServerLaunch, probe_interpreter
from treadle.rollout.engines.vllm_engine.dialect import VllmDialect
from treadle.weights import broadcast
from treadle.weights.vllm_plugin import BACKEND


def arguments_of(launch: ServerLaunch, given: Mapping[str, Argument]) -> dict[str, Argument]:
    """Return the server's arguments besides those of every kind of server."""
    own: dict[str, Argument] = {
        "model": launch.model_path,
        "seed": launch.seed,
        "max-num-seqs": launch.max_num_seqs,
        "logprobs-mode": "processed_logprobs",
        "weight-transfer-config": json.dumps({"backend": BACKEND}),
        "enable-scale-out": True,
    }
    if launch.device != "cpu":
        own["enable-sleep-mode"] = True
    return {**own, **given}


def variables_of(launch: ServerLaunch) -> dict[str, str]:
    """Return the server's variables: its plugin, its control endpoints, and on a CPU all cores and memory for keys and values."""
    plugin = plugin_folder(launch.python, launch.log.parent.absolute() / "plugin")
    found = {"PYTHONPATH": str(plugin), "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if launch.device == "cpu":
        found["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "0"
        found["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, round(launch.kv_cache_gib)))
    return found


def plugin_folder(python: str, folder: Path) -> Path:
    """Make a folder in which the server finds Treadle's plugin, and nothing else of this environment.

    It holds the entry point that vLLM looks for and a link to this package, and one to xxhash if the server's interpreter
    lacks it. Raises `EngineError` if that interpreter has no vLLM, or can't use this environment's xxhash.
    """
    found = probe_interpreter(python, "vllm")
    info = folder / f"treadle_vllm_plugin-{treadle.__version__}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    _make(info / "METADATA", text=f"Metadata-Version: 2.1\nName: treadle-vllm-plugin\nVersion: {treadle.__version__}\n")
    _make(info / "entry_points.txt", text="[vllm.general_plugins]\ntreadle = treadle.weights.vllm_plugin:register\n")
    _make(folder / "treadle", target=Path(treadle.__file__).parent)
    if not found["xxhash"]:
        spec = importlib.util.find_spec("xxhash")
        if found["tag"] != sys.implementation.cache_tag or spec is None or spec.origin is None:
            raise EngineError(f"{python} has no xxhash, which checks weights; install it there: pip install xxhash")
        _make(folder / "xxhash", target=Path(spec.origin).parent)
    return folder


def _make(path: Path, text: str = "", target: Path | None = None) -> None:
    """Write a file or a link to a target in one step, because several engines may start at once."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    if target is None:
        fresh.write_text(text)
    else:
        fresh.symlink_to(target)
    fresh.replace(path)


VLLM = ServerKind(
    name="vLLM",
    module="vllm.entrypoints.openai.api_server",
    length_argument="max_model_len",
    broadcast=broadcast.NAME,
    prefix="VLLM_CPU",
    hint="was it started with VLLM_SERVER_DEV_MODE=1?",
    dialect=lambda folder, dtype, device: VllmDialect(seeded=device != "cpu"),
    arguments=arguments_of,
    variables=variables_of,
)
