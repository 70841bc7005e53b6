"""Checkpoints: one folder per save, written whole, then renamed.

    <save>/rollout_000012/
        model/                 a Hugging Face folder with the float32 master weights
        critic/                the same of a critic, with its value head and optimizer, where there is one
        reference.safetensors  a reference model's weights, where they move
        optimizer.safetensors  AdamW state by parameter name
        state.json             where the run stands: everything else that resuming needs
        config.json            the resolved configuration
        manifest.json          size and xxh3-128 of every file above; written last
    <save>/latest              name of the newest folder; moved last

Ranks that share a model write `model/`, `optimizer` and `reference` as several files of the same tensors, in a folder
that all of them see. Any number of ranks loads what any number wrote, one tensor at a time, each its own part.

A folder without a manifest, or with a file that does not match it, is damaged and never loaded. No pickle is read.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from safetensors.torch import save_file
from torch import Tensor

from treadle.errors import CheckpointError
from treadle.training.tensor_files import TensorFiles, shape_of

LATEST = "latest"
MANIFEST = "manifest.json"
PREFIX = "rollout_"
REPLACED = ".old"
STAGED = ".part_"
CHUNK_BYTES = 1 << 24


@dataclass(frozen=True)
class Checkpoint:
    """A sound checkpoint on disk. `rollout_id` is the first rollout that is still to do."""

    path: Path
    rollout_id: int
    state: Mapping[str, Any]

    def optimizer_tensors(self) -> TensorFiles:
        """AdamW's state, in one file or several; tensors are read as they are asked for."""
        return TensorFiles(self.path, "optimizer")


def save_checkpoint(
    folder: Path,
    rollout_id: int,
    *,
    write_model: Callable[[Path], None],
    optimizer: Mapping[str, Tensor] | None,
    state: Mapping[str, Any],
    config: Mapping[str, Any],
    keep: int | None = None,
    write_rest: Callable[[Path], None] | None = None,
) -> Path:
    """Write a checkpoint that resumes at `rollout_id`, then move `latest` and delete all but `keep` newest.

    Newest counts from this one back: checkpoints of later rollouts, left by a run that went further before it was
    resumed from an earlier one, stay until they are written anew. A crash at any moment leaves the checkpoints
    before it as they were. `optimizer` is None where `write_rest` writes its state, as many ranks do. Raises `CheckpointError` naming the folder and the cause (disk full, no permission);
    what was half written is removed.
    """
    name = f"{PREFIX}{rollout_id:06d}"
    work = folder / f".{name}.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _put_back(folder)
        for left in folder.glob(f".{PREFIX}*"):  # half written by a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        work.mkdir()
        write_model(work / "model")
        if write_rest is not None:
            write_rest(work)
        if optimizer is not None:
            save_file({key: value.contiguous() for key, value in optimizer.items()}, work / "optimizer.safetensors")
        (work / "state.json").write_text(json.dumps({"rollout_id": rollout_id, **state}))
        (work / "config.json").write_text(json.dumps(config, indent=2))
        (work / MANIFEST).write_text(json.dumps(_manifest(work), indent=2))
        _sync(work)
        target = folder / name
        if target.exists():  # the same rollout saved again, after a resume from an earlier one
            os.replace(target, work.with_name(f"{work.name}{REPLACED}"))
        os.replace(work, target)
        shutil.rmtree(work.with_name(f"{work.name}{REPLACED}"), ignore_errors=True)
        _write_latest(folder, name)
    except Exception as error:
        shutil.rmtree(work, ignore_errors=True)
        _put_back(folder)
        named = _unwritten(error, folder)
        if named is None:
            raise
        raise named from error
    if keep is not None:
        for old in _candidates(folder)[:-keep]:
            shutil.rmtree(old, ignore_errors=True)
    return folder / name


@contextmanager
def staged_part(folder: Path, name: str) -> Iterator[Path]:
    """A place in a save folder for a part of a checkpoint that is written before the rest of it and moved there.

    Yields a path that does not exist yet. Raises `CheckpointError` as `save_checkpoint` does. Parts that nobody moved
    are removed by the next one.
    """
    path = folder / f"{STAGED}{name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(f"{STAGED}*"):
            if left != path:
                shutil.rmtree(left, ignore_errors=True)
        yield path
    except Exception as error:
        named = _unwritten(error, folder)
        if named is None:
            raise
        raise named from error


