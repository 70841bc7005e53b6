"""What replies of all servers have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from treadle.errors import EngineError
from treadle.types import Completion


def seed_of(seed: int, index: int) -> int:
    """Seed of sample `index` of a request, for servers that take one."""
    return (seed + index * 0x9E3779B97F4A7C15) % 2**63


def versions_of(spans: Sequence[Mapping[str, Any]], length: int) -> np.ndarray:
    """Weight version of each token (int32 [T]) from spans `{version, start, end}`; they must cover every token."""
    versions = np.full(length, -2, dtype=np.int32)
    for span in spans:
        versions[int(span["start"]) : int(span["end"])] = int(span["version"])
    if (versions == -2).any():
        raise ValueError(f"weight versions {list(spans)} do not cover {length} tokens")
    return versions


def checked_completion(found: Completion, named: Sequence[int], engine: str) -> Completion:
    """The same completion; raises `EngineError` where its logprobs are of other tokens (`named`) or are no numbers."""
    if list(named) != found.token_ids.tolist() or len(found.logprobs) != len(named):
        raise EngineError(
            f"{engine} answered {len(found.token_ids)} tokens with logprobs of {len(found.logprobs)} or of other ones"
        )
    if not np.isfinite(found.logprobs).all():
        raise EngineError(f"{engine} answered with logprobs that are no numbers")
    return found
