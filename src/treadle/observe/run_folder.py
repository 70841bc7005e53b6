"""The folder of a run: where everything it writes lies, and what happens to it when the run is resumed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from treadle.errors import ConfigError
from treadle.observe.atomic_file import write_atomically
from treadle.observe.metric_lines import read_metric_lines
from treadle.observe.samples import rollout_file, rollout_ids


@dataclass(frozen=True, slots=True)
class RunFolder:
    """One run's folder; `metrics.jsonl` in it, even empty, marks it as a run's.

    `num_lines_cut` and `num_sample_files_removed` count what a resume took back, of rollouts that are done anew.
    """

    path: Path
    num_lines_cut: int = 0
    num_sample_files_removed: int = 0

    @classmethod
    def create(
        cls,
        path: Path | None,
        recipe: str = "run",
        resume_rollout_id: int | None = None,
        root: Path = Path("runs"),
        now: datetime | None = None,
    ) -> RunFolder:
        """Make the folder `path`, or `root/<recipe>-<time>` where `path` is None, and check that it can be written.

        `resume_rollout_id` is the first rollout a resumed run does; in a folder that holds a run, its metrics and
        samples from there on are removed. Raises `ConfigError` for a folder that can't be written, or that holds a
        run while nothing is resumed.
        """
        folder = cls(_make(path) if path is not None else _make_new(root, recipe, now or datetime.now()))
        holds_run = folder.holds_run
        if holds_run and resume_rollout_id is None:
            raise ConfigError(
                f"{folder.path} already holds a run; give another --run-dir, or go on with it: --load {folder.path}"
            )
        if not holds_run and folder.config.exists() and not folder.metrics.exists():
            raise ConfigError(f"{folder.path} holds a config.json that is not a run's; give another --run-dir")
        folder._check_writable()
        return folder if resume_rollout_id is None else folder._cut(resume_rollout_id)

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
    def holds_run(self) -> bool:
        """True where a run got as far as writing metrics, samples or a checkpoint."""
        filled = self.metrics.is_file() and self.metrics.stat().st_size > 0
        return (
            filled or bool(rollout_ids(self.samples)) or (self.checkpoints.is_dir() and any(self.checkpoints.iterdir()))
        )

    def sample_file(self, rollout_id: int) -> Path:
        return rollout_file(self.samples, rollout_id)

    def write_config(self, values: Mapping[str, Any]) -> None:
        """Write the resolved config to config.json."""
        _write_json(self.config, values)

    def write_summary(self, values: Mapping[str, Any]) -> None:
        """Write the outcome of the run to summary.json."""
        _write_json(self.summary, values)

    def _check_writable(self) -> None:
        """Make the parts that every run has, and write a byte, so that a full or foreign disk is found now."""
        probe = self.path / ".write-check"
        try:
            probe.write_bytes(b"1")
            probe.unlink()
            self.samples.mkdir(exist_ok=True)
            self.metrics.touch()
        except OSError as error:
            raise ConfigError(
                f"the run folder {self.path} can't be written ({error.strerror}); give another --run-dir"
            ) from error

    def _cut(self, rollout_id: int) -> RunFolder:
        lines = read_metric_lines(self.metrics)
        kept = [line for line, row in lines if row["rollout_id"] < rollout_id]
        if sum(map(len, kept)) != self.metrics.stat().st_size:
            write_atomically(self.metrics, kept)
        later = [found for found in rollout_ids(self.samples) if found >= rollout_id]
        for found in later:
            self.sample_file(found).unlink()
        return RunFolder(self.path, len(lines) - len(kept), len(later))


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    write_atomically(path, [json.dumps(dict(values), indent=2, ensure_ascii=False, default=str).encode(), b"\n"])


def _make(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the run folder {path} can't be made ({error.strerror}); give another --run-dir") from error
    return path


def _make_new(root: Path, recipe: str, now: datetime) -> Path:
    """A folder that did not exist before; a second run within the same second gets a number."""
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
