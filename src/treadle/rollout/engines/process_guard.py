"""Run a server, and kill it and everything that it started when the process that started the guard ends.

An interpreter runs this file with the server's command as arguments and a pipe as standard input. The pipe closes when its
other end is closed or its process dies, in whichever way. The guard must lead a process group of its own. A second process
watches the guard itself: Ray kills the direct children of a worker that ends before they can do anything.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading


def main(command: list[str]) -> None:
    """Run until the command or the pipe ends, then kill the whole process group, this process included."""
    assert os.getpgrp() == os.getpid(), "start the guard in a session of its own"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _watch_guard()
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    except OSError as error:
        os.write(2, f"can't run {command[0]}: {error.strerror}\n".encode())
        return

    def report() -> None:
        code = child.wait()
        os.write(2, f"the server ended with exit code {code}\n".encode())
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=report, daemon=True).start()
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGKILL)


def _watch_guard() -> None:
    """Fork a process that kills the group when this process ends."""
    ours, theirs = os.pipe()  # the server does not inherit them
    if os.fork():
        os.close(ours)
        return  # `theirs` stays open as long as this process lives
    os.close(theirs)
    os.read(ours, 1)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
