"""Parts of a tensor that stay in a processor's cache while several operations pass over them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

CACHE_BYTES = 2 << 20
"""Of the second-level caches of two cores."""


def tiles(count: int, row_bytes: int, device: torch.device) -> Iterator[slice]:
    """Slices over `count` rows; `row_bytes` is what the operations on one row read and write. One slice where there is no CPU."""
    step = max(1, CACHE_BYTES // row_bytes) if device.type == "cpu" else max(1, count)
    return (slice(start, min(start + step, count)) for start in range(0, count, step))
