"""The process that runs a chat template, a program that came with a model: bounded in CPU time and memory.

It is started by path (`template_process.py`) and imports nothing of Treadle. The first line that it reads is the
template. Each further line is the context of a rendering in JSON, which it answers with a JSON line that holds the
text. The environment is that in which transformers renders chat templates; a test compares them.
"""

from __future__ import annotations

import json
import resource
import signal
import socket
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any

MAX_CPU_SECONDS = 3.0
REGAINED_CPU_SECONDS = 0.1  # with each rendering
MAX_BYTES = 1 << 30
MAX_OWN_CHARACTERS = 1 << 20
MAX_GROWTH = 8


def main() -> None:
    """Answer requests on a socket until the other side closes it.

    Its command-line arguments are `sys.path` in JSON, the descriptor of the socket, and the CPU time in seconds.
    """
    sys.path[:] = json.loads(sys.argv[1])
    connection, most_seconds = socket.socket(fileno=int(sys.argv[2])), float(sys.argv[3])
    make_environment()  # imports jinja2 before memory is bounded
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, inside C code as well
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    most_bytes = _address_space() + MAX_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, most_seconds)
    lines = connection.makefile("rb")
    template = lines.readline()
    render: Callable[..., Any] | None = None
    for line in lines:
        left, _ = signal.getitimer(signal.ITIMER_PROF)
        signal.setitimer(signal.ITIMER_PROF, min(most_seconds, left + REGAINED_CPU_SECONDS))
        try:
            if render is None:
                render = make_environment().from_string(json.loads(template)).generate
            answer = {"text": _joined(render(**json.loads(line)), MAX_OWN_CHARACTERS + MAX_GROWTH * len(line))}
        except MemoryError:
            answer = {"fault": f"it needs more than {MAX_BYTES >> 20} MiB of memory"}
        except Exception as error:  # templates raise what they like
            answer = {"fault": str(error) or type(error).__name__}
        connection.sendall(json.dumps(answer).encode() + b"\n")


def _address_space() -> int:
    """Return the bytes that the interpreter has mapped; allocators may reserve much more than they use."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _joined(pieces: Any, limit: int) -> str:
    kept: list[str] = []
    for piece in pieces:
        kept.append(piece)
        limit -= len(piece)
        if limit < 0:
            raise ValueError("it makes far more text than the messages hold")
    return "".join(kept)


def make_environment() -> Any:
    """Make the Jinja environment of chat templates."""
    import jinja2.ext
    import jinja2.nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """`{% generation %}`, which marks an assistant's message and renders as its body."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

        def _body(self, caller: Callable[[], str]) -> str:
            return caller()

    def raise_exception(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


if __name__ == "__main__":
    main()
