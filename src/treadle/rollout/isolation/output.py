"""What a worker and the programs it starts print: shown on stderr line by line, with control characters shown as text.

User code prints what models said, and a model's text may hold anything a terminal obeys.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator

from treadle.printable_text import visible_line

_MAX_LINE_BYTES = 1 << 16


class WorkerOutput:
    """A pipe and the thread that shows what comes through it."""

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()
        self._thread = threading.Thread(target=self._show, name="treadle-worker-output", daemon=True)

    @contextlib.contextmanager
    def writing(self) -> Iterator[int]:
        """Give the end to write to, for the worker to inherit; what is written is shown from the end of the `with` on."""
        try:
            yield self._writing
        finally:
            os.close(self._writing)
            self._thread.start()

    def finish(self, seconds: float) -> None:
        """Wait until all that was printed is shown; called when the worker has ended."""
        self._thread.join(seconds)

    def _show(self) -> None:
        with os.fdopen(self._reading, "rb") as file:
            while line := file.readline(_MAX_LINE_BYTES):
                text = visible_line(line.decode(errors="replace").removesuffix("\n"))
                with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr is closed, or there is none
                    sys.stderr.write(text + "\n")
                    sys.stderr.flush()