def _unwritten(error: Exception, folder: Path) -> CheckpointError | None:
    """What says that a file could not be written, as an error of ours; None for any other error."""
    if isinstance(error, OSError) or "safetensor" in type(error).__name__.lower():
        return CheckpointError(
            f"can't save a checkpoint in {str(folder)!r}: {error}; free space or choose another --save, earlier checkpoints are untouched"
        )
    return None


def find_checkpoint(path: Path, warn: Callable[[str], None]) -> Checkpoint:
    """The checkpoint to resume from: `path` is one, or a save folder, or a run folder that has `checkpoints`.

    In a save folder the newest sound one is taken; each damaged one before it is named through `warn`. Raises
    `CheckpointError` where there is none.
    """
    if not path.is_dir():
        raise CheckpointError(f"no checkpoint at {str(path)!r}: no such folder")
    if path.name.startswith(PREFIX):
        fault = fault_of(path)
        if fault:
            raise CheckpointError(f"checkpoint {str(path)!r} is damaged: {fault}; choose another one")
        return _read(path)
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    _put_back(folder)
    for candidate in reversed(_candidates(folder)):
        fault = fault_of(candidate)
        if not fault:
            return _read(candidate)
        warn(f"checkpoint {str(candidate)!r} is damaged ({fault}); using the one before it")
    raise CheckpointError(f"no sound checkpoint in {str(folder)!r}; start without --load")


def fault_of(path: Path) -> str:
    """What is wrong with a checkpoint folder, or an empty string if every file matches the manifest."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError):
        return f"{MANIFEST} is missing or unreadable"
    for name, entry in manifest.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != entry["bytes"]:
            return f"{name} has {file.stat().st_size} bytes, expected {entry['bytes']}"
        if _digest(file) != entry["xxh3_128"]:
            return f"{name} does not match its checksum"
    return ""


def check_same_model(checkpoint: Checkpoint, tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raise `CheckpointError` naming the first weight that the checkpoint and this run's model do not share."""
    where = f"checkpoint {str(checkpoint.path)!r} is of another model"
    for name, tensor in expected.items():
        if name not in tensors:
            raise CheckpointError(f"{where}: it has no weight {name!r}; check --hf-checkpoint")
        found = shape_of(tensors, name)
        if found != tuple(tensor.shape):
            raise CheckpointError(
                f"{where}: {name!r} has shape {found}, this run's {tuple(tensor.shape)}; check --hf-checkpoint"
            )
    extra = sorted(set(tensors) - set(expected))
    if extra:
        raise CheckpointError(f"{where}: it has a weight {extra[0]!r} that this run's has not; check --hf-checkpoint")


def _read(path: Path) -> Checkpoint:
    state = json.loads((path / "state.json").read_text())
    return Checkpoint(path, state["rollout_id"], state)


def _folders(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.is_dir() and p.name.startswith(PREFIX))


def _put_back(folder: Path) -> None:
    """Restore a checkpoint that was moved aside for a new one of the same rollout which never took its place."""
    for left in folder.glob(f".{PREFIX}*{REPLACED}"):
        target = folder / left.name[1:].split(".")[0]
        if not target.exists():
            os.replace(left, target)


def _candidates(folder: Path) -> list[Path]:
    """Checkpoints up to the one `latest` names; without that file, all of them."""
    folders = _folders(folder)
    try:
        newest = (folder / LATEST).read_text().strip()
    except OSError:
        return folders
    return [p for p in folders if p.name <= newest]


def _manifest(folder: Path) -> dict[str, dict[str, Any]]:
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    return {
        file.relative_to(folder).as_posix(): {"bytes": file.stat().st_size, "xxh3_128": _digest(file)} for file in files
    }


def _digest(file: Path) -> str:
    state = xxhash.xxh3_128()
    with file.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            state.update(chunk)
    return state.hexdigest()


def _sync(folder: Path) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _write_latest(folder: Path, name: str) -> None:
    temporary = folder / f".{LATEST}.{os.getpid()}"
    try:
        temporary.write_text(name + "\n")
        os.replace(temporary, folder / LATEST)
    finally:
        temporary.unlink(missing_ok=True)
