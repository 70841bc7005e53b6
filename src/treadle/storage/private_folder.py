"""Folders that no other user of the machine can put a file into, and the cache of this user.

Compiled code is loaded from its folder: another user who can write there, or could make the folder first, would run
code as this user.
"""

from __future__ import annotations

import atexit
import functools
import getpass
import os
import shutil
import stat
import tempfile
import warnings
from pathlib import Path

_ROOT = 0


class UnsafeFolderError(OSError):
    """A folder that another user owns or can write to."""


def cache_folder() -> Path:
    """Return `$TREADLE_CACHE`, or `treadle` in the user's cache folder."""
    named, of_user = os.environ.get("TREADLE_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if named:
        return Path(named)
    return (Path(of_user) if of_user else Path.home() / ".cache") / "treadle"


def private_folder(path: Path) -> Path:
    """Return a folder that only this user can put files into; it is made, with mode 0700, if it is missing.

    The folders above it may be writable by others only with the sticky bit, as `/tmp` has it.

    Raises:
        UnsafeFolderError: if the folder, or one above it, can be changed by another user.
        OSError: if it can't be made.
    """
    path = Path(os.path.abspath(path))
    for folder in (*reversed(path.parents), path):
        if not os.path.lexists(folder):
            folder.mkdir(mode=0o700, exist_ok=True)
    path = path.parent.resolve() / path.name  # a link above it is judged by where it leads
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise UnsafeFolderError(f"{path} is no folder, or a link to one")
    if found.st_uid not in (os.geteuid(), _ROOT):
        raise UnsafeFolderError(f"{path} belongs to another user")
    if found.st_mode & 0o022:
        raise UnsafeFolderError(f"{path} can be written by other users")
    trusted = (os.geteuid(), _ROOT, Path("/").stat().st_uid)
    for above in path.parents:
        found = above.stat()
        if found.st_uid not in trusted or (found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX):
            raise UnsafeFolderError(f"{path} can be replaced by other users, who can change {above}")
    return path


def private_cache(name: str) -> Path | None:
    """Return the folder `name` of the cache, or None if it can't be made.

    It also warns and returns None if other users can change the folder.
    """
    try:
        return private_folder(cache_folder() / name)
    except UnsafeFolderError as error:
        warnings.warn(
            f"compiled code is not kept: {error}; delete that folder, or set TREADLE_CACHE to one of your own",
            stacklevel=2,
        )
        return None
    except (OSError, RuntimeError):  # no home, or none that can be written to
        return None


@functools.cache
def compile_cache() -> Path:
    """Return the private folder of what torch compiles, in place of torch's own, whose name all users know."""
    folder = private_cache("inductor")
    if folder is None or not os.access(folder, os.W_OK):
        folder = Path(tempfile.mkdtemp(prefix="treadle-inductor-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def compile_variables() -> dict[str, str]:
    """Return environment variables that make torch in another program keep what it compiles private.

    Its precompiled headers stay in the shared folder and are turned off unless this user owns that folder.
    """
    found = {"TORCHINDUCTOR_CACHE_DIR": str(compile_cache())}
    try:
        private_folder(Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}")
    except (OSError, KeyError):
        found["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] = "0"
    return found
