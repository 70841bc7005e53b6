"""Run a model's chat template in a process of its own, which can be stopped."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from treadle.chat.template_worker import MAX_CPU_SECONDS

WAIT_SECONDS = 60.0  # for an answer, on however busy a machine
MAX_DEATHS = 3


class TemplateFault(Exception):
    """A template refused its messages, or was stopped; the message says why."""


class TemplateProcess:
    """Renders one chat template; the process is started by the first rendering. Threads may share it.

    A template is a program by the publisher of the model. It may use 3 s of CPU time, of which each rendering restores
    0.1 s, and 1 GiB of memory. Its text may be eight times as long as its input plus one million characters. After
    three processes had to be stopped, every rendering raises `TemplateFault`.
    """

    def __init__(self, template: str, max_cpu_seconds: float = MAX_CPU_SECONDS):
        self._template, self._max_cpu_seconds = template, max_cpu_seconds
        self._lock = threading.Lock()
        self._worker: _Worker | None = None
        self._deaths = 0

    def render(self, context: Mapping[str, Any]) -> str:
        """Return the text for the variables in `context`.

        Raises:
            TemplateFault: if the template refuses them or exceeds a bound, or if they can't be written as JSON.
        """
        try:
            request = json.dumps(context, default=str).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise TemplateFault(f"the messages can't be written as JSON ({error})") from error
        with self._lock:
            if self._deaths >= MAX_DEATHS:
                raise TemplateFault(f"it had to be stopped {MAX_DEATHS} times")
            worker = self._worker = self._worker or _Worker(self._template, self._max_cpu_seconds)
            try:
                answer = worker.ask(request)
            except (OSError, EOFError) as error:
                self._worker, self._deaths = None, self._deaths + 1
                raise TemplateFault(worker.end_text(error)) from error
        if "fault" in answer:
            raise TemplateFault(answer["fault"])
        return str(answer["text"])


class _Worker:
    """One process, which is killed when this object is garbage-collected."""

    def __init__(self, template: str, max_cpu_seconds: float):
        self._max_cpu_seconds = max_cpu_seconds
        here, there = socket.socketpair()
        with there:
            paths = json.dumps([str(path) for path in sys.path])
            program = str(Path(__file__).with_name("template_worker.py"))
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", program, paths, str(there.fileno()), str(max_cpu_seconds)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(there.fileno(),),
                process_group=0,  # no Ctrl-C from the terminal
            )
        here.settimeout(WAIT_SECONDS)
        self._connection, self._answers = here, here.makefile("rb")
        self._end = weakref.finalize(self, _end, self._process, here, self._answers)
        self._first = json.dumps(template).encode() + b"\n"

    def ask(self, request: bytes) -> dict[str, Any]:
        """Send a request and return its answer; raises `OSError` or `EOFError` if there is none."""
        self._connection.sendall(self._first + request)
        self._first = b""
        line = self._answers.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end_text(self, error: Exception) -> str:
        """End the process and return why it gave no answer."""
        if isinstance(error, TimeoutError):
            self._end()
            return f"it gave no text within {WAIT_SECONDS:g} s and was stopped"
        try:
            code = self._process.wait(WAIT_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        self._end()
        if code == -signal.SIGPROF:
            return f"it was stopped after {self._max_cpu_seconds:g} s of CPU time; it seems to loop for ever"
        return f"its process ended ({'exit code' if code is None or code >= 0 else 'signal'} {abs(code or 0)})"


def _end(process: subprocess.Popen[bytes], connection: socket.socket, answers: BinaryIO) -> None:
    process.kill()
    process.wait()
    answers.close()
    connection.close()
