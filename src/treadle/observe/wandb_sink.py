"""Metrics to Weights & Biases; the only user of the wandb package, which is an optional extra."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treadle.errors import ConfigError, TreadleError

WANDB_CLOSE_SECONDS = 120.0


class WandbSink:
    """Logs to a Weights & Biases project, every chart over `rollout_id`.

    `folder` is where wandb keeps its files; the parts of a resumed run share the group `name`.
    """

    def __init__(self, project: str, name: str, folder: Path, config: Mapping[str, Any] | None = None):
        wandb = import_wandb()
        quiet = wandb.Settings(console="off", silent=True)  # it would wrap stdout under the live display
        self._run: Any = wandb.init(
            project=project, name=name, group=name, dir=str(folder), config=dict(config or {}), settings=quiet
        )
        self._run.define_metric("*", step_metric="rollout_id")

    def write(self, rollout_id: int, values: Mapping[str, float]) -> None:
        if self._run is None:
            raise TreadleError(f"the wandb run is closed; metrics of rollout {rollout_id} came too late")
        self._run.log({"rollout_id": int(rollout_id), **{name: float(value) for name, value in values.items()}})

    def close(self) -> None:
        """Upload what is left; raises `TreadleError` if that takes longer than `WANDB_CLOSE_SECONDS`."""
        if self._run is None:
            return
        run, self._run = self._run, None
        thread = threading.Thread(target=run.finish, name="wandb-finish", daemon=True)
        thread.start()
        thread.join(WANDB_CLOSE_SECONDS)
        if thread.is_alive():
            raise TreadleError(
                f"wandb did not finish its upload in {WANDB_CLOSE_SECONDS:.0f} s; `wandb sync` sends the rest"
            )


def import_wandb() -> Any:
    """Import wandb; raises `ConfigError` with the install command if it is missing."""
    try:
        import wandb
    except ImportError as error:
        raise ConfigError(
            "--wandb-project needs wandb, which is not installed: run `pip install 'treadle[wandb]'`, "
            "or leave the flag out"
        ) from error
    return wandb
