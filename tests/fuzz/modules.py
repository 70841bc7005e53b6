"""Modules of the user that raise, exit, hang, or give back what nobody asked for."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tests.fuzz.case import Bench, Case, Words

AT_IMPORT: dict[str, str] = {
    "syntax": "def (",
    "indentation": "  x = 1\n y = 2",
    "raises": "raise ValueError('\\x1b[31mred\\nsecond line')",
    "raises without a text": "raise ValueError",
    "raises a class of its own": "class Odd(Exception):\n    def __str__(self): raise RuntimeError\nraise Odd",
    "base exception": "raise BaseException('no')",
    "keyboard interrupt": "raise KeyboardInterrupt",
    "generator exit": "raise GeneratorExit",
    "exits": "import sys; sys.exit(0)",
    "exits with a text": "import sys; sys.exit('bye')",
    "exits with a number": "import sys; sys.exit(7)",
    "ends the process": "import os; os._exit(0)",
    "kills itself": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "recursion": "def f(): f()\nf()",
    "memory": "x = bytearray(1 << 60)",
    "missing import": "import no_such_module",
    "relative import": "from . import x",
    "imports itself": "import user",
    "prints": "print('\\x1b[31mhello\\x07')",
    "closes stdout": "import sys; sys.stdout.close()",
    "changes folder": "import os; os.chdir('/')",
    "changes streams": "import sys; sys.stderr = sys.stdout = None",
    "nul": "x = 1\x00",
    "not utf-8": "x = '\udcff'",
    "empty": "",
    "segfault": "import ctypes; ctypes.string_at(0)",
    "leaves a process": "import subprocess; subprocess.Popen(['sleep', '300'])",
    "leaves a session": "import subprocess; subprocess.Popen(['sleep', '300'], start_new_session=True)",
    "leaves a thread": "import threading, time; threading.Thread(target=lambda: time.sleep(300)).start()",
    "sets a signal": "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)",
    "hooks the exit": "import atexit; atexit.register(lambda: 1 / 0)",
    "changes the recursion limit": "import sys; sys.setrecursionlimit(50)",
}

BODIES: dict[str, str] = {
    "returns None": "return None",
    "returns text": "return 'x'",
    "returns nan": "return float('nan')",
    "returns infinity": "return float('inf')",
    "returns a huge integer": "return 10 ** 400",
    "returns a list": "return [1]",
    "returns an empty list": "return []",
    "returns a dict": "return {'\\x1b[31m': 1}",
    "returns a dict of text": "return {'a': 'b'}",
    "returns an empty dict": "return {}",
    "returns itself": "return reward",
    "returns a complex": "return 1j",
    "returns bytes": "return b'x'",
    "returns a deep list": "x = []\n    for _ in range(100000): x = [x]\n    return x",
    "returns gigabytes": "return 'x' * (1 << 40)",
    "raises": "raise ValueError('\\x1b[31mred\\nsecond')",
    "raises a base exception": "raise BaseException('no')",
    "raises a keyboard interrupt": "raise KeyboardInterrupt",
    "raises stop iteration": "raise StopIteration",
    "raises cancelled": "import asyncio; raise asyncio.CancelledError",
    "raises recursion": "f = lambda: f(); return f()",
    "exits": "import sys; sys.exit(0)",
    "ends the process": "import os; os._exit(0)",
    "kills itself": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "segfaults": "import ctypes; return ctypes.string_at(0)",
    "hangs": "import time; time.sleep(600)",
    "hangs busy": "while True: pass",
    "hangs and ignores": "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)",
    "prints": "print('\\x1b[31mred\\x07'); return 1.0",
    "prints a lot": "print('x' * 1000000); return 1.0",
    "closes stdout": "import os; os.close(1); return 1.0",
    "closes everything": "import os; os.closerange(0, 100); return 1.0",
    "leaves a process": "import subprocess; subprocess.Popen(['sleep', '300']); return 1.0",
    "leaves a session": "import subprocess; subprocess.Popen(['sleep', '300'], start_new_session=True); return 1.0",
}

SIGNATURES: dict[str, str] = {
    "no parameters": "def reward(): return 1.0",
    "five parameters": "def reward(a, b, c, d, e): return 1.0",
    "keywords only": "def reward(*, nope): return 1.0",
    "generator": "def reward(sample): yield 1.0",
    "async generator": "async def reward(sample): yield 1.0",
    "async": "async def reward(sample): return 1.0",
    "async that hangs": "async def reward(sample):\n    import asyncio; await asyncio.sleep(600)",
    "async that blocks": "async def reward(sample):\n    import time; time.sleep(600)",
    "async that exits": "async def reward(sample):\n    import sys; sys.exit(0)",
    "async that raises": "async def reward(sample): raise ValueError('\\x1b[31m')",
    "class": "class reward: pass",
    "class that needs a value": "class reward:\n    def __init__(self, x): pass",
    "number": "reward = 1",
    "text": "reward = 'x'",
    "None": "reward = None",
    "module": "import os as reward",
    "lambda": "reward = lambda *a, **k: 1.0",
    "missing": "other = 1",
    "callable that raises on lookup": "class M:\n    def __getattr__(self, n): raise RuntimeError(n)\nreward = M()",
}

KINDS: dict[str, dict[str, Any]] = {
    "reward": {"--custom-rm-path": "user.py:reward", "--rm-type": None},
    "environment": {"--custom-env-path": "user.py:reward", "--env-max-turns": "2"},
    "filter": {"--group-filter": "user.py:reward"},
    "advantage": {"--custom-advantage-path": "user.py:reward"},
    "loss": {"--custom-loss-path": "user.py:reward"},
    "data": {"--prompt-data": "user.py:reward"},
}
SHORT = {"--rm-timeout-seconds": "0.5", "--env-timeout-seconds": "0.5", "--rollout-timeout-seconds": "5"}
IN_THE_MAIN_PROCESS = ("loss", "advantage", "filter", "data")
"""Kinds that run in the main process: loops, processes, threads and output of theirs are the user's own."""
DEADLY = ("kills itself", "segfault", "changes streams", "closes stdout", "closes everything", "ends the process")


