"""Write a file so that a reader sees the old one or the whole new one, never a part."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from treadle.errors import TreadleError


def write_atomically(path: Path, chunks: Iterable[bytes], *, durable: bool = False) -> None:
    """Write chunks to a temporary file beside `path`, then rename it over `path`.

    If the machine crashes, a `durable` file is still the old or the new one. Raises `TreadleError` if the disk refuses
    (full, read-only, gone); `path` is then unchanged.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise TreadleError(
            f"{path} can't be written ({error.strerror}); free some space or give another folder"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
