"""A server in processes of its own: started with a log, and killed with everything that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from treadle.errors import EngineError
from treadle.rollout.engines import process_guard
from treadle.storage.private_folder import compile_variables

TAIL_BYTES = 16_000
END_SECONDS = 20.0


@dataclass(frozen=True, eq=False)
class ServerProcess:
    """A server that runs. It ends by `close`, or when this process ends or is killed."""

    process: subprocess.Popen[bytes]
    log: Path

    @classmethod
    def start(cls, name: str, args: Sequence[str], variables: Mapping[str, str], log: Path) -> ServerProcess:
        """Start a command with more environment variables, its output in `log`; return long before it serves."""
        if not os.access(args[0], os.X_OK):
            raise EngineError(f"{name}: there is no interpreter at {args[0]}; give --engine-python")
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", process_guard.__file__, *args],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={**compile_variables(), **os.environ, **variables},
                start_new_session=True,
            )
        return cls(process, log)

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def tail(self, num_lines: int = 12) -> str:
        """Return the end of its log as one line."""
        try:
            with self.log.open("rb") as log:
                log.seek(max(0, self.log.stat().st_size - TAIL_BYTES))
                text = log.read().decode(errors="replace")
        except OSError as error:
            return f"(no log: {error.strerror})"
        lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
        return " | ".join(lines[-num_lines:])[-3000:] or "(its log is empty)"

    def close(self) -> None:
        """Kill it and everything that it started, and wait until it is gone."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        if self.process.stdin is not None:
            self.process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_SECONDS)
