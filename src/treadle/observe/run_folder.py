"""The folder of a run: the paths of what the run writes, and what a resume removes."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from treadle.errors import ConfigError, RunFolderLostError
from treadle.observe.metric_lines import read_metric_lines
from treadle.observe.samples import rollout_file, rollout_ids
from treadle.printable_text import harmless_json
from treadle.storage.atomic_file import write_atomically
from treadle.storage.regular_file import read_regular


@dataclass(frozen=True, slots=True)
class RunFolder:
    """One run's folder; `metrics.jsonl` in it, even empty, marks it as a run's.

    `is_new` says that this process made the folder. `num_lines_cut` and `num_sample_files_removed` count what a resume
    removed.
    """

    path: Path
    is_new: bool = False
    num_lines_cut: int = 0
    num_sample_files_removed: int = 0

    @classmethod
    def make(
        cls, path: Path | None, recipe: str = "run", root: Path = Path("runs"), now: datetime | None = None
    ) -> RunFolder:
        """Make the folder `path`, or `root/<recipe>-<time>` if `path` is None. Raises `ConfigError` if that fails."""
        if path is None:
            return cls(_make_new(root, recipe, now or datetime.now()), is_new=True)
        is_new = not os.path.lexists(path)
        return cls(_make(path), is_new=is_new)

    def open(self, *, resumes: bool = False) -> RunFolder:
        """Make the parts that every run has, and check that the folder can be written.

        Raises `ConfigError` for a folder that can't be written, or that holds a run if `resumes` is false.
        """
        try:
            if self.holds_run and not resumes:
                raise ConfigError(
                    f"{self.path} already holds a run; give another --run-dir, or resume it with --load {self.path}"
                )
            if self.config.exists() and not self.is_run and not self.holds_run:
                raise ConfigError(f"{self.path} holds a config.json that is not a run's; give another --run-dir")
            probe = self.path / ".write-check"
            probe.write_bytes(b"1")
            probe.unlink()
            self.samples.mkdir(exist_ok=True)
            self.metrics.touch()
        except OSError as error:
            raise ConfigError(
                f"the run folder {self.path} can't be written ({error.strerror}); give another --run-dir"
            ) from error
        return self

    def take_back(self, rollout_id: int) -> RunFolder:
        """Remove what was written about this rollout and later ones, which are rerun.

        The summary of the run and the temporary files of a killed process are removed too. Raises `DataError` if the
        metrics can't be read.
        """
        lines = read_metric_lines(self.metrics)
        kept = [line for line, row in lines if row["rollout_id"] < rollout_id]
        for left in (*self.path.glob(".*.tmp"), *self.samples.glob(".*.tmp")):
            left.unlink()
        self.summary.unlink(missing_ok=True)
        if sum(map(len, kept)) != self.metrics.stat().st_size:
            write_atomically(self.metrics, kept, durable=True)
        if not kept:
            shutil.rmtree(self.tensorboard, ignore_errors=True)
        later = [found for found in rollout_ids(self.samples) if found >= rollout_id]
        for found in later:
            self.sample_file(found).unlink()
        return replace(self, num_lines_cut=len(lines) - len(kept), num_sample_files_removed=len(later))

    def remove_if_unused(self) -> None:
        """Remove a folder that this run made and wrote nothing to."""
        if not self.is_new:
            return
        with suppress(OSError):  # it is not empty
            if self.metrics.is_file() and not self.metrics.stat().st_size and not self.config.exists():
                self.samples.rmdir()
                self.metrics.unlink()
            self.path.rmdir()

    def check_there(self) -> None:
        """Raise `RunFolderLostError` if the folder was removed or moved while the run went on."""
        if not self.is_run:
            raise RunFolderLostError(
                f"the run folder {self.path} was removed or moved while the run went on; start the run again elsewhere"
            )

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        return self.path / "samples"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def curve(self) -> Path:
        return self.path / "curve.png"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def is_run(self) -> bool:
        """True if a run was started here, even if it has written nothing yet."""
        return self.metrics.is_file()

    @property
    def holds_run(self) -> bool:
        """True if a run got as far as writing metrics, samples or a checkpoint."""
        filled = self.metrics.is_file() and self.metrics.stat().st_size > 0
        return (
            filled or bool(rollout_ids(self.samples)) or (self.checkpoints.is_dir() and any(self.checkpoints.iterdir()))
        )

    @property
    def finished_after(self) -> int | None:
        """The number of rollouts after which the run ended by itself; None if it was stopped or is not finished."""
        try:
            found = json.loads(read_regular(self.summary))
        except (OSError, ValueError, RecursionError):
            return None
        value = found.get("finished_after") if isinstance(found, dict) else None
        return value if isinstance(value, int) else None

    def sample_file(self, rollout_id: int) -> Path:
        return rollout_file(self.samples, rollout_id)

    def write_config(self, values: Mapping[str, Any]) -> None:
        """Write the resolved config to config.json."""
        _write_json(self.config, values)

    def write_summary(self, values: Mapping[str, Any]) -> None:
        """Write the outcome of the run to summary.json."""
        _write_json(self.summary, values)


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    text = json.dumps(dict(values), indent=2, ensure_ascii=False, default=str)
    write_atomically(path, [harmless_json(text).encode(), b"\n"])


def _make(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the run folder {path} can't be made ({error.strerror}); give another --run-dir") from error
    return path


def _make_new(root: Path, recipe: str, now: datetime) -> Path:
    """Make a folder that did not exist before; a second run within the same second gets a number."""
    name = re.sub(r"[^\w.-]+", "-", Path(recipe).stem).strip("-.") or "run"
    stem = f"{name}-{now:%Y%m%d-%H%M%S}"
    _make(root)
    for number in range(1, 1000):
        path = root / (stem if number == 1 else f"{stem}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"the run folder {path} can't be made ({error.strerror}); give a --run-dir") from error
        return path
    raise ConfigError(f"{root} holds a thousand runs named {stem}; give a --run-dir")
