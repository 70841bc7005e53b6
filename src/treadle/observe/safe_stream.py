"""A text stream whose write errors don't end the run."""

from __future__ import annotations

from typing import TextIO


class SafeStream:
    """Writes what the stream's encoding can hold, and nothing more after the first error.

    After a terminal was closed, or `head` has ended, the next write raises. The run must go on.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._gone = False
        self.encoding: str = stream.encoding or "utf-8" if hasattr(stream, "encoding") else "utf-8"

    @property
    def holds_unicode(self) -> bool:
        return self.encoding.lower().replace("-", "").startswith("utf")

    def write(self, text: str) -> int:
        if not self._gone:
            try:
                self._stream.write(text.encode(self.encoding, "replace").decode(self.encoding))
            except (OSError, ValueError):
                self._gone = True
        return len(text)

    def flush(self) -> None:
        if not self._gone:
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self._gone = True

    def isatty(self) -> bool:
        try:
            return self._stream.isatty()
        except ValueError:  # the stream is closed
            return False

    def fileno(self) -> int:
        return self._stream.fileno()
