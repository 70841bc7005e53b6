"""Checkpoints: one folder per save, written under another name and then renamed.

    <save>/rollout_000012/
        model/                 a Hugging Face folder with the float32 master weights
        critic/                the same of a critic, with its value head and optimizer, if there is one
        reference.safetensors  a reference model's weights, if they change
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
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from safetensors.torch import save_file
from torch import Tensor

from treadle.errors import CheckpointError
from treadle.storage.manifest import MANIFEST, commit_folder, entries_of, fault_of_file, sync
from treadle.storage.regular_file import read_regular
from treadle.training.tensor_files import TensorFiles, shape_of

LATEST = "latest"
STATE = "state.json"
PREFIX = "rollout_"
REPLACED = ".old"
STAGED = ".part_"
Kind = TypeVar("Kind")
_FOLDER_NAME = re.compile(rf"{PREFIX}(\d{{6,}})", re.ASCII)


@dataclass(frozen=True)
class Checkpoint:
    """An undamaged checkpoint on disk. `rollout_id` is the first rollout that is not trained yet."""

    path: Path
    rollout_id: int
    state: Mapping[str, Any]

    @property
    def config(self) -> dict[str, Any]:
        """Configuration of the run that saved; empty if it can't be read."""
        try:
            return _read_object(self.path / "config.json")
        except ValueError:
            return {}

    def entry(self, name: str, kind: type[Kind]) -> Kind:
        """Return an entry of the state; raises `CheckpointError` if it is missing, or of another type."""
        value = self.state.get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise CheckpointError(
                f"checkpoint {str(self.path)!r} is damaged: {STATE} has {name} {str(value)[:40]!r}, which is no {kind.__name__}; "
                "choose another one"
            )
        return value

    def optimizer_tensors(self) -> TensorFiles:
        """Return AdamW's state, from one file or several; each tensor is read when it is used."""
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
    resumed from an earlier one, stay until they are written again. A crash at any moment leaves the earlier checkpoints
    as they were. `optimizer` is None if `write_rest` writes its state, as many ranks do. Raises `CheckpointError`, which
    names the folder and the cause (disk full, no permission); what was half written is removed.
    """
    name = f"{PREFIX}{rollout_id:06d}"
    work = folder / f".{name}.{os.getpid()}"
    try:
        _make_folder(folder)
        _put_back(folder)
        for left in folder.glob(f".{PREFIX}*"):  # half written by a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        work.mkdir()
        write_model(work / "model")
        if write_rest is not None:
            write_rest(work)
        if optimizer is not None:
            save_file({key: value.contiguous() for key, value in optimizer.items()}, work / "optimizer.safetensors")
        (work / STATE).write_text(json.dumps({"rollout_id": rollout_id, **state}))
        (work / "config.json").write_text(json.dumps(config, indent=2))
        (work / MANIFEST).write_text(json.dumps(entries_of(work), indent=2))
        aside = work.with_name(
            f"{work.name}{REPLACED}"
        )  # of the same rollout, saved before a resume from an earlier one
        commit_folder(work, folder / name, aside)
        shutil.rmtree(aside, ignore_errors=True)
        set_latest(folder, name)
    except Exception as error:
        shutil.rmtree(work, ignore_errors=True)
        _put_back(folder)
        named = _unwritten(error, folder)
        if named is None:
            raise
        raise named from error
    if keep is not None:
        for old in [path for path in _folders(folder) if _rollout_of(path) <= rollout_id][:-keep]:
            shutil.rmtree(old, ignore_errors=True)
    return folder / name


@contextmanager
def staged_part(folder: Path, name: str) -> Iterator[Path]:
    """Yield a path in a save folder for a part of a checkpoint that is written before the rest and moved into it later.

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
    """Return an error that a file could not be written as a `CheckpointError`; None for any other error."""
    if isinstance(error, OSError) or "safetensor" in type(error).__name__.lower():
        return CheckpointError(
            f"can't save a checkpoint in {str(folder)!r}: {error}; free space or choose another --save, earlier checkpoints are untouched"
        )
    return None


def find_checkpoint(path: Path, warn: Callable[[str], None]) -> Checkpoint:
    """Return the checkpoint to resume from; reads only, so that the run that writes there may be alive.

    Args:
        path: a checkpoint, a save folder, or a run folder that has `checkpoints`.
        warn: called with each damaged checkpoint that is passed over.
    Returns:
        The newest sound checkpoint of the folder: those up to the one that `latest` names come first.
    Raises:
        CheckpointError: if there is no sound checkpoint, or the folder can't be read.
    """
    try:
        if not path.is_dir():
            raise CheckpointError(f"no checkpoint at {str(path)!r}: no such folder")
        if _number(path.name) is not None or (path / MANIFEST).exists():
            return _only(path)
        folder = save_folder_of(path)
        candidates = _candidates(folder, warn)
    except OSError as error:
        raise CheckpointError(f"can't read {str(path)!r} ({error.strerror}); choose another folder") from error
    for candidate in candidates:
        fault = fault_of(candidate)
        if not fault:
            return _read(candidate)
        warn(f"checkpoint {str(candidate)!r} is damaged ({fault}); trying the previous one")
    if candidates:
        raise CheckpointError(
            f"no sound checkpoint in {str(folder)!r}: all {len(candidates)} are damaged; load another"
        )
    raise CheckpointError(f"no checkpoint in {str(folder)!r}; give a run folder, a save folder or one checkpoint")


