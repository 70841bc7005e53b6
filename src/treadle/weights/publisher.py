"""Publishing: bring every engine to the trainer's weights, whatever the transport and the runtime.

The trainer offers a version, the engines receive it, the trainer delivers; if an engine dies meanwhile, all of it is
repeated with the engine that replaces it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from treadle.errors import EngineLostError, WorkerLostError
from treadle.weights.base import Offer, WeightSender
from treadle.weights.transport import find_transport

PUBLISH_TRIES = 3
"""How often a version is offered if engines die while they receive it."""


class WeightSource(Protocol):
    """The trainer as a publisher calls it: in this process or in others."""

    async def offer(self, version: int) -> Offer:
        """Offer the current weights as `version`."""
        ...

    async def deliver(self, version: int) -> None:
        """Do the sender's part while, or after, the engines receive."""
        ...


class LocalSource:
    """A sender in this process, called in a thread."""

    def __init__(self, sender: WeightSender):
        self._sender = sender

    async def offer(self, version: int) -> Offer:
        return await asyncio.to_thread(self._sender.offer, version)

    async def deliver(self, version: int) -> None:
        await asyncio.to_thread(self._sender.deliver)


class Publisher:
    """Publishes versions, one at a time.

    Args:
        source: the trainer.
        receive: brings all engines to an offer; raises `EngineLostError` if one died and was replaced.
        warn: is called if a version is offered again.
        prepare: makes all engines ready to receive.
    """

    def __init__(
        self,
        source: WeightSource,
        receive: Callable[[Offer], Awaitable[None]],
        warn: Callable[[str], None],
        prepare: Callable[[], Awaitable[None]] | None = None,
    ):
        self._source, self._receive, self._warn, self._prepare = source, receive, warn, prepare
        self._lock = asyncio.Lock()
        self._version: int | None = None

    async def publish(self, version: int) -> None:
        """Bring all engines to the trainer's current weights under this version.

        Raises:
            WorkerLostError: if the trainer died.
            EngineError: if an engine refused, or engines died in each of `PUBLISH_TRIES` tries; the engine's own error.
        """
        async with self._lock:
            await self._publish(version)
            self._version = version

    async def repeat(self, is_wanted: Callable[[], bool]) -> None:
        """Publish the newest version again, for an engine that started after it, unless that happened meanwhile."""
        async with self._lock:
            if self._version is not None and is_wanted():
                await self._publish(self._version)

    async def _publish(self, version: int) -> None:
        for tries_left in reversed(range(PUBLISH_TRIES)):
            if self._prepare is not None:
                await self._prepare()
            offer = await self._source.offer(version)
            errors = await exchange(offer.transport, self._receive(offer), lambda: self._source.deliver(version))
            if not errors:
                return
            for error in errors:
                if isinstance(error, WorkerLostError):
                    raise error
            if not tries_left or not any(isinstance(error, EngineLostError) for error in errors):
                raise errors[0]
            self._warn(f"version {version} did not reach every engine ({errors[0]}); offering it again")


async def exchange(
    transport: str, receiving: Awaitable[None], deliver: Callable[[], Awaitable[None]]
) -> list[BaseException]:
    """Have the engines receive and the trainer deliver: concurrently or, if the transport asks for it, in this order.

    Returns what was raised, the engines' part first.
    """
    if find_transport(transport).delivers_after:
        ends: list[object] = [*await asyncio.gather(receiving, return_exceptions=True)]
        ends += await asyncio.gather(deliver(), return_exceptions=True)
    else:
        ends = [*await asyncio.gather(receiving, deliver(), return_exceptions=True)]
    return [end for end in ends if isinstance(end, BaseException)]
