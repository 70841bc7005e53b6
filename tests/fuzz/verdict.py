"""What is wrong with how a command ended: tracebacks, hangs, noise, wrong exit codes, processes left behind."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

from tests.fork_server import Done
from tests.fuzz.case import Case

MARK = "TREADLE_FUZZ_CASE"
"""Variable that every process of a case inherits, so that those it leaves behind are found."""

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_LISTED = re.compile(r"treadle: error: .*?(\d+) faults:")
_MOST_CHARACTERS = 3000


def problems(case: Case, done: Done) -> Iterator[str]:
    """What the command should not have done; nothing for a command that ended as it should."""
    output = done.stdout + done.stderr
    if done.code is None:
        yield f"hung for {done.seconds:.0f} s"
        return
    if "Traceback (most recent call last)" in output:
        yield "a traceback"
    elif "internal error" in output:
        yield "an internal error"
    if found := _CONTROL.search(output):
        yield f"control character {found[0]!r} in the output"
    if done.code == 0 and case.faulty:
        yield "exit code 0 for a faulty input"
    if case.deadly:
        return
    if done.code < 0:
        yield f"killed by {signal.Signals(-done.code).name}"
    elif done.code not in (0, 2):
        yield f"exit code {done.code}"
    elif done.code == 2:
        yield from _message_problems(done.stderr)


def _message_problems(stderr: str) -> Iterator[str]:
    """A refusal is `treadle: error: …` in one line, or a count of faults and then one line for each."""
    lines = [line for line in stderr.splitlines() if line]
    first = next((i for i, line in enumerate(lines) if line.startswith("treadle: error: ")), None)
    if first is None:
        yield "no line that begins with `treadle: error: `"
        return
    if noise := [line for line in lines[:first] if not line.startswith(("treadle: warning: ", "warning: "))]:
        yield f"a line that is no message of ours: {noise[0][:200]}"
    listed = _LISTED.match(lines[first])
    wanted = int(listed[1]) if listed else 0
    below = lines[first + 1 :]
    if len(below) != wanted or not all(line.startswith("  ") for line in below[:wanted]):
        yield f"{len(below)} lines below the error, where {wanted} were announced"
    if len(lines[first]) > _MOST_CHARACTERS:
        yield f"an error of {len(lines[first])} characters"
    if not lines[first].removeprefix("treadle: error: ").strip():
        yield "an error without a text"


def left_behind(mark: str, group: int) -> list[int]:
    """Processes of a case that has ended: of its group, or with its mark in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state_and_ids = (entry / "stat").read_text().rpartition(")")[2].split()
            marked = f"{MARK}={mark}\0".encode() in (entry / "environ").read_bytes()
        except OSError:  # it ended meanwhile, or belongs to another user
            continue
        if state_and_ids[0] != "Z" and (marked or int(state_and_ids[2]) == group):
            found.append(int(entry.name))
    return found


def end_processes(pids: list[int]) -> None:
    """Kill what a case left behind."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
