"""Who holds the accelerators.

Where rollout and training share them, a side that takes the lease finds the other's memory freed. Where each side
has its own, a lease is nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Literal, Protocol

from treadle.rollout.engines.base import Engine

Holder = Literal["rollout", "training"]


class Lease(Protocol):
    """`async with lease.hold("rollout"):` and the like."""

    def hold(self, holder: Holder) -> AbstractAsyncContextManager[None]:
        """Have the accelerators inside the `async with`; the other side has given up its memory."""
        ...


class FreeLease:
    """Each side has its own memory: nothing to hand over."""

    @asynccontextmanager
    async def hold(self, holder: Holder) -> AsyncIterator[None]:
        yield


class SharedLease:
    """Engine and trainer share one memory: the engine's keys and values are freed while training runs."""

    def __init__(self, engine: Engine):
        self._engine = engine

    @asynccontextmanager
    async def hold(self, holder: Holder) -> AsyncIterator[None]:
        if holder == "training":
            await self._engine.sleep()
        else:
            await self._engine.wake("weights")
            await self._engine.wake("kv")
        yield