def cases() -> Iterator[Case]:
    """Every kind of module × what goes wrong at import, in a call, and in its signature."""
    for number, kind in enumerate(KINDS):
        for i, (name, code) in enumerate(AT_IMPORT.items()):
            if name.startswith(("leaves", "prints")) and (kind in IN_THE_MAIN_PROCESS or "thread" in name):
                continue
            if kind == "reward" or (i + number) % 3 == 0:
                yield _case(kind, f"import {name}", f"{code}\ndef reward(*a, **k):\n    return 1.0\n")
        for i, (name, body) in enumerate(BODIES.items()):
            if name.startswith(("hangs", "leaves", "prints")) and kind in IN_THE_MAIN_PROCESS:
                continue
            if kind in ("reward", "environment") or (i + number) % 3 == 0:
                yield _case(kind, f"call {name}", f"def reward(*a, **k):\n    {body}\n")
        for i, (name, code) in enumerate(SIGNATURES.items()):
            if kind == "reward" or (i + number) % 2 == 0:
                yield _case(kind, f"form {name}", f"{code}\n")


def _case(kind: str, name: str, code: str) -> Case:
    faulty = name in ("import syntax", "import raises", "import missing import", "form missing", "form None")
    deadly = name.partition(" ")[2].startswith(DEADLY)
    return Case(f"modules/{kind} {name}", partial(_make, kind, code), faulty, deadly)


def _make(kind: str, code: str, folder: Path, bench: Bench) -> Words:
    if kind == "reward":
        code = code.replace("(*a, **k)", "(sample)")  # else it is taken for a function of a whole group
    (folder / "user.py").write_text(code, errors="surrogateescape")
    return bench.words("train", KINDS[kind] | SHORT)
