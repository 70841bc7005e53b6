"""A server in processes of its own: started with a log, watched, and ended with everything it started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from treadle.errors import EngineError
from treadle.rollout.engines import process_guard
from treadle.storage.private_folder import compile_variables

TAIL_BYTES = 16_000
END_SECONDS = 20.0


@dataclass(frozen=True)
class ServerCommand:
    """What to run, with which variables beside those of this process, and where its output goes."""

    what: str
    args: Sequence[str]
    env: Mapping[str, str]
    log: Path


@dataclass(eq=False)
class ServerProcess:
    """A server that runs. It ends by `close`, and by itself when this process ends or is killed."""

    command: ServerCommand
    process: subprocess.Popen[bytes] = field(repr=False)

    @classmethod
    def start(cls, command: ServerCommand) -> ServerProcess:
        """Start it; returns at once, long before it serves."""
        if not os.access(command.args[0], os.X_OK):
            raise EngineError(f"{command.what}: there is no interpreter at {command.args[0]}; give --engine-python")
        command.log.parent.mkdir(parents=True, exist_ok=True)
        with command.log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", process_guard.__file__, *command.args],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**compile_variables(), **os.environ, **command.env},
                start_new_session=True,
            )
        return cls(command, process)

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def tail(self, num_lines: int = 12) -> str:
        """The end of its log, as one line."""
        try:
            with self.command.log.open("rb") as log:
                log.seek(max(0, self.command.log.stat().st_size - TAIL_BYTES))
                text = log.read().decode(errors="replace")
        except OSError as error:
            return f"(no log: {error.strerror})"
        lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
        return " | ".join(lines[-num_lines:])[-3000:] or "(its log is empty)"

    def close(self) -> None:
        """Kill it and whatever it started; returns when it is gone."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        if self.process.stdin is not None:
            self.process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_SECONDS)


def free_port() -> int:
    """A port of the loopback address that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
