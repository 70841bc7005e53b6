"""Several engines as one: the least loaded engine serves; one that died is restarted and its requests are rerun.

A sample depends on the weights, the prompt, its seed and its index only. A request that an engine did not finish is
therefore given to another engine from its start, and samples that were returned before are not returned twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Literal

from treadle.errors import EngineError, EngineLostError, TreadleError
from treadle.rollout.engines.base import Engine, EnginePart
from treadle.types import Completion, SamplingParams, Status
from treadle.weights import Offer, find_transport

OnPublish = Literal["wait", "pause", "abort"]
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
class _Slot:
    """The slot of one engine; None while it is being started."""

    index: int
    engine: Engine | None
    load: int = 0
    restarts: int = 0
    watcher: asyncio.Task[None] | None = None
    replacing: asyncio.Task[None] | None = None


class EnginePool:
    """An engine made of engines. `note` is called for each death and restart; an engine given as None is started at once.

    A restarted engine gets the weights of the others: from the newest offer if that holds everything, else by another
    publish, for which `republish` is called. Without it, `wants_weights` tells the owner that an engine waits for one.
    """

    def __init__(
        self,
        engines: Sequence[Engine | None],
        start_engine: StartEngine,
        limits: PoolLimits,
        note: Callable[[str], None],
        republish: Callable[[], Awaitable[None]] | None = None,
    ):
        self._slots = [_Slot(i, engine) for i, engine in enumerate(engines)]
        self._start_engine, self._limits, self._note = start_engine, limits, note
        self.republish = republish
        self._offer: Offer | None = None  # the newest that all engines received
        self._named: int | None = None  # the version of weights that all engines were started with
        self._changed = asyncio.Event()
        self._open = True  # False while weights are received
        self._asleep = False
        self._aborts = 0  # by publishes; what they end is rerun
        self._failure: EngineError | None = None
        for slot in self._slots:
            slot.watcher = asyncio.create_task(self._watch(slot))
            if slot.engine is None:
                slot.replacing = asyncio.create_task(self._replace(slot, None))

    @property
    def version(self) -> int:
        """The oldest version that any engine generates with."""
        return min((engine.version for engine in self._engines), default=-1)

    @property
    def wants_weights(self) -> bool:
        """True if a restarted engine waits for the next publish."""
        return self._offer is not None and any(engine.version < 0 for engine in self._engines)

    @property
    def _engines(self) -> list[Engine]:
        return [slot.engine for slot in self._slots if slot.engine is not None]

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, n: int = 1
    ) -> AsyncGenerator[Completion, None]:
        given: set[int] = set()
        while len(given) < n:
            slot, engine = await self._pick()
            slot.load += n
            aborts = self._aborts
            try:
                async with aclosing(engine.generate(token_ids, sampling, n)) as completions:
                    async for completion in completions:
                        ended_by_publish = completion.status is Status.ABORTED and self._aborts > aborts
                        if completion.index in given or ended_by_publish:
                            continue
                        given.add(completion.index)
                        yield completion
                slot.restarts = 0
            except EngineLostError as error:
                self._lose(slot, engine, error)
            finally:
                slot.load -= n
                self._tell()

    async def _pick(self) -> tuple[_Slot, Engine]:
        """Return the engine with the fewest samples in flight; wait until one serves. The caller keeps the deadline.

        A restarted engine that waits for the next publish (its version is -1) does not have the run's weights.
        """
        while True:
            if self._failure is not None:
                raise self._failure
            serving = [slot for slot in self._slots if slot.engine is not None and slot.engine.version >= 0]
            if self._open and serving:
                slot = min(serving, key=lambda s: (s.load, s.index))
                assert slot.engine is not None
                return slot, slot.engine
            await self._change()

    # Weights

    async def prepare(self, on_publish: OnPublish) -> None:
        """Make ready to receive: wait until no engine is being started and admit no new requests. In-flight requests finish
        first ("wait"), continue later with the new weights ("pause"), or are aborted and rerun ("abort")."""
        await self._until(lambda: all(slot.engine is not None for slot in self._slots))
        self._open = False
        if on_publish == "wait":
            await self._until(lambda: not any(slot.load for slot in self._slots))
        elif on_publish == "abort":
            self._aborts += 1
            await self.abort()

    async def receive(self, offer: Offer) -> None:
        """Bring every engine to the offered weights, between two tokens; then admit requests again.

        Raises `EngineError` if an engine refuses. An engine that dies is restarted, and its error is raised: offer again.
        """
        await self._update(lambda engine: engine.receive(offer))
        self._offer, self._named = offer, None

    async def set_version(self, version: int) -> None:
        """Name the weights that every engine was started with."""
        await self.prepare("wait")
        await self._update(lambda engine: engine.set_version(version))
        self._named = version

    async def num_receivers(self) -> int:
        """Return the number of processes that receive weights; an engine that is being started has as many as the others."""
        known = await asyncio.gather(*(engine.num_receivers() for engine in self._engines))
        return sum(known) + max(known, default=1) * (len(self._slots) - len(known))

    async def _update(self, apply: Callable[[Engine], Awaitable[None]]) -> None:
        async def paused(engine: Engine) -> None:
            await engine.pause()
            try:
                await apply(engine)
            finally:
                await engine.resume()

        try:
            await self._each(paused, raises_losses=True)
        finally:
            self._open = True
            self._tell()

    # Failures

    async def _watch(self, slot: _Slot) -> None:
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
                self._lose(slot, engine, EngineLostError(waited))
            except EngineError as error:
                self._lose(slot, engine, error)

    def _lose(self, slot: _Slot, engine: Engine, error: EngineError) -> None:
        if slot.engine is not engine or self._failure is not None:
            return  # noticed before
        slot.engine = None
        self._note(f"engine {slot.index} died ({error}); restarting it and rerunning its prompts")
        slot.replacing = asyncio.create_task(self._replace(slot, engine))

    async def _replace(self, slot: _Slot, old: Engine | None) -> None:
        if old is not None:
            with suppress(EngineError):
                await old.close()
        while slot.restarts < self._limits.max_restarts:
            slot.restarts += 1
            try:
                engine = await self._start_engine(slot.index)
                await self._bring_up(engine)
            except EngineError as error:
                self._note(f"engine {slot.index} did not start ({error}); try {slot.restarts}")
                continue
            has = f"with the weights of version {engine.version}" if engine.version >= 0 else "and waits for weights"
            self._note(f"engine {slot.index} is back {has}")
            slot.engine = engine
            self._tell()
            if self.wants_weights and self.republish is not None:
                await self._again(self.republish)
            return
        self._fail(
            f"engine {slot.index} died and {self._limits.max_restarts} restarts in a row finished no request; "
            "see the messages about it above, or raise --max-restarts"
        )

    async def _bring_up(self, engine: Engine) -> None:
        """Give a new engine the state of the others, as far as that is possible without a publish; close it on failure."""
        try:
            if self._named is not None:
                await engine.set_version(self._named)
            elif self._offer is not None and find_transport(self._offer.transport).holds_everything:
                await engine.receive(self._offer)
            if self._asleep:
                await engine.sleep()
        except BaseException:
            with suppress(EngineError):
                await engine.close()
            raise

    async def _again(self, republish: Callable[[], Awaitable[None]]) -> None:
        try:
            await republish()
        except TreadleError as error:
            self._fail(str(error))

    def _fail(self, reason: str) -> None:
        self._failure = EngineError(reason)
        self._tell()

    def _tell(self) -> None:
        self._changed.set()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            if self._failure is not None:
                raise self._failure
            await self._change()

    # The rest of an engine

    async def _each(self, call: Callable[[Engine], Awaitable[None]], *, raises_losses: bool = False) -> None:
        """Call all engines; restart those that the call finds dead, raise other errors."""
        engines = [(slot, slot.engine) for slot in self._slots if slot.engine is not None]
        results = await asyncio.gather(*(call(engine) for _, engine in engines), return_exceptions=True)
        losses = []
        for (slot, engine), result in zip(engines, results, strict=True):
            if isinstance(result, EngineLostError):
                self._lose(slot, engine, result)
                losses.append(result)
        if losses and raises_losses:  # the others' errors may only follow from these
            raise losses[0]
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, EngineLostError):
                raise result

    async def abort(self) -> None:
        await self._each(lambda engine: engine.abort())

    async def pause(self) -> None:
        await self._each(lambda engine: engine.pause())

    async def resume(self) -> None:
        await self._each(lambda engine: engine.resume())

    async def sleep(self) -> None:
        self._asleep = True
        await self._each(lambda engine: engine.sleep())

    async def wake(self, part: EnginePart) -> None:
        self._asleep = False
        await self._each(lambda engine: engine.wake(part))

    async def health(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def close(self) -> None:
        tasks = [task for slot in self._slots for task in (slot.watcher, slot.replacing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        engines = self._engines
        self._fail("the engine pool is closed")
        await asyncio.gather(*(engine.close() for engine in engines), return_exceptions=True)
