"""Several engines as one: the least loaded one serves; one that died is restarted and its requests are rerun.

A sample depends on the weights, the prompt, its seed and its index only, so a request that an engine did not finish is
given whole to another and the samples that came before are not given twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Literal

from treadle.errors import EngineError, EngineLostError
from treadle.rollout.engines.base import Engine, EnginePart
from treadle.types import Completion, SamplingParams, Status

OnPublish = Literal["wait", "pause", "abort"]
PUBLISH_TRIES = 3
"""How often weights are offered where engines are lost while they take them."""
StartEngine = Callable[[int], Awaitable[Engine]]
"""Restarts engine `index` with the current weights; raises `EngineError` if that fails."""


@dataclass(frozen=True)
class PoolLimits:
    """Interval and timeout of an engine's health checks, and how often it is restarted.

    `max_restarts` counts restarts between which the engine finished no request.
    """

    check_interval_seconds: float
    check_timeout_seconds: float
    max_restarts: int


@dataclass(eq=False)
class _Seat:
    """The place of one engine; None while it is being started."""

    index: int
    engine: Engine | None
    load: int = 0
    restarts: int = 0
    watcher: asyncio.Task[None] | None = None
    replacing: asyncio.Task[None] | None = None


class EnginePool:
    """An engine made of engines. `note` is called for each loss and restart; an engine given as None is started at once."""

    def __init__(
        self,
        engines: Sequence[Engine | None],
        start_engine: StartEngine,
        limits: PoolLimits,
        note: Callable[[str], None],
    ):
        self._seats = [_Seat(i, engine) for i, engine in enumerate(engines)]
        self._start_engine, self._limits, self._note = start_engine, limits, note
        self._changed = asyncio.Event()
        self._open = True  # closed while weights are exchanged
        self._asleep = False
        self._aborts = 0  # of publishes; what they end is redone
        self._failure: EngineError | None = None
        self.num_redone = 0
        for seat in self._seats:
            seat.watcher = asyncio.create_task(self._watch(seat))
            if seat.engine is None:
                seat.replacing = asyncio.create_task(self._replace(seat, None))

    @property
    def version(self) -> int:
        """The oldest version that any engine generates with."""
        return min((seat.engine.version for seat in self._seats if seat.engine is not None), default=-1)

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, n: int = 1
    ) -> AsyncIterator[Completion]:
        given: set[int] = set()
        while len(given) < n:
            seat, engine = await self._pick()
            seat.load += n
            aborts = self._aborts
            try:
                async with aclosing(engine.generate(token_ids, sampling, n)) as completions:
                    async for completion in completions:
                        ended_by_publish = completion.status is Status.ABORTED and self._aborts > aborts
                        if completion.index in given or ended_by_publish:
                            continue
                        given.add(completion.index)
                        yield completion
                seat.restarts = 0
            except EngineLostError as error:
                self._lose(seat, engine, error)
            finally:
                seat.load -= n
                self._tell()
            if len(given) < n:
                self.num_redone += 1

    async def _pick(self) -> tuple[_Seat, Engine]:
        """The engine with the fewest samples in flight; waits until one serves. The deadline is the caller's.

        One that was restarted and waits for the next publish (its version is -1) has other weights than the run's.
        """
        while True:
            if self._failure is not None:
                raise self._failure
            serving = [seat for seat in self._seats if seat.engine is not None and seat.engine.version >= 0]
            if self._open and serving:
                seat = min(serving, key=lambda s: (s.load, s.index))
                assert seat.engine is not None
                return seat, seat.engine
            await self._change()

    # Weights

    async def prepare(self, on_publish: OnPublish) -> None:
        """Make ready for new weights: wait until no engine is missing, take no new requests, and have those in flight
        finish ("wait"), go on later ("pause") or be given up and redone ("abort")."""
        await self._until(lambda: all(seat.engine is not None for seat in self._seats))
        self._open = False
        if on_publish == "wait":
            await self._until(lambda: not any(seat.load for seat in self._seats))
        elif on_publish == "abort":
            self._aborts += 1
            await self.abort()

    async def update(self, apply: Callable[[Engine], Awaitable[None]]) -> None:
        """Bring every engine to new weights by `apply`, between two tokens; then requests are taken again.

        Raises `EngineError` where an engine refuses. One that is lost is replaced, and raises as well: offer again.
        """
        try:
            await self._each(lambda engine: self._exchange(engine, apply), raises_losses=True)
        finally:
            self._open = True
            self._tell()

    @staticmethod
    async def _exchange(engine: Engine, apply: Callable[[Engine], Awaitable[None]]) -> None:
        await engine.pause()
        try:
            await apply(engine)
        finally:
            await engine.resume()

    # Losses

    async def _watch(self, seat: _Seat) -> None:
        while True:
            await asyncio.sleep(self._limits.check_interval_seconds)
            engine = seat.engine
            if engine is None:
                continue
            try:
                # Not wait_for: in Python 3.11 it can swallow the cancel of a close, and the watch would never end.
                async with asyncio.timeout(self._limits.check_timeout_seconds):
                    await engine.health()
            except TimeoutError:
                waited = f"it did not answer within {self._limits.check_timeout_seconds:g} s"
                self._lose(seat, engine, EngineLostError(waited))
            except EngineError as error:
                self._lose(seat, engine, error)

    def _lose(self, seat: _Seat, engine: Engine, error: EngineError) -> None:
        if seat.engine is not engine or self._failure is not None:
            return  # somebody else noticed first
        seat.engine = None
        self._note(f"engine {seat.index} died ({error}); restarting it and rerunning its prompts")
        seat.replacing = asyncio.create_task(self._replace(seat, engine))

    async def _replace(self, seat: _Seat, old: Engine | None) -> None:
        if old is not None:
            with suppress(EngineError):
                await old.close()
        while seat.restarts < self._limits.max_restarts:
            seat.restarts += 1
            try:
                engine = await self._start_engine(seat.index)
                if self._asleep:
                    await engine.sleep()
            except EngineError as error:
                self._note(f"engine {seat.index} did not start ({error}); try {seat.restarts}")
                continue
            has = f"with the weights of version {engine.version}" if engine.version >= 0 else "and waits for weights"
            self._note(f"engine {seat.index} is back {has}")
            seat.engine = engine
            self._tell()
            return
        self._failure = EngineError(
            f"engine {seat.index} was lost and {self._limits.max_restarts} restarts in a row finished no request; "
            "see what was said of it above, or raise --max-restarts"
        )
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
        """The same call to all engines; one that is lost by it is replaced, other errors are raised."""
        engines = [(seat, seat.engine) for seat in self._seats if seat.engine is not None]
        results = await asyncio.gather(*(call(engine) for _, engine in engines), return_exceptions=True)
        losses = []
        for (seat, engine), result in zip(engines, results, strict=True):
            if isinstance(result, EngineLostError):
                self._lose(seat, engine, result)
                losses.append(result)
        if losses and raises_losses:  # what the others say then may be no more than that
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
        tasks = [task for seat in self._seats for task in (seat.watcher, seat.replacing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        engines = [seat.engine for seat in self._seats if seat.engine is not None]
        self._failure = EngineError("the engine pool is closed")
        self._tell()
        await asyncio.gather(*(engine.close() for engine in engines), return_exceptions=True)
