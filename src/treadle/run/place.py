"""The folders that a run writes to and the checkpoint it starts from: found, locked and tested before anything else."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from treadle.config import Config
from treadle.errors import CheckpointError, ConfigError
from treadle.observe.progress import Progress
from treadle.observe.run_folder import RunFolder
from treadle.observe.samples import make_folder
from treadle.storage.folder_lock import FolderLock
from treadle.training.checkpoint import (
    Checkpoint,
    find_checkpoint,
    holds_checkpoint,
    save_folder_of,
    try_save_folder,
)


@dataclass(frozen=True, eq=False)
class Place:
    """The folders of a run, which no other run uses, and its checkpoint to start from.

    `resumes` is True if `load` is set, even to a run that has no checkpoint yet. `held_run` is True if
    the folder holds a run already.
    """

    folder: RunFolder
    checkpoints: Path
    checkpoint: Checkpoint | None
    resumes: bool = False
    held_run: bool = False

    @property
    def saves_inside(self) -> bool:
        """True if checkpoints go into the run folder."""
        return Path(os.path.realpath(self.checkpoints)).is_relative_to(os.path.realpath(self.folder.path))


def save_folder(config: Config, run_folder: Path) -> Path:
    """Return where checkpoints go: `save`, or `checkpoints` in the run folder."""
    return Path(config.checkpoint.save) if config.checkpoint.save is not None else run_folder / "checkpoints"


def claim_place(config: Config, name: str, progress: Progress, stack: ExitStack) -> Place:
    """Make and lock the folders of a training run, and find its checkpoint.

    The locks are held until `stack` is closed; a folder that nothing was written to is removed then. Raises `ConfigError`
    or `CheckpointError` for folders that can't be used, before anything in them is changed.
    """
    load = config.checkpoint.load
    folder = _made_folder(config, name, progress, stack, goes_on=True)
    checkpoints = save_folder(config, folder.path)
    saves_apart = config.checkpoint.save is not None and not config.debug.debug_rollout_only
    if saves_apart:
        _claim_save_folder(checkpoints, folder, progress, stack)
    checkpoint = None
    held_run = folder.holds_run
    if load is not None:
        checkpoint = _checkpoint_of(Path(load), folder, checkpoints, progress)
    elif saves_apart and holds_checkpoint(checkpoints):
        raise ConfigError(
            f"--save {checkpoints} already holds checkpoints; give another --save, or go on with them: "
            f"--load {checkpoints}"
        )
    folder.open(resumes=load is not None)
    if saves_apart or (checkpoints.exists() and not config.debug.debug_rollout_only):
        try_save_folder(checkpoints)
    if config.debug.save_debug_rollout_data is not None:
        make_folder(Path(config.debug.save_debug_rollout_data))
    return Place(folder, checkpoints, checkpoint, resumes=load is not None, held_run=held_run)


def claim_folder(config: Config, name: str, progress: Progress, stack: ExitStack) -> Place:
    """Make and lock the run folder of a command that trains nothing, and find the checkpoint to load."""
    load = config.checkpoint.load
    checkpoint = None if load is None else find_checkpoint(Path(load), progress.warn)
    folder = _made_folder(config, name, progress, stack, goes_on=False)
    return Place(folder.open(), save_folder(config, folder.path), checkpoint)


def _made_folder(config: Config, name: str, progress: Progress, stack: ExitStack, *, goes_on: bool) -> RunFolder:
    given, load = config.observe.run_dir, config.checkpoint.load
    if given is None and load is not None and goes_on and _is_run(Path(load)):
        given = load  # a run folder was given to go on with, not only its weights
    folder = RunFolder.make(None if given is None else Path(given), name)
    lock = FolderLock(folder.path, progress.warn)
    stack.callback(folder.remove_if_unused)  # not before it is locked: two runs may make it at the same time
    stack.callback(lock.close)
    return folder


def _is_run(path: Path) -> bool:
    folder = RunFolder(path)
    try:
        return folder.is_run or folder.holds_run
    except OSError as error:
        raise CheckpointError(f"can't read {str(path)!r} ({error.strerror}); choose another --load") from error


def _claim_save_folder(checkpoints: Path, folder: RunFolder, progress: Progress, stack: ExitStack) -> None:
    """Lock the save folder, or the run folder that it belongs to."""
    try:
        checkpoints.mkdir(parents=True, exist_ok=True)
        owner = checkpoints
        if checkpoints.name == "checkpoints" and RunFolder(checkpoints.parent).is_run:
            owner = checkpoints.parent
        if os.path.samefile(owner, folder.path):
            return
    except OSError as error:
        raise ConfigError(f"--save {checkpoints} can't be written ({error.strerror}); give another --save") from error
    stack.callback(FolderLock(owner, progress.warn).close)


def _checkpoint_of(load: Path, folder: RunFolder, checkpoints: Path, progress: Progress) -> Checkpoint | None:
    """Return the checkpoint to start from; None if `load` names this very run, and it has not saved yet.

    A run folder whose checkpoints go elsewhere stands for those.
    """
    own = (folder.path, folder.checkpoints, checkpoints)
    if not any(is_same(load, path) for path in own):
        return find_checkpoint(load, progress.warn)
    for path in (load, checkpoints):
        if path.is_dir() and holds_checkpoint(save_folder_of(path)):
            return find_checkpoint(path, progress.warn)
    progress.warn(f"{load} holds no checkpoint yet: the run starts from the beginning")
    return None


def is_same(a: Path, b: Path) -> bool:
    """Return True if two paths lead to the same place, which need not exist."""
    return os.path.realpath(a) == os.path.realpath(b)
