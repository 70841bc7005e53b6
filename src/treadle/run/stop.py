"""Stopping a run from outside: SIGTERM, SIGHUP and Ctrl-C end it at the next safe place, a second one at once."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from treadle.registry import end_process

Result = TypeVar("Result")

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_SHOW_CURSOR = b"\x1b[?25h\n"


class Stop:
    """A request to stop; `signum` is the signal that made it, None if there is none."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self._asked = asyncio.Event()

    @property
    def requested(self) -> bool:
        return self.signum is not None

    @property
    def always_saves(self) -> bool:
        """True if the machine or the terminal goes away: the run is saved even if no checkpoints were asked for."""
        return self.signum in (signal.SIGTERM, signal.SIGHUP)

    def request(self, signum: int) -> None:
        self.signum = signum
        self._asked.set()

    async def unless(self, task: asyncio.Task[Result]) -> Result | None:
        """Return the task's result, or None if a stop is requested first: the task is then cancelled and has ended."""
        waiting = asyncio.create_task(self._asked.wait())
        try:
            await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            waiting.cancel()
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


@contextmanager
def stops_on_signals(stop: Stop, note: Callable[[str], None]) -> Iterator[None]:
    """Have SIGTERM, SIGHUP and SIGINT request the stop, and a second one end the process; `note` shows the first.

    A SIGHUP that the process was started to ignore, as by `nohup`, stays ignored. Signals reach the main thread only:
    elsewhere nothing is installed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()

    def handle(signum: int, _frame: object) -> None:
        if stop.requested:
            if sys.stdout.isatty():
                os.write(sys.stdout.fileno(), _SHOW_CURSOR)
            end_process(128 + signum)  # threads may be deep in a step: nothing gentler is immediate
        stop.signum = signum
        loop.call_soon_threadsafe(stop.request, signum)
        loop.call_soon_threadsafe(
            note, f"{signal.Signals(signum).name}: stopping at the next safe place; once more stops at once"
        )

    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()
    before = {signum: signal.signal(signum, handle) for signum in _SIGNALS if signum not in ignored}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def leave(signum: int | None) -> None:
    """End the program as the signal asks: `KeyboardInterrupt`, or exit code 143 for SIGTERM and 129 for SIGHUP.

    Do nothing for None.
    """
    if signum == signal.SIGINT:
        raise KeyboardInterrupt
    if signum is not None:
        raise SystemExit(128 + signum)
