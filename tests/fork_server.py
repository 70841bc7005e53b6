"""Run many `treadle` commands without paying for the imports of each.

`ForkServer` starts one process that imports what a run imports and then forks a child for every command. A child is the
leader of its own process group, with its own working directory, environment and output files, so it can be killed at any
moment as a process of its own.

    with ForkServer() as server:
        done = server.run(["model", "info", "folder"], cwd=tmp_path, timeout=10)
        assert done.code == 2
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_SECONDS = 120.0
IMPORTS = (
    "torch",
    "transformers",
    "datasets",
    "pyarrow",
    "math_verify",
    "matplotlib.pyplot",
    "tyro",
    "treadle.run.start",
    "treadle.run.plan",
)


@dataclass(frozen=True)
class Done:
    """How a command ended: its exit code (negative for a signal, None if it was killed at the deadline) and its output."""

    code: int | None
    stdout: str
    stderr: str
    seconds: float


class Child:
    """A command that runs in a forked child."""

    def __init__(self, server: ForkServer, pid: int, folder: Path):
        self._server, self._folder = server, folder
        self.pid = pid
        self.began = time.monotonic()

    def wait(self, timeout: float) -> int | None:
        """Return the exit code, negative for a signal, or None if it still runs after `timeout` seconds."""
        return self._server.ask({"wait": self.pid, "timeout": timeout}, timeout)["code"]

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """Send a signal to the process and to what it started in its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signum)

    def finish(self, timeout: float) -> Done:
        """Wait, kill what runs longer than `timeout` seconds, and return how it ended."""
        code = self.wait(timeout)
        if code is None:
            self.kill()
            self.wait(START_SECONDS)
        seconds = time.monotonic() - self.began
        out, err = ((self._folder / name).read_text(errors="replace") for name in ("stdout", "stderr"))
        return Done(code, out, err, seconds)


class ForkServer:
    """The process that forks; use it as a context manager."""

    def __init__(self) -> None:
        self._files = tempfile.TemporaryDirectory(prefix="treadle-fork-")
        self._number = 0
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def __enter__(self) -> ForkServer:
        self._read(START_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._files.cleanup()

    def start(self, argv: Sequence[str], *, cwd: Path, env: Mapping[str, str] | None = None) -> Child:
        """Start `treadle ARGV` in `cwd`; `env` is added to the environment of the server."""
        self._number += 1
        folder = Path(self._files.name) / str(self._number)
        folder.mkdir()
        for name in ("stdout", "stderr"):
            (folder / name).touch()  # a child may be killed before it opens them
        request = {"argv": list(argv), "cwd": str(cwd), "env": dict(env or {}), "folder": str(folder)}
        return Child(self, self.ask(request, START_SECONDS)["pid"], folder)

    def run(self, argv: Sequence[str], *, cwd: Path, timeout: float, env: Mapping[str, str] | None = None) -> Done:
        """Run `treadle ARGV` to its end, or to its deadline."""
        return self.start(argv, cwd=cwd, env=env).finish(timeout)

    def ask(self, request: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """Send one request and return the server's reply."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read(timeout + 30)

    def _read(self, timeout: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], timeout)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            raise TimeoutError(f"the fork server said nothing within {timeout:g} s, exit code {self._process.poll()}")
        return json.loads(line)


def _serve() -> None:
    """Body of the server: import, then fork a child for each request until stdin ends."""
    import importlib

    for name in IMPORTS:
        importlib.import_module(name)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    print(json.dumps({"ready": True}), file=answers)
    ended: dict[int, int] = {}
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            print(json.dumps({"code": _wait(request["wait"], request["timeout"], ended)}), file=answers)
            continue
        pid = os.fork()
        if pid == 0:
            _become(request)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # in both processes, so that it is done before anyone kills the group
        print(json.dumps({"pid": pid}), file=answers)


def _wait(pid: int, timeout: float, ended: dict[int, int]) -> int | None:
    deadline = time.monotonic() + timeout
    while pid not in ended:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            ended[pid] = os.waitstatus_to_exitcode(status)
        elif time.monotonic() >= deadline:
            return None
        else:
            time.sleep(0.01)
    return ended[pid]


def _become(request: Mapping[str, Any]) -> None:
    """In the child: run one command as the console script does, and exit."""
    os.setpgid(0, 0)
    folder = Path(request["folder"])
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    for number, name in ((1, "stdout"), (2, "stderr")):
        with (folder / name).open("wb") as file:
            os.dup2(file.fileno(), number)
    os.environ.update(request["env"])
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(n, mode, closefd=False) for n, mode in ((0, "r"), (1, "w"), (2, "w"))
    )
    code: Any = 1
    try:
        os.chdir(request["cwd"])
        from treadle.cli import main

        sys.argv = ["treadle", *request["argv"]]
        code = main(request["argv"])
    except SystemExit as end:
        code = end.code
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        import atexit

        with contextlib.suppress(BaseException):
            threading._shutdown()  # as an interpreter that ends does: wait for threads that are no daemons
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
    if isinstance(code, str):
        os.write(2, f"{code}\n".encode())
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


if __name__ == "__main__":
    _serve()
