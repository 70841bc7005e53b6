"""Folders that are complete or not there: written under another name, listed in a manifest, synced, then renamed.

A manifest has the size and the xxh3-128 of every file of a folder; it is written last.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import xxhash

MANIFEST = "manifest.json"
_CHUNK_BYTES = 1 << 24

Entries = dict[str, dict[str, Any]]
"""The `bytes` and `xxh3_128` of each file, by its path below the folder."""


def entries_of(folder: Path) -> Entries:
    """Return the manifest's entries of all files in a folder and below."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {
        file.relative_to(folder).as_posix(): {"bytes": file.stat().st_size, "xxh3_128": digest_of_file(file)}
        for file in files
    }


def fault_of_file(file: Path, entry: object) -> str:
    """Return how a file differs from its entry in the manifest, or an empty string."""
    match entry:
        case {"bytes": int(size), "xxh3_128": str(digest)}:
            pass
        case _:
            return f"has a malformed entry in {MANIFEST}"
    try:
        if not file.is_file():
            return "is missing"
        found = file.stat().st_size
        if found != size:
            return f"has {found} bytes, expected {size}"
        return "" if digest_of_file(file) == digest else "does not match its checksum"
    except OSError as error:
        return f"can't be read ({error.strerror})"


def digest_of_file(file: Path) -> str:
    """Return the xxh3-128 of a file's bytes."""
    state = xxhash.xxh3_128()
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            state.update(chunk)
    return state.hexdigest()


def commit_folder(work: Path, target: Path, aside: Path | None = None) -> None:
    """Sync a folder with all its contents and rename it to `target`; an existing one is moved `aside` first."""
    for path in (*work.rglob("*"), work):
        if path.is_file() or path.is_dir():
            sync(path)
    if aside is not None and target.exists():
        os.replace(target, aside)
    os.replace(work, target)
    sync(target.parent)


def sync(path: Path) -> None:
    """Flush a file or a folder to disk, so that it survives a crash of the machine."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():  # some network file systems can't do this to folders
            raise
    finally:
        os.close(descriptor)
