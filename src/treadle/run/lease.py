"""Which side holds the accelerators: the engines while they generate, or the trainer while it trains."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal, Protocol

from treadle.rollout.engines.base import EnginePart

Holder = Literal["rollout", "training"]


class SleepingEngines(Protocol):
    """Engines that free their memory for the trainer; a call does nothing if they are asleep or awake already."""

    async def sleep(self) -> Any: ...
    async def wake(self, part: EnginePart) -> Any: ...


class SleepingTrainer(Protocol):
    """A trainer that frees its memory for the engines; a call does nothing if it is asleep or awake already."""

    async def sleep(self) -> Any: ...
    async def wake(self) -> Any: ...


class Lease:
    """Hands the accelerators from one side to the other. A side that has memory of its own is None and never sleeps."""

    def __init__(self, engines: SleepingEngines | None = None, trainer: SleepingTrainer | None = None):
        self._engines, self._trainer = engines, trainer

    @asynccontextmanager
    async def hold(self, holder: Holder) -> AsyncIterator[None]:
        """Hold the accelerators inside the `async with`: the other side sleeps, and this one is awake."""
        if holder == "training":
            if self._engines is not None:
                await self._engines.sleep()
            if self._trainer is not None:
                await self._trainer.wake()
        else:
            if self._trainer is not None:
                await self._trainer.sleep()
            if self._engines is not None:
                await self._engines.wake("weights")
                await self._engines.wake("kv")
        yield
