"""What every worker process of a cluster is given, and what it does first."""

from __future__ import annotations

import os
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import torch

from treadle.config import Config
from treadle.errors import ConfigError


@dataclass(frozen=True)
class WorkerSetup:
    """The run a worker belongs to. Paths are the same on every node: a shared disk, or the same files on each."""

    config: Config
    model_path: str
    max_prompt: int
    folder: Path  # where the run was started: relative paths of the configuration are from here
    import_paths: tuple[str, ...]

    @classmethod
    def here(cls, config: Config, model_path: str, max_prompt: int) -> WorkerSetup:
        """As this process sees the run."""
        return cls(config, model_path, max_prompt, Path.cwd(), tuple(sys.path))


def enter_worker(setup: WorkerSetup) -> None:
    """Make this process one of the run: its folder, its import paths, its threads.

    Ctrl-C, and the end of the terminal, are the driver's to handle.
    """
    if not setup.folder.is_dir():
        raise ConfigError(
            f"the run's folder {setup.folder} is not on node {os.uname().nodename}; share it between nodes"
        )
    os.chdir(setup.folder)
    sys.path.extend(path for path in setup.import_paths if path not in sys.path)
    torch.set_num_threads(setup.config.cluster.num_cpus_per_worker)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
