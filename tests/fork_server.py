"""Run many `treadle` commands without paying for the imports of each.

`ForkServer` forks a child for every command from one process that has imported what a run imports. A child is the leader
of its own process group, with its own working directory, environment and output files, so it can be killed at any moment
as a process of its own.

    with ForkServer() as server:
        done = server.run(["model", "info", "folder"], cwd=tmp_path, timeout=10)
        assert done.code == 2
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.forkserver as forkserver
import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

IMPORTS = (
    "treadle.run.start",
    "treadle.run.plan",
    "treadle.observe.curve",
    "treadle.cli",
    "treadle.models.saving",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "accelerate",
    "datasets",
    "math_verify",
)
END_SECONDS = 60.0
# A function could not be found by the other process: its code goes there as text.
CODE = """
import os, sys
os.setpgid(0, 0)
for number, name in ((0, os.devnull), (1, {out!r}), (2, {err!r})):
    os.dup2(os.open(name, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_APPEND), number)
sys.stdin = open(0, closefd=False)
os.environ.update({env!r})
os.chdir({cwd!r})
sys.argv = ["treadle", *{argv!r}]
from treadle.cli import main
sys.exit(main({argv!r}))
"""


@dataclass(frozen=True)
class Done:
    """How a command ended: its exit code (negative for a signal, None if it was killed at the deadline) and its output."""

    code: int | None
    stdout: str
    stderr: str
    seconds: float


class Child:
    """A command that runs in a forked child."""

    def __init__(self, argv: Sequence[str], cwd: Path, env: Mapping[str, str], folder: Path):
        self._files = folder / "stdout", folder / "stderr"
        for file in self._files:
            file.touch()  # a child may be killed before it opens them
        code = CODE.format(
            argv=list(argv), cwd=str(cwd), env=dict(env), out=str(self._files[0]), err=str(self._files[1])
        )
        self._process = multiprocessing.get_context("forkserver").Process(target=exec, args=(code, {}))
        self._began = time.monotonic()
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def output(self) -> str:
        """What it wrote so far to standard output and standard error."""
        return "".join(file.read_text(errors="replace") for file in self._files)

    @property
    def returncode(self) -> int | None:
        """Minus the signal's number if one ended it; None while it runs."""
        return self._process.exitcode

    def signal(self, signum: int) -> None:
        """Send a signal to the process alone."""
        os.kill(self.pid, signum)

    def kill(self) -> None:
        """Kill the process and what it started in its group."""
        for send in (os.killpg, os.kill):  # it may not lead its group yet
            with contextlib.suppress(ProcessLookupError):
                send(self.pid, signal.SIGKILL)

    def wait(self, seconds: float) -> int:
        """Return the exit code; fail if the command still runs after `seconds`."""
        self._process.join(seconds)
        assert self.returncode is not None, f"it still runs after {seconds} s: {self.output[-2000:]}"
        return self.returncode

    def finish(self, timeout: float) -> Done:
        """Wait, kill what runs longer than `timeout` seconds, and return how it ended."""
        self._process.join(timeout)
        code, seconds = self.returncode, time.monotonic() - self._began
        if code is None:
            self.kill()
            self.wait(END_SECONDS)
        out, err = (file.read_bytes().decode(errors="replace") for file in self._files)  # line ends as they are
        return Done(code, out, err, seconds)

    def signal_when(self, ready: Callable[[], bool], signum: int, seconds: float) -> int:
        """Send a signal once something is so, which must come before the program ends; return the exit code."""
        deadline = time.monotonic() + seconds
        while not ready():
            assert self.returncode is None, self.output  # it must not be done before the signal
            assert time.monotonic() < deadline, self.output
            time.sleep(0.005)
        self.signal(signum)
        return self.wait(seconds)


class ForkServer:
    """What starts the children; a context manager that removes their output files."""

    def __init__(self) -> None:
        multiprocessing.get_context("forkserver").set_forkserver_preload(list(IMPORTS))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OMP_NUM_THREADS", "1")  # read once, when the server imports torch
            forkserver.ensure_running()
        self._files = tempfile.TemporaryDirectory(prefix="treadle-commands-")
        self._number = 0

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.cleanup()

    def start(self, argv: Sequence[str], *, cwd: Path, env: Mapping[str, str] | None = None) -> Child:
        """Start `treadle ARGV` in `cwd`, with `env` added to the environment and one thread for each matmul."""
        self._number += 1
        folder = Path(self._files.name) / str(self._number)
        folder.mkdir()
        return Child(argv, cwd, {"OMP_NUM_THREADS": "1", **(env or {})}, folder)

    def run(self, argv: Sequence[str], *, cwd: Path, timeout: float, env: Mapping[str, str] | None = None) -> Done:
        """Run `treadle ARGV` to its end, or to its deadline."""
        return self.start(argv, cwd=cwd, env=env).finish(timeout)
