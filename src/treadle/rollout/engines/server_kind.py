"""Start a server of any kind on this machine, or reach one that runs."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from treadle.errors import DeadlineError, EngineError
from treadle.rollout.engines.server_client import RefusedError
from treadle.rollout.engines.server_dialect import Dialect
from treadle.rollout.engines.server_engine import ServerEngine, ServerSettings
from treadle.rollout.engines.server_process import ServerProcess

Argument = str | bool | int | float | tuple[str, ...]
_PROBE_SECONDS = 60
_PROBE = """
import importlib.util as u, json, sys
has = {name: bool((spec := u.find_spec(name)) and spec.origin) for name in (sys.argv[1], "xxhash")}
print(json.dumps({"engine": has[sys.argv[1]], "xxhash": has["xxhash"], "tag": sys.implementation.cache_tag}))
"""


@dataclass(frozen=True)
class ServerLaunch:
    """What a server is started with.

    `arguments` are passed to it unchanged, as `--name value`. `kv_cache_gib` limits keys and values on a CPU; on a GPU an
    argument of the server limits them to a share of its memory.
    """

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
    arguments: Mapping[str, Argument] = field(default_factory=dict)


@dataclass(frozen=True)
class ServerKind:
    """One kind of server.

    `module` is what its interpreter runs. The argument `length_argument` sets its context, and `broadcast` is the transport
    by which it takes part in a broadcast. `dialect` gets the model's folder, dtype and device. `arguments` gets the user's
    arguments too, and `variables` checks the interpreter; the user's own variables that begin with `prefix` win. `hint` says
    how a server that refuses must have been started.
    """

    name: str
    module: str
    length_argument: str
    broadcast: str
    prefix: str
    hint: str
    dialect: Callable[[Path, torch.dtype, str], Dialect]
    arguments: Callable[[ServerLaunch, Mapping[str, Argument]], Mapping[str, Argument]]
    variables: Callable[[ServerLaunch], Mapping[str, str]]

    async def start(self, launch: ServerLaunch, settings: ServerSettings, name: str = "") -> ServerEngine:
        """Start a server on this machine and wait until it serves.

        Raises:
            EngineError: with the end of its log, if it does not start.
            DeadlineError: if it takes too long.
        """
        name = name or f"the {self.name} server"
        variables = await asyncio.to_thread(self.environment, launch)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [launch.python, "-m", self.module, *self.command_line(launch, port)]
        process = ServerProcess.start(name, command, variables, launch.log)
        engine = ServerEngine(f"127.0.0.1:{port}", name, settings, process)
        return await self._ready(engine, settings, launch.start_seconds)

    async def connect(self, address: str, settings: ServerSettings, *, seconds: float, name: str = "") -> ServerEngine:
        """Reach a server that somebody else runs; it must have been started as the page on engines says."""
        engine = ServerEngine(address, name or f"the {self.name} server at {address}", settings)
        return await self._ready(engine, settings, seconds)

    async def _ready(self, engine: ServerEngine, settings: ServerSettings, seconds: float) -> ServerEngine:
        try:
            await _wait_until_ready(engine, settings, seconds)
            if engine.process is None:
                await engine.health()
                await engine.resume()
        except BaseException as error:
            await engine.close()
            if isinstance(error, RefusedError):
                raise EngineError(f"{error}; {self.hint} See the page on engines") from error
            raise
        return engine

    def command_line(self, launch: ServerLaunch, port: int) -> list[str]:
        """Return the server's arguments; those that the user gives win."""
        own: dict[str, Argument] = {"host": "127.0.0.1", "port": port, "dtype": launch.dtype}
        if launch.gpus > 1:
            own["tensor-parallel-size"] = launch.gpus  # unless the user divides the model otherwise
        given = {name.replace("_", "-"): value for name, value in launch.arguments.items()}
        return words_of({**own, **self.arguments(launch, given)})

    def environment(self, launch: ServerLaunch) -> dict[str, str]:
        """Return the server's environment variables: no requests to a hub, and on a CPU its share of the cores."""
        found = {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", **self.variables(launch)}
        if launch.device == "cpu" and launch.threads is not None:
            found["OMP_NUM_THREADS"] = str(launch.threads)
        return found | {name: os.environ[name] for name in found if name.startswith(self.prefix) and name in os.environ}


async def _wait_until_ready(engine: ServerEngine, settings: ServerSettings, seconds: float) -> None:
    deadline, client = time.monotonic() + seconds, engine.client
    while True:
        if engine.process is not None and not engine.process.is_alive:
            raise EngineError(f"{client.name} did not start: {engine.process.tail()}")
        with suppress(EngineError):
            await client.ask(settings.dialect.commands.ready, seconds=5.0)
            return
        if time.monotonic() > deadline:
            raise DeadlineError(
                f"{client.name} at {client.address} did not serve within {seconds:g} s; raise "
                f"--engine-start-timeout-seconds{client.log_end}"
            )
        await asyncio.sleep(0.25)


def words_of(arguments: Mapping[str, Argument]) -> list[str]:
    """Return arguments as words of a command line.

    >>> words_of({"port": 80, "enable-x": True, "cache": False, "lora": ("a", "b")})
    ['--port', '80', '--enable-x', '--no-cache', '--lora', 'a', 'b']
    """
    words: list[str] = []
    for name, value in arguments.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words += [f"--{name}", *map(str, value if isinstance(value, tuple) else (value,))]
    return words


def probe_interpreter(python: str, package: str) -> dict[str, Any]:
    """Return whether an interpreter has xxhash, and its cache tag; raises `EngineError` if it does not have the package."""
    remedy = "--engine-python"
    try:
        done = subprocess.run(
            [python, "-c", _PROBE, package], capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False
        )
        found: dict[str, Any] = json.loads(done.stdout)
    except OSError as error:
        raise EngineError(
            f"can't run {python} ({error.strerror}); give the interpreter that has {package} with {remedy}"
        ) from error
    except (subprocess.TimeoutExpired, ValueError) as error:
        raise EngineError(f"{python} is no Python interpreter that works; give another with {remedy}") from error
    if not found["engine"]:
        raise EngineError(f"{python} has no {package}; install it there or name another interpreter with {remedy}")
    return found
