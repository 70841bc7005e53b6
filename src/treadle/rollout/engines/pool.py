"""Several engines as one: the least loaded engine serves; one that died is restarted and its requests are rerun.

A sample depends on the weights, the prompt, its seed and its index only. A request that an engine did not finish is
therefore given to another engine from its start, and samples that were returned before are not returned twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Literal

from treadle.errors import EngineLostError
from treadle.rollout.engines.base import Engine, EnginePart
from treadle.rollout.engines.restarts import EngineSlots, PoolLimits, Slot, StartEngine
from treadle.types import Completion, SamplingParams, Status
from treadle.weights import Offer, find_transport

OnPublish = Literal["wait", "pause", "abort"]


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
        self.republish = republish
        self._offer: Offer | None = None  # the newest that all engines received
        self._named: int | None = None  # the version of weights that all engines were started with
        self._open = True  # False while weights are received
        self._asleep = False
        self._aborts = 0  # by publishes; what they end is rerun

        async def publish_again() -> None:
            if self.wants_weights and self.republish is not None:
                await self.republish()

        self._slots = EngineSlots(engines, start_engine, limits, note, self._bring_up, publish_again)

    @property
    def version(self) -> int:
        """The oldest version that any engine generates with."""
        return min((engine.version for engine in self._slots.engines), default=-1)

    @property
    def wants_weights(self) -> bool:
        """True if a restarted engine waits for the next publish."""
        return self._offer is not None and any(engine.version < 0 for engine in self._slots.engines)

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
                self._slots.lose(slot, engine, error)
            finally:
                slot.load -= n
                self._slots.tell()

    async def _pick(self) -> tuple[Slot, Engine]:
        """Return the engine with the fewest samples in flight; wait until one serves. The caller keeps the deadline.

        A restarted engine that waits for the next publish (its version is -1) does not have the run's weights.
        """

        def serving() -> list[tuple[Slot, Engine]]:
            if not self._open or self._slots.failure is not None:
                return []
            return [(s, s.engine) for s in self._slots.slots if s.engine is not None and s.engine.version >= 0]

        await self._slots.until(lambda: bool(serving()))
        return min(serving(), key=lambda found: (found[0].load, found[0].index))

    # Weights

    async def prepare(self, on_publish: OnPublish) -> None:
        """Make ready to receive: wait until no engine is being started and admit no new requests. In-flight requests finish
        first ("wait"), continue later with the new weights ("pause"), or are aborted and rerun ("abort")."""
        slots = self._slots.slots
        await self._slots.until(lambda: all(slot.engine is not None for slot in slots))
        self._open = False
        if on_publish == "wait":
            await self._slots.until(lambda: not any(slot.load for slot in slots))
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
        known = await asyncio.gather(*(engine.num_receivers() for engine in self._slots.engines))
        return sum(known) + max(known, default=1) * (len(self._slots.slots) - len(known))

    async def _update(self, apply: Callable[[Engine], Awaitable[None]]) -> None:
        async def paused(engine: Engine) -> None:
            await engine.pause()
            try:
                await apply(engine)
            finally:
                await engine.resume()

        try:
            await self._slots.each(paused, raises_losses=True)
        finally:
            self._open = True
            self._slots.tell()

    async def _bring_up(self, engine: Engine) -> None:
        """Give a new engine the state of the others, as far as that is possible without a publish."""
        if self._named is not None:
            await engine.set_version(self._named)
        elif self._offer is not None and find_transport(self._offer.transport).holds_everything:
            await engine.receive(self._offer)
        if self._asleep:
            await engine.sleep()

    # The rest of an engine

    async def abort(self) -> None:
        await self._slots.each(lambda engine: engine.abort())

    async def pause(self) -> None:
        await self._slots.each(lambda engine: engine.pause())

    async def resume(self) -> None:
        await self._slots.each(lambda engine: engine.resume())

    async def sleep(self) -> None:
        self._asleep = True
        await self._slots.each(lambda engine: engine.sleep())

    async def wake(self, part: EnginePart) -> None:
        self._asleep = False
        await self._slots.each(lambda engine: engine.wake(part))

    async def health(self) -> None:
        if self._slots.failure is not None:
            raise self._slots.failure

    async def close(self) -> None:
        await self._slots.close()
