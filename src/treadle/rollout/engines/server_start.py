"""Starting a server of any kind, or reaching one that runs."""

from __future__ import annotations

import subprocess
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from treadle.errors import EngineError
from treadle.rollout.engines.http_calls import HttpCalls, RefusedError
from treadle.rollout.engines.server_engine import Dialect, ServerEngine, ServerLimits
from treadle.rollout.engines.server_process import ServerCommand, ServerProcess

Argument = str | bool | int | float | tuple[str, ...]
_PROBE_SECONDS = 60


@dataclass(frozen=True)
class ServerLaunch:
    """What a server is started with. `arguments` go to it as they are, `--name value`.

    `kv_cache_gib` bounds keys and values on a CPU; on a GPU a share of its memory does, by the server's own argument.
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


def words_of(own: Mapping[str, Argument], given: Mapping[str, Argument]) -> list[str]:
    """A command line; what is given wins over our own.

    >>> words_of({"port": "80", "seed": "1"}, {"seed": 2, "enable_x": True, "cache": False, "lora": ("a", "b")})
    ['--port', '80', '--seed', '2', '--enable-x', '--no-cache', '--lora', 'a', 'b']
    """
    words: list[str] = []
    for name, value in {**own, **{name.replace("_", "-"): value for name, value in given.items()}}.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words += [f"--{name}", *map(str, value if isinstance(value, tuple) else (value,))]
    return words


def ask_interpreter(python: str, program: str, package: str) -> subprocess.CompletedProcess[str]:
    """Run a short program, which looks for the engine's package, with the interpreter that shall have it.

    Raises `EngineError` where that does not run, or hangs.
    """
    try:
        return subprocess.run(
            [python, "-c", program], capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False
        )
    except OSError as error:
        raise EngineError(
            f"can't run {python} ({error.strerror}); give the interpreter that has {package} with --engine-python"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise no_interpreter(python) from error


def no_interpreter(python: str) -> EngineError:
    """What is said of a program that does not answer as Python does."""
    return EngineError(f"{python} is no Python interpreter that works; give another with --engine-python")


@dataclass(frozen=True)
class Client:
    """How a server of one kind is spoken to, by an engine with these limits."""

    dialect: Dialect
    eos_token_ids: Collection[int]
    limits: ServerLimits

    def engine(self, address: str, name: str, process: ServerProcess | None = None) -> ServerEngine:
        """The engine of the server at an address, whether or not it serves already."""
        return ServerEngine(HttpCalls.to(address, name), self.dialect, self.eos_token_ids, self.limits, process)


async def start_server(command: ServerCommand, port: int, client: Client, seconds: float) -> ServerEngine:
    """Start a server on this machine and wait until it serves.

    Raises `EngineError` with the end of its log where it does not, and `DeadlineError` where it takes too long.
    """
    engine = client.engine(f"127.0.0.1:{port}", command.what, ServerProcess.start(command))
    try:
        await engine.wait_until_ready(seconds)
    except BaseException:
        await engine.close()
        raise
    return engine


async def connect_server(address: str, client: Client, *, name: str, seconds: float, hint: str) -> ServerEngine:
    """Reach a server that somebody else runs; `hint` says how it must have been started, where it refuses."""
    engine = client.engine(address, name)
    try:
        await engine.wait_until_ready(seconds)
        await engine.health()
        await engine.resume()
    except RefusedError as error:
        await engine.close()
        raise EngineError(f"{error}; {hint}") from error
    except BaseException:
        await engine.close()
        raise
    return engine
