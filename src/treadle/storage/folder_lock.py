"""A lock on a folder that is released when its process ends in any way, and that names its holder."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar

from treadle.errors import ConfigError
from treadle.storage.regular_file import read_regular

FILE = ".lock"


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Lock an open file, alone or `shared` with other readers; return False if another holder prevents it.

    The lock ends with `unlock`, or when the last duplicate of the descriptor is closed.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(descriptor: int) -> None:
    """Release what `try_lock` locked."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)


class FolderLock:
    """A lock of this process on a folder; child and forked processes do not keep it."""

    _held: ClassVar[set[int]] = set()  # descriptors, which a forked child must close

    def __init__(self, folder: Path, warn: Callable[[str], None]):
        """Lock a folder, which must exist.

        On a file system without locks it warns and locks nothing. Raises `ConfigError` if the folder can't be written,
        or if another process has the lock; the message names that process.
        """
        self.path = folder / FILE
        self._descriptor = -1
        while not self._is_own_file():  # a holder that ended meanwhile has removed the file
            self._close()
            self._descriptor = self._open(folder)
            self._lock(folder, warn)
        FolderLock._held.add(self._descriptor)
        with suppress(OSError):  # the holder is written for people only
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, json.dumps(_this_process()).encode(), 0)

    def close(self) -> None:
        """Release the lock; may be called twice."""
        if self._descriptor < 0:
            return
        if self._is_own_file():
            self.path.unlink(missing_ok=True)
        FolderLock._held.discard(self._descriptor)
        self._close()

    def _open(self, folder: Path) -> int:
        flags = os.O_CREAT | os.O_CLOEXEC
        try:
            try:
                return os.open(self.path, os.O_RDWR | flags, 0o666)
            except PermissionError:  # another user's file in a folder of a group
                if not self.path.exists():
                    raise
                return os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"{folder} can't be written ({error.strerror}); give another folder") from error

    def _lock(self, folder: Path, warn: Callable[[str], None]) -> None:
        try:
            is_locked = try_lock(self._descriptor)
        except OSError as error:
            warn(f"{folder} is on a file system without locks ({error.strerror}); make sure that no other run uses it")
            return
        if not is_locked:
            self._close()
            raise ConfigError(
                f"{folder} is in use by {_holder(self.path)}; wait until it has ended, or give another folder"
            )

    def _is_own_file(self) -> bool:
        """True if the open file is the one in the folder."""
        if self._descriptor < 0:
            return False
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self.path))
        except OSError:
            return False

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    @classmethod
    def _after_fork(cls) -> None:
        for descriptor in cls._held:
            with suppress(OSError):
                os.close(descriptor)
        cls._held = set()


os.register_at_fork(after_in_child=FolderLock._after_fork)


def _this_process() -> dict[str, Any]:
    """Describe this process without its flags, some of which are secret."""
    words = takewhile(lambda word: not word.startswith("-"), sys.argv[1:])
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": datetime.now().isoformat(" ", "seconds"),
        "command": " ".join([Path(sys.argv[0]).name if sys.argv else "python", *words]),
    }


def _holder(path: Path) -> str:
    """Return the holder of a lock in words."""
    try:
        found = json.loads(read_regular(path, most=1 << 16))
        words = f"process {int(found['pid'])} on {found['host']} ({found['command']}, since {found['since']})"
    except (OSError, ValueError, RecursionError, TypeError, KeyError):
        return "another run"
    return words if words.isprintable() and len(words) < 500 else "another run"
