"""Small checkpoints without a model, for tests of saving and finding them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from treadle.training.checkpoint import find_checkpoint, save_checkpoint

MODEL_FILE = "model/weights.bin"


def save(folder: Path, rollout_id: int, keep: int | None = None, size: int = 1000, **state: Any) -> Path:
    def write_model(where: Path) -> None:
        where.mkdir()
        (where / "weights.bin").write_bytes(bytes([rollout_id % 256]) * size)

    return save_checkpoint(
        folder,
        rollout_id,
        write_model=write_model,
        optimizer={"exp_avg.w": torch.full((8,), float(rollout_id)), "step.w": torch.tensor(3.0)},
        state={"optimizer_steps": 2 * rollout_id, **state},
        config={"train": {"seed": 7}},
        keep=keep,
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def found(folder: Path) -> int:
    return find_checkpoint(folder, pytest.fail).rollout_id


def flip(file: Path) -> None:
    """Change one bit in the middle of a file."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
