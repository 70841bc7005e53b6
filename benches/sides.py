"""Run several programs over the same work in turns, each in a process of its own, and report ratios.

A side that is not at work is stopped (SIGSTOP). A *side* is a bench script started with `--side NAME`: it prepares, then answers each work order (a JSON line on its
standard input) with one JSON line. Sides run one at a time and in turns, so that a slow minute of a shared machine
hits all of them; what is compared is the median over the turns. A peer that needs other packages runs under another
Python, given by a flag.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

START_SECONDS = 600.0
TURN_SECONDS = 900.0
REST_SECONDS = 0.3
"""Between turns: let the machine settle."""

Work = dict[str, Any]
Answer = dict[str, Any]


class Side:
    """One program under test, in a process of its own."""

    def __init__(self, name: str, script: Path, python: str = sys.executable, env: Mapping[str, str] | None = None):
        self.name = name
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the side)
        self._process = subprocess.Popen(
            [python, str(script), "--side", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **(env or {})},
            bufsize=0,
            start_new_session=True,
        )
        self._answer(START_SECONDS, "start")
        self._signal(signal.SIGSTOP)

    def run(self, work: Work) -> Answer:
        """Have the side do one piece of work; its answer must have the key `seconds`."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps(work).encode() + b"\n")
        try:
            return self._answer(TURN_SECONDS, f"finish {work}")
        finally:
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def _signal(self, number: int) -> None:
        """To the side and all its processes: a peer's workers may spin while they wait, which others would feel."""
        with contextlib.suppress(ProcessLookupError):  # it may have ended by itself
            os.killpg(self._process.pid, number)

    def _answer(self, seconds: float, what: str) -> Answer:
        """The next JSON line of the side; other lines it prints are passed over."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + seconds
        line = b""
        while time.monotonic() < deadline:
            if not select.select([self._process.stdout], [], [], 1.0)[0]:
                continue
            byte = self._process.stdout.read(1)
            if not byte:
                self._log.seek(0)
                raise SystemExit(f"side {self.name} ended before it could {what}:\n{self._log.read()[-3000:]}")
            if byte != b"\n":
                line += byte
                continue
            if line.startswith(b'{"'):
                return json.loads(line)
            line = b""
        raise SystemExit(f"side {self.name} took more than {seconds:g} s to {what}")


def serve(prepare: Callable[[], Callable[[Work], Answer]]) -> None:
    """Be a side: prepare, then work off the orders; the peak memory of this process joins every answer."""
    import resource

    out = os.fdopen(os.dup(1), "w")  # libraries print to standard output as they like
    os.dup2(2, 1)
    work_off = prepare()
    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:
        answer = work_off(json.loads(line))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(json.dumps({"peak_gib": peak, **answer}), file=out, flush=True)


def take_turns(sides: Sequence[Side], works: Sequence[Work]) -> dict[str, list[Answer]]:
    """Every side does every piece of work, in turns."""
    answers: dict[str, list[Answer]] = {side.name: [] for side in sides}
    for turn, work in enumerate(works):
        order = sides if turn % 2 == 0 else list(reversed(sides))
        for side in order:
            time.sleep(REST_SECONDS)
            answers[side.name].append(side.run(work))
    return answers


def median(answers: Sequence[Answer], key: str = "seconds") -> float:
    return statistics.median(answer[key] for answer in answers)


def report(bench: str, work: str, ours: Mapping[str, float], peers: Mapping[str, Mapping[str, float]]) -> None:
    """Print the last line of a bench: one JSON object; `ratios` are peer seconds over ours, more than 1 is faster."""
    ratios = {name: round(values["seconds"] / ours["seconds"], 3) for name, values in peers.items()}
    rounded = [{k: round(v, 4) for k, v in values.items()} for values in (ours, *peers.values())]
    line = {"bench": bench, "work": work, "ours": rounded[0], "peers": dict(zip(peers, rounded[1:], strict=True))}
    print(json.dumps({**line, "ratios": ratios}))
