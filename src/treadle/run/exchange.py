"""Both ends of a weight transport at work, whatever channel calls them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from treadle.weights.named import DELIVERS_AFTER


async def exchange(
    transport: str, receiving: Awaitable[Any], deliver: Callable[[], Awaitable[Any]]
) -> list[BaseException]:
    """Have the engines receive and the trainer deliver, side by side, or one after the other where the trainer must hold
    on to its weights until all have them. What went wrong, the engines' part first; empty where all went well.
    """
    if transport in DELIVERS_AFTER:
        ends: list[object] = [*await asyncio.gather(receiving, return_exceptions=True)]
        ends += await asyncio.gather(deliver(), return_exceptions=True)
    else:
        ends = [*await asyncio.gather(receiving, deliver(), return_exceptions=True)]
    return [end for end in ends if isinstance(end, BaseException)]
