"""What a run needs beside weights and optimizer to go on as if it had never stopped."""

from __future__ import annotations

import base64
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from treadle.errors import CheckpointError, first_line


def random_state() -> dict[str, Any]:
    """State of the global random generators of torch, numpy and Python, as JSON values."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(),
        "numpy": [str(kind), np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "python": [version, list(words), gauss],
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Set the generators to what `random_state` returned; raises `CheckpointError` for anything else."""
    try:
        torch.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(state["torch"])), dtype=torch.uint8))
        kind, keys, position, has_gauss, cached = state["numpy"]
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
    except (LookupError, ArithmeticError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"the saved state of the random generators is damaged ({first_line(error)}); load another checkpoint"
        ) from error


def seed_everything(seed: int) -> None:
    """Seed the global generators for users' code (a custom reward, say); Treadle itself does not use them."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
