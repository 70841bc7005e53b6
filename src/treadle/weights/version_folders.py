"""A folder of weight versions on disk. Each version is complete or absent, and old versions are removed.

    <folder>/
        .lock                locked while the writer lives: one writer at a time
        v00000007/           one version
            …                its files
            manifest.json    version, digest, base, and size and xxh3-128 of every file; written last

When a writer starts, it removes the versions that an earlier writer left.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError

from treadle.errors import ConfigError, EngineError
from treadle.storage.folder_lock import FolderLock
from treadle.storage.manifest import MANIFEST, Entries, commit_folder, entries_of, fault_of_file

GIB = 2**30


@dataclass(frozen=True)
class Base:
    """The version that a delta builds on, and the digest of its weights."""

    version: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """What a version folder holds: all weights, or the changes since `base`. `digest` is the digest of the weights."""

    version: int
    digest: str
    base: Base | None
    files: Entries


class VersionWriter:
    """Writes versions into a folder, which it locks until it is closed."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._bases: dict[int, int | None] = {}  # by version
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = FolderLock(folder, lambda _: None)
        except OSError as error:
            raise EngineError(f"{folder} can't be written ({error.strerror}); give another folder") from error
        except ConfigError as error:
            raise EngineError(f"can't write weights: {error}") from error
        self._is_open = True
        self._remove_versions()

    def write(
        self, version: int, write_files: Callable[[Path], str], num_bytes: int, base: Base | None = None
    ) -> Manifest:
        """Write one version.

        Args:
            version: its number; a version with the same number is replaced.
            write_files: writes the files into the folder it is given and returns the digest of the weights.
            num_bytes: the free space that the files need.
            base: the version that a delta builds on.
        Returns:
            The manifest.
        Raises:
            EngineError: if there is no room or the files can't be written.
        """
        work, target = self.folder / f".{name_of(version)}", self.folder / name_of(version)
        try:
            self._refuse_without_room(version, num_bytes)
            work.mkdir(mode=0o700)
            digest = write_files(work)
            manifest = Manifest(version, digest, base, entries_of(work))
            (work / MANIFEST).write_text(json.dumps(asdict(manifest)))
            shutil.rmtree(target, ignore_errors=True)  # the same version, sent again
            commit_folder(work, target)
            self._bases[version] = None if base is None else base.version
        except (OSError, SafetensorError) as error:
            raise EngineError(
                f"version {version} can't be written to {self.folder} ({error}); free some space or give another folder"
            ) from error
        finally:
            shutil.rmtree(work, ignore_errors=True)
        return manifest

    def _refuse_without_room(self, version: int, num_bytes: int) -> None:
        free = shutil.disk_usage(self.folder).free
        if free < num_bytes:
            raise EngineError(
                f"{self.folder} has {free / GIB:.2f} GiB free, version {version} needs {num_bytes / GIB:.2f} GiB; "
                "free some space or give another folder"
            )

    def keep(self, newest: int) -> None:
        """Remove all but the `newest` last versions and those that they build on."""
        kept = set(sorted(self._bases)[-newest:])
        oldest: int | None = min(kept, default=None)
        while oldest is not None:
            kept.add(oldest)
            oldest = self._bases[oldest]
        for version in self._bases.keys() - kept:
            shutil.rmtree(self.folder / name_of(version), ignore_errors=True)
            del self._bases[version]

    def _remove_versions(self) -> None:
        for path in (*self.folder.glob("v*"), *self.folder.glob(".v*")):
            if path.name.lstrip(".")[1:].isdigit():
                shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Remove every version, and the folder if nothing else is in it. May be called twice."""
        if not self._is_open:
            return
        self._is_open = False
        self._remove_versions()
        self._lock.close()
        with suppress(OSError):  # it has other files, or was removed
            self.folder.rmdir()


def name_of(version: int) -> str:
    """Return the folder name of a version."""
    return f"v{version:08d}"


def list_versions(folder: Path) -> list[int]:
    """Return the complete versions in the folder, oldest first."""
    return sorted(int(path.name[1:]) for path in folder.glob("v*") if path.name[1:].isdigit())


def read_manifest(folder: Path, version: int) -> Manifest:
    """Return the manifest of a version; raise `EngineError` if it is missing or damaged."""
    path = folder / name_of(version) / MANIFEST
    try:
        data = json.loads(path.read_text())
        base = None if data["base"] is None else Base(int(data["base"]["version"]), str(data["base"]["digest"]))
        files = {
            str(name): {"bytes": int(e["bytes"]), "xxh3_128": str(e["xxh3_128"])} for name, e in data["files"].items()
        }
        if not files:
            raise ValueError("it lists no files")
        found = Manifest(int(data["version"]), str(data["digest"]), base, files)
    except OSError as error:
        raise EngineError(
            f"version {version} is not in {folder} ({error.strerror}); push it again, or keep more versions"
        ) from error
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise EngineError(f"{path} is damaged ({error!r}); push version {version} again") from error
    if found.version != version or (base is not None and base.version >= version):
        raise EngineError(
            f"{path} is damaged: it describes version {found.version} based on {found.base}; "
            f"push version {version} again"
        )
    return found


def file_paths(folder: Path, manifest: Manifest) -> list[Path]:
    """Return the paths of a version's files."""
    return [folder / name_of(manifest.version) / Path(name).name for name in manifest.files]


def check_files(folder: Path, manifest: Manifest) -> list[Path]:
    """Return the paths of a version's files; raise `EngineError` if a file differs from its entry in the manifest."""
    paths = file_paths(folder, manifest)
    for path, entry in zip(paths, manifest.files.values(), strict=True):
        if fault := fault_of_file(path, entry):
            raise EngineError(f"{path} is damaged: it {fault}; push version {manifest.version} again")
    return paths


def is_sound(folder: Path, version: int) -> bool:
    """Return True if a version is in the folder and its files match its manifest."""
    try:
        check_files(folder, read_manifest(folder, version))
    except EngineError:
        return False
    return True