def try_save_folder(folder: Path) -> None:
    """Make a save folder and do in it what a save does; raises `CheckpointError` as `save_checkpoint` does."""
    trial = folder / f".{PREFIX}trial.{os.getpid()}"
    try:
        _make_folder(folder)
        trial.mkdir()
        (trial / STATE).write_text("{}")
        os.replace(trial, trial.with_name(f"{trial.name}{REPLACED}"))
        if (folder / LATEST).is_dir():
            raise IsADirectoryError(f"{folder / LATEST} is a folder")
    except OSError as error:
        named = _unwritten(error, folder)
        assert named is not None
        raise named from error
    finally:
        for left in (trial, trial.with_name(f"{trial.name}{REPLACED}")):
            shutil.rmtree(left, ignore_errors=True)


def go_on_from(checkpoint: Checkpoint, folder: Path) -> None:
    """Have `latest` of the save folder name this checkpoint, if it lies there; a run goes on from it.

    Checkpoints of later rollouts stay until they are written again.
    """
    if os.path.realpath(checkpoint.path.parent) != os.path.realpath(folder):
        return
    _put_back(folder)
    name = f"{PREFIX}{checkpoint.rollout_id:06d}"
    if _number(checkpoint.path.name) == checkpoint.rollout_id and _latest(folder) != checkpoint.rollout_id:
        set_latest(folder, name)


def save_folder_of(path: Path) -> Path:
    """Return the folder that holds the checkpoints of a run folder or a save folder."""
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path


def holds_checkpoint(folder: Path) -> bool:
    """Return True if a save folder has a checkpoint in it, sound or not."""
    return folder.is_dir() and bool(_folders(folder))


def fault_of(path: Path) -> str:
    """Return what is wrong with a checkpoint folder, or an empty string if it is whole and every file matches."""
    try:
        manifest = _read_object(path / MANIFEST)
    except ValueError as error:
        return str(error)
    for name in ("state.json", "config.json", "model/"):
        if not any(file == name or file.startswith(name) for file in manifest):
            return f"{MANIFEST} lists no {name}"
    for name, entry in manifest.items():
        fault = fault_of_file(path / name, entry)
        if fault:
            return f"{name} {fault}"
    try:
        state = _read_object(path / STATE)
    except ValueError as error:
        return str(error)
    done = state.get("rollout_id")
    if not isinstance(done, int) or isinstance(done, bool) or done < 0:
        return f"{STATE} has rollout_id {done!r}, which is no number of rollouts"
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


def _only(path: Path) -> Checkpoint:
    """Return the checkpoint at `path`, which must be sound."""
    fault = fault_of(path)
    if fault:
        raise CheckpointError(f"checkpoint {str(path)!r} is damaged: {fault}; choose another one")
    return _read(path)


def _read(path: Path) -> Checkpoint:
    state = _read_object(path / STATE)
    return Checkpoint(path, state["rollout_id"], state)


def _read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; raises `ValueError`, which names the file, if there is none."""
    try:
        value = json.loads(read_regular(path))
    except FileNotFoundError as error:
        raise ValueError(f"{path.name} is missing") from error
    except OSError as error:
        raise ValueError(f"{path.name} can't be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} is not JSON") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} holds no JSON object")
    return value


def _number(name: str) -> int | None:
    """Return the rollout that a checkpoint's folder name stands for, or None for another name."""
    match = _FOLDER_NAME.fullmatch(name)
    return None if match is None else int(match[1])


def _folders(folder: Path) -> list[Path]:
    """Return the checkpoints of a save folder, oldest first.

    One that was moved aside for a new one which never took its place still counts.
    """
    found: dict[int, Path] = {}
    for path in sorted(folder.iterdir()):  # names with a dot come first: the checkpoint itself replaces its old one
        aside = path.name.startswith(".") and path.name.endswith(REPLACED)
        number = _number(path.name[1:].split(".")[0] if aside else path.name)
        if number is not None and path.is_dir():
            found[number] = path
    return [found[number] for number in sorted(found)]


def _put_back(folder: Path) -> None:
    """Restore a checkpoint that was moved aside for a new one of the same rollout which never took its place."""
    for left in folder.glob(f".{PREFIX}*{REPLACED}"):
        target = folder / left.name[1:].split(".")[0]
        if _number(target.name) is not None and not target.exists():
            os.replace(left, target)


def _candidates(folder: Path, warn: Callable[[str], None]) -> list[Path]:
    """Return the checkpoints of a save folder, the first to try first.

    Those up to the one that `latest` names come before those of later rollouts, which a run left that went further
    before it was resumed from an earlier one.
    """
    folders = _folders(folder)[::-1]
    newest = _latest(folder)
    if newest is None:
        if folders and (folder / LATEST).exists():
            warn(f"{str(folder / LATEST)!r} names no checkpoint; using the newest sound one in its folder")
        return folders
    later = [path for path in folders if _rollout_of(path) > newest]
    return [path for path in folders if _rollout_of(path) <= newest] + later


def _rollout_of(path: Path) -> int:
    number = _number(path.name.removeprefix(".").split(".")[0])
    assert number is not None, f"{path} is no checkpoint"
    return number


def _latest(folder: Path) -> int | None:
    """Return the rollout of the checkpoint that `latest` names; None if it names none."""
    try:
        return _number(read_regular(folder / LATEST).decode().strip())
    except (OSError, UnicodeDecodeError):
        return None


def _make_folder(folder: Path) -> None:
    """Make a folder and its parents, such that they outlive a crash of the machine."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync(path.parent)


def set_latest(folder: Path, name: str) -> None:
    """Have `latest` name this checkpoint of the save folder."""
    temporary = folder / f".{LATEST}.{os.getpid()}"
    try:
        temporary.write_text(name + "\n")
        sync(temporary)
        os.replace(temporary, folder / LATEST)
        sync(folder)
    finally:
        temporary.unlink(missing_ok=True)
