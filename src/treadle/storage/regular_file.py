"""Read files whose names come from outside: a pipe or a device in their place would block, or never end."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

NOT_REGULAR = "a pipe or a device, not a file"


def read_regular(path: Path, most: int | None = None) -> bytes:
    """Read a file that must be a regular one.

    Raises:
        OSError: if it can't be read, is a folder, a pipe or a device, or has more than `most` bytes.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # without the flag, a pipe waits for its writer
    with open(descriptor, "rb") as file:
        found = os.fstat(file.fileno())
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, NOT_REGULAR, str(path))
        if most is not None and found.st_size > most:
            raise OSError(errno.EFBIG, f"it has {found.st_size} bytes, more than {most}", str(path))
        return file.read()


def irregular_files(folder: Path) -> Iterator[Path]:
    """Return the entries of a folder that are neither files nor folders, links followed; none if it can't be read."""
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return
    for entry in entries:
        try:
            mode = entry.stat().st_mode
        except OSError:  # a dangling link; its reader reports it
            continue
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            yield entry
