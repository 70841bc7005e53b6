"""What a worker has to say to the person who watches the run."""

from __future__ import annotations

Note = tuple[str, str]
"""Kind, `warn` or `note`, and text."""


class Notes:
    """Warnings and notes of a worker, kept until the driver takes them."""

    def __init__(self) -> None:
        self._lines: list[Note] = []

    def warn(self, text: str) -> None:
        self._lines.append(("warn", text))

    def note(self, text: str) -> None:
        self._lines.append(("note", text))

    def take(self) -> list[Note]:
        """What was said since the last time."""
        lines, self._lines = self._lines, []
        return lines
