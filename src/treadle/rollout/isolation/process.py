"""One worker process as the run sees it: start it, send and receive without waiting, kill it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

from treadle.rollout.isolation.frames import decode_frames, encode_frame
from treadle.rollout.isolation.output import WorkerOutput

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from treadle.rollout.isolation.supervisor import run_supervised\n"
    "def work():\n    from treadle.rollout.isolation.worker import serve\n    serve(int(sys.argv[2]))\n"
    "run_supervised(int(sys.argv[3]), work)"
)
_CHUNK = 1 << 20


class WorkerProcess:
    """A supervisor with its worker, and the connection to the worker."""

    def __init__(self, order: dict[str, Any]):
        here, there = socket.socketpair()
        self.connection = here
        here.setblocking(False)
        self._output = WorkerOutput()
        with there, self._output.writing() as printed:
            paths = json.dumps([str(path) for path in sys.path])
            command = [sys.executable, "-P", "-c", _BOOT, paths, str(there.fileno()), str(os.getpid())]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=printed,
                pass_fds=(there.fileno(),),
                process_group=0,  # no Ctrl-C from the terminal
                env={
                    "PYTHONHASHSEED": "0",
                    "PYTHONUNBUFFERED": "1",
                    **os.environ,
                },  # sets have one order in every worker
            )
        self._unsent = bytearray()
        self._received = bytearray()
        self.send(encode_frame(order))

    @property
    def process_id(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The worker's exit code, negative for a signal; None while something of it runs."""
        return self._process.poll()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, frame: bytes) -> None:
        """Send a frame as far as the connection takes it; `flush` sends the rest. A worker that is gone is found by `receive`."""
        self._unsent += frame
        self.flush()

    def flush(self) -> None:
        """Send what waits to be sent, as far as the connection takes it."""
        try:
            while self._unsent:
                del self._unsent[: self.connection.send(memoryview(self._unsent)[:_CHUNK].tobytes())]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()

    def receive(self) -> list[Any]:
        """Return the whole values that have arrived; raises `EOFError` if the worker closed the connection."""
        try:
            while chunk := self.connection.recv(_CHUNK):
                self._received += chunk
            closed = True
        except BlockingIOError:
            closed = False
        except OSError:
            closed = True
        found = decode_frames(self._received)
        if closed and not found:
            raise EOFError("the worker closed its connection")
        return found

    def kill(self) -> None:
        """Have the supervisor kill the worker and all that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if sys.platform == "linux":
                self._process.send_signal(signal.SIGTERM)
            else:
                os.killpg(self._process.pid, signal.SIGKILL)

    def end(self, seconds: float) -> None:
        """Kill the process, wait for its end, and close the connection."""
        deadline = time.monotonic() + seconds
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, deadline - time.monotonic()))
        if self._process.poll() is None:
            self._process.kill()
        self.connection.close()
        self._output.finish(max(0.1, deadline - time.monotonic()))

    def exit_text(self) -> str:
        """Say how the worker ended."""
        code = self.exit_code
        if code is None:
            return "it closed its connection"
        if code >= 0:
            return f"exit code {code}"
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
        return f"killed by signal {-code}"
