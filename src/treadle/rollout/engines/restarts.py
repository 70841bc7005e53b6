"""The engines of a pool, each in a slot: health checks, and a restart for each engine that died."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from treadle.errors import EngineError, EngineLostError, TreadleError
from treadle.rollout.engines.base import Engine

StartEngine = Callable[[int], Awaitable[Engine]]
"""Starts engine `index`, with any weights; raises `EngineError` if that fails."""


@dataclass(frozen=True)
class PoolLimits:
    """Interval and timeout of an engine's health checks, and how often it is restarted.

    `max_restarts` counts restarts between which the engine finished no request.
    """

    check_interval_seconds: float
    check_timeout_seconds: float
    max_restarts: int


@dataclass(eq=False)
class Slot:
    """The slot of one engine; None while it is being started."""

    index: int
    engine: Engine | None
    load: int = 0
    restarts: int = 0
    watcher: asyncio.Task[None] | None = None
    replacing: asyncio.Task[None] | None = None


class EngineSlots:
    """Slots whose engines are watched and restarted.

    Args:
        engines: the engines; one given as None is started at once.
        start: starts an engine.
        on_start: is called with a new engine before it serves; an error of it counts as a failed start.
        on_back: is called when a new engine serves; an error of it ends the pool.
        note: is called with a message for each death and restart.
    """

    def __init__(
        self,
        engines: Sequence[Engine | None],
        start: StartEngine,
        limits: PoolLimits,
        note: Callable[[str], None],
        on_start: Callable[[Engine], Awaitable[None]],
        on_back: Callable[[], Awaitable[None]],
    ):
        self.slots = [Slot(i, engine) for i, engine in enumerate(engines)]
        self.failure: EngineError | None = None
        self._start, self._limits, self._note = start, limits, note
        self._on_start, self._on_back = on_start, on_back
        self._changed = asyncio.Event()
        for slot in self.slots:
            slot.watcher = asyncio.create_task(self._watch(slot))
            if slot.engine is None:
                slot.replacing = asyncio.create_task(self._replace(slot, None))

    @property
    def engines(self) -> list[Engine]:
        """The engines that run."""
        return [slot.engine for slot in self.slots if slot.engine is not None]

    def lose(self, slot: Slot, engine: Engine, error: EngineError) -> None:
        """Restart an engine that died, unless that was noticed before."""
        if slot.engine is not engine or self.failure is not None:
            return
        slot.engine = None
        self._note(f"engine {slot.index} died ({error}); restarting it and rerunning its prompts")
        slot.replacing = asyncio.create_task(self._replace(slot, engine))

    async def each(self, call: Callable[[Engine], Awaitable[None]], *, raises_losses: bool = False) -> None:
        """Call all engines; restart those that the call finds dead, raise other errors."""
        engines = [(slot, slot.engine) for slot in self.slots if slot.engine is not None]
        results = await asyncio.gather(*(call(engine) for _, engine in engines), return_exceptions=True)
        losses = []
        for (slot, engine), result in zip(engines, results, strict=True):
            if isinstance(result, EngineLostError):
                self.lose(slot, engine, result)
                losses.append(result)
        if losses and raises_losses:  # the others' errors may only follow from these
            raise losses[0]
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, EngineLostError):
                raise result

    def tell(self) -> None:
        """Wake what waits for a change."""
        self._changed.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until a condition holds; raises the failure of the slots if there is one. The caller keeps the deadline."""
        while not holds():
            if self.failure is not None:
                raise self.failure
            self._changed.clear()
            await self._changed.wait()

    def fail(self, reason: str) -> None:
        """End all waits with this error."""
        self.failure = EngineError(reason)
        self.tell()

    async def close(self) -> None:
        """Stop watching and close all engines."""
        tasks = [task for slot in self.slots for task in (slot.watcher, slot.replacing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.fail("the engine pool is closed")
        await asyncio.gather(*(engine.close() for engine in self.engines), return_exceptions=True)

    async def _watch(self, slot: Slot) -> None:
        while True:
            await asyncio.sleep(self._limits.check_interval_seconds)
            engine = slot.engine
            if engine is None:
                continue
            try:
                # Not wait_for: in Python 3.11 it can swallow the cancel of a close, and the watch would never end.
                async with asyncio.timeout(self._limits.check_timeout_seconds):
                    await engine.health()
            except TimeoutError:
                waited = f"it did not answer within {self._limits.check_timeout_seconds:g} s"
                self.lose(slot, engine, EngineLostError(waited))
            except EngineError as error:
                self.lose(slot, engine, error)

    async def _replace(self, slot: Slot, old: Engine | None) -> None:
        if old is not None:
            with suppress(EngineError):
                await old.close()
        while slot.restarts < self._limits.max_restarts:
            slot.restarts += 1
            try:
                engine = await self._start(slot.index)
                await _closed_on_error(engine, partial(self._on_start, engine))
            except EngineError as error:
                self._note(f"engine {slot.index} did not start ({error}); try {slot.restarts}")
                continue
            has = f"with the weights of version {engine.version}" if engine.version >= 0 else "and waits for weights"
            self._note(f"engine {slot.index} is back {has}")
            slot.engine = engine
            self.tell()
            try:
                await self._on_back()
            except TreadleError as error:
                self.fail(str(error))
            return
        self.fail(
            f"engine {slot.index} died and {self._limits.max_restarts} restarts in a row finished no request; "
            "see the messages about it above, or raise --max-restarts"
        )


async def _closed_on_error(engine: Engine, call: Callable[[], Awaitable[None]]) -> None:
    try:
        await call()
    except BaseException:
        with suppress(EngineError):
            await engine.close()
        raise
