"""A folder that is written for the first time: whole, or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from treadle.errors import ConfigError, first_line


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield an empty folder beside `out`, which becomes `out` unless the context raises; then it is removed.

    Raises:
        ConfigError: if `out` exists and is not an empty folder, or can't be written.
    """
    out = out.absolute()
    try:
        if os.path.lexists(out) and not out.is_dir():
            raise ConfigError(f"{str(out)!r} is not a folder; choose another one")
        if out.exists() and any(out.iterdir()):
            raise ConfigError(f"{str(out)!r} is not empty; choose another folder")
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name[:100]}-", dir=out.parent) as work:
            folder = Path(work) / "model"  # with the usual mode; the temporary folder is private
            folder.mkdir()
            yield folder
            if out.exists():
                out.rmdir()
            os.replace(folder, out)
    except OSError as error:
        reason = error.strerror or first_line(error)
        raise ConfigError(f"{str(out)!r} can't be written ({reason}); choose another folder") from error
