"""The first process of each worker: it forks the worker, and ends all that the worker started when that ends.

Orphans of the worker become children of this process (a subreaper), also those that made a session of their own, so none
escapes. It exits as the worker did. It ends everything on SIGTERM and when the run's process is gone. Linux only:
elsewhere the worker runs alone, and only its process group ends with it.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import time
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36
_PARENT_CHECK_SECONDS = 1.0
_KILL_SECONDS = 8.0
_SIGNALS = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


def run_supervised(parent_pid: int, work: Callable[[], None]) -> None:
    """Fork a process that runs `work`, wait for its end, and end the same way; never returns."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    if sys.platform != "linux":
        work()
        os._exit(0)
    supervisor = os.getpid()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    worker = os.fork()
    if worker == 0:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == supervisor:
            os.setpgid(0, 0)  # a signal that the worker sends to its group stays there
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            work()
        os._exit(0)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # the worker's connection closes when the worker ends
    status = _wait(worker, parent_pid)
    _kill_descendants()
    _end_as(status)


def _wait(worker: int, parent_pid: int) -> int | None:
    """Return the wait status of the worker once it has ended, or None if it is to be ended."""
    while True:
        came = signal.sigtimedwait(_SIGNALS, _PARENT_CHECK_SECONDS)
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] == worker:
                    return found[1]
        if os.getppid() != parent_pid or (came is not None and came.si_signo == signal.SIGTERM):
            return None


def _kill_descendants() -> None:
    deadline = time.monotonic() + _KILL_SECONDS
    while time.monotonic() < deadline and (living := _descendants()):
        for pid in living:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.002)


def _descendants() -> list[int]:
    """Return the ids of all processes below this one."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
                children.setdefault(parent, []).append(int(name))
    found: list[int] = []
    level = [os.getpid()]
    while level:
        level = [child for pid in level for child in children.get(pid, [])]
        found += level
    return found


def _end_as(status: int | None) -> None:
    """End this process with the exit code or by the signal that ended the worker."""
    if status is not None and os.WIFSIGNALED(status):
        signum = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # SIGKILL has no handler to set
            signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signum})
        os.kill(os.getpid(), signum)
    os._exit(os.WEXITSTATUS(status) if status is not None and os.WIFEXITED(status) else 1)


def _prctl(option: int, value: int) -> None:
    import ctypes

    ctypes.CDLL(None).prctl(option, int(value), 0, 0, 0)
