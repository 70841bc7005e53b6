"""The engine that Treadle sees where a server of its own generates: the state it was asked to be in, and who waits.

What one kind of server is asked, and how its answers read, is its `Dialect`; everything else is the same for all.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from treadle.errors import DeadlineError, EngineError, EngineLostError
from treadle.rollout.engines.base import EnginePart, check_request
from treadle.rollout.engines.http_calls import HttpCalls, RefusedError
from treadle.rollout.engines.server_process import ServerProcess
from treadle.types import Completion, SamplingParams, Status
from treadle.weights import Offer

_ABORT_AGAIN_SECONDS = 0.05
_GIVE_UP_SECONDS = 1.0


class Ask(Protocol):
    """Asks the server; the engine's own deadline where no `seconds` are given."""

    async def __call__(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        seconds: float | None = None,
        params: Mapping[str, Any] | None = None,
        method: str = "POST",
    ) -> Any: ...


class Dialect(Protocol):
    """How one kind of server is spoken to. What it asks for may raise `EngineError`."""

    @property
    def generate_path(self) -> str:
        """Where one sample is asked for."""
        ...

    @property
    def ready_path(self) -> str:
        """Answers once the server serves."""
        ...

    def request_of(
        self, token_ids: Sequence[int], sampling: SamplingParams, index: int, eos_token_ids: Collection[int], name: str
    ) -> dict[str, Any]:
        """Body of the request for sample `index`; `name` is the request's own, for `give_up`."""
        ...

    def completion_of(
        self, reply: Any, index: int, sampling: SamplingParams, eos_token_ids: Collection[int], engine: str
    ) -> Completion:
        """The completion in a reply; raises `EngineError` naming what is wrong with it."""
        ...

    async def give_up(self, ask: Ask, name: str) -> None:
        """End a request whose caller left, where closing its connection is not enough."""
        ...

    async def abort(self, ask: Ask) -> None:
        """End every request the server knows now; their replies say so."""
        ...

    async def pause(self, ask: Ask) -> None:
        """Stop between two tokens. A request can be aborted also while the server is paused."""
        ...

    async def resume(self, ask: Ask) -> None: ...

    async def sleep(self, ask: Ask, seconds: float) -> None:
        """Free weights, keys and values; nothing is in flight."""
        ...

    async def wake(self, ask: Ask, part: EnginePart, seconds: float) -> None: ...

    async def set_version(self, ask: Ask, version: int) -> None: ...

    async def health(self, ask: Ask) -> None:
        """Ask for something that only a scheduler that works can answer."""
        ...

    async def num_workers(self, ask: Ask) -> int:
        """Ranks that the server is in a broadcast of weights."""
        ...

    async def check(self, ask: Ask, offer: Offer, held: ExitStack, seconds: float) -> None:
        """Raise `EngineError` where the server could not take what is offered; nothing has changed then.

        What must stay until the weights are loaded goes into `held`.
        """
        ...

    async def load(self, ask: Ask, offer: Offer, seconds: float) -> None:
        """Load what was checked and forget all keys and values; what fails here leaves a model that is not whole."""
        ...

    def close(self) -> None:
        """Free what was kept between updates."""
        ...


@dataclass(frozen=True)
class ServerLimits:
    """`max_length` is the context of the model as the server was started. `sleeps`: it frees its memory when it sleeps (on
    a GPU, in the mode for it)."""

    max_length: int
    answer_seconds: float = 30.0
    weights_seconds: float = 600.0
    sleeps: bool = False


class ServerEngine:
    """Generates with a server, one request for each sample. All methods belong to one event loop.

    A sample depends on the weights, the prompt and `sampling` alone only where the server takes seeds. What is asked while
    the server is paused waits here, so that an abort finds it.
    """

    def __init__(
        self,
        calls: HttpCalls,
        dialect: Dialect,
        eos_token_ids: Collection[int],
        limits: ServerLimits,
        process: ServerProcess | None = None,
    ):
        self._calls, self._dialect = calls, dialect
        self._eos, self._limits = frozenset(eos_token_ids), limits
        self.process = process
        self._version = -1
        self._running: set[asyncio.Task[Completion]] = set()
        self._given_up: set[asyncio.Task[Completion]] = set()
        self._held: set[asyncio.Future[bool]] = set()  # samples that wait for the server to go on
        self._farewells: set[asyncio.Task[None]] = set()
        self._stopped = False  # the server was told to stop between two tokens
        self._paused = self._asleep = self._weights_asleep = self._updating = self._closed = False
        self._gone = False  # closed because nobody answers: what was in flight is lost, not aborted
        self._torn: str | None = None
        self._gate = asyncio.Lock()  # of what changes the server's state

    @property
    def version(self) -> int:
        return self._version

    @property
    def address(self) -> str:
        return str(self._calls.client.base_url)

    async def set_version(self, version: int) -> None:
        await self._dialect.set_version(self._ask, version)
        self._version = version

    async def num_receivers(self) -> int:
        return await self._dialect.num_workers(self._ask)

    # Generation

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, n: int = 1
    ) -> AsyncGenerator[Completion, None]:
        self._ensure_serving()
        check_request(token_ids, sampling, n, self._limits.max_length)
        tasks = {asyncio.create_task(self._sample(token_ids, sampling, i)) for i in range(n)}
        self._running |= tasks
        waiting = set(tasks)
        try:
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                found = [task.result() for task in done]
                for completion in sorted(found, key=lambda c: (len(c.token_ids), c.index)):
                    yield completion
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._running -= tasks

    def _ensure_serving(self) -> None:
        if self._closed:
            raise EngineError(f"{self._calls.name} is closed")
        if self._torn is not None:
            raise EngineError(f"{self._calls.name} has no whole weights: {self._torn}")

    async def _sample(self, token_ids: Sequence[int], sampling: SamplingParams, index: int) -> Completion:
        if not await self._may_go():
            return self._ended(index)
        name = uuid.uuid4().hex
        body = self._dialect.request_of(token_ids, sampling, index, self._eos, name)
        try:
            reply = await self._calls.ask(self._dialect.generate_path, body, seconds=None)  # the caller's deadline
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task in self._given_up:
                task.uncancel()
                return _aborted(index)
            self._say_farewell(name)
            raise
        except EngineLostError as error:
            if self._closed:
                return self._ended(index)
            raise self._lost(error) from error
        except RefusedError as error:
            if error.status < 500:
                raise
            raise self._lost(EngineLostError(str(error))) from error  # its scheduler died, not this request
        return self._dialect.completion_of(reply, index, sampling, self._eos, self._calls.name)

    def _ended(self, index: int) -> Completion:
        if self._gone:
            raise EngineLostError(f"{self._calls.name} was lost before it ended sample {index}")
        return _aborted(index)

    async def _may_go(self) -> bool:
        """Wait while the server is stopped; False where an abort ended the wait."""
        while self._stopped:
            turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            self._held.add(turn)
            try:
                if not await turn:
                    return False
            finally:
                self._held.discard(turn)
        return True

    def _let_go(self, goes_on: bool) -> None:
        for turn in self._held:
            if not turn.done():
                turn.set_result(goes_on)

    def _say_farewell(self, name: str) -> None:
        async def tell() -> None:
            with suppress(EngineError):
                await self._dialect.give_up(self._ask, name)

        if not self._closed:
            task = asyncio.create_task(tell())
            self._farewells.add(task)
            task.add_done_callback(self._farewells.discard)

    async def abort(self) -> None:
        """End what is in flight now; requests that come meanwhile are not meant."""
        meant = set(self._running)
        self._let_go(False)
        await asyncio.sleep(0)
        start = time.monotonic()
        while waiting := [task for task in meant if not task.done()]:
            # A request may still be on its way to the scheduler when it is told to end all it knows: tell it again.
            await self._dialect.abort(self._ask)
            await asyncio.wait(waiting, timeout=_ABORT_AGAIN_SECONDS)
            waited = time.monotonic() - start
            if self._stopped and waited > _GIVE_UP_SECONDS:  # the server got them as it stopped: they have no token yet
                self._given_up |= set(waiting)
                for task in waiting:
                    task.cancel()
                await asyncio.wait(waiting)
                self._given_up -= set(waiting)
            elif waited > self._limits.answer_seconds:
                raise EngineLostError(
                    f"{self._calls.name}: {len(waiting)} requests did not end within {self._limits.answer_seconds:g} s "
                    "of an abort"
                )

    # State

    async def pause(self) -> None:
        """Stop between two tokens; what is in flight keeps its tokens."""
        async with self._gate:
            await self._stop()
            self._paused = True

    async def _stop(self) -> None:
        self._stopped = True
        try:
            await self._dialect.pause(self._ask)
        except EngineError:
            self._stopped = False
            self._let_go(True)
            raise

    async def resume(self) -> None:
        """Go on, unless the weights are not whole or the engine sleeps: then nothing may be generated."""
        async with self._gate:
            self._paused = False
            await self._go_on()

    async def _go_on(self) -> None:
        if not (self._paused or self._asleep or self._torn is not None):
            await self._dialect.resume(self._ask)
            self._stopped = False
            self._let_go(True)

    async def sleep(self) -> None:
        if any(not task.done() for task in self._running):
            raise EngineError(f"{self._calls.name} can't sleep with samples running; abort or finish them first")
        async with self._gate:
            if self._asleep:
                return
            if self._limits.sleeps:
                self._stopped = True
                await self._dialect.sleep(self._ask, self._limits.weights_seconds)
            else:
                await self._stop()
            self._asleep = True
            self._weights_asleep = self._limits.sleeps

    async def wake(self, part: EnginePart) -> None:
        async with self._gate:
            if not self._asleep:
                return
            await self._wake_weights()
            if part == "weights":
                return
            if self._limits.sleeps:
                await self._dialect.wake(self._ask, "kv", self._limits.weights_seconds)
            self._asleep = False
            await self._go_on()

    async def _wake_weights(self) -> None:
        if self._weights_asleep:
            await self._dialect.wake(self._ask, "weights", self._limits.weights_seconds)
            self._weights_asleep = False

    async def receive(self, offer: Offer) -> None:
        """Bring the server to the offered weights; the keys and values of in-flight requests are computed again."""
        async with self._gate:
            if offer.version < self._version:
                raise EngineError(
                    f"version {offer.version} is offered, {self._calls.name} already has {self._version}; restart it"
                )
            self._updating = True
            try:
                await self._wake_weights()
                await self._stop()
                await self._take(offer)
                self._torn, self._version = None, offer.version
            finally:
                self._updating = False
                if not self._closed and self._torn is None:
                    await self._go_on()

    async def _take(self, offer: Offer) -> None:
        seconds = self._limits.weights_seconds
        with ExitStack() as held:
            await self._dialect.check(self._ask, offer, held, seconds)
            self._torn = f"the update to version {offer.version} broke off half-way; push a whole version"
            try:
                await self._dialect.load(self._ask, offer, seconds)
            except EngineLostError:
                raise
            except EngineError:
                await self.abort()
                raise

    # Life

    async def health(self) -> None:
        if self._closed:
            raise EngineError(f"{self._calls.name} is closed")
        if self.process is not None and not self.process.is_alive:
            raise self._lost(EngineLostError(f"{self._calls.name}: its process ended"))
        if self._torn is not None and not self._updating:
            raise EngineError(f"{self._calls.name} has no whole weights: {self._torn}")
        if self._updating:
            return  # the update has a deadline of its own, and its workers answer nothing else meanwhile
        await self._dialect.health(self._ask)

    async def wait_until_ready(self, seconds: float) -> None:
        """Return once the server serves; raises `EngineError` with the end of its log where it does not come up."""
        deadline = time.monotonic() + seconds
        while True:
            if self.process is not None and not self.process.is_alive:
                raise EngineError(f"{self._calls.name} did not start: {self.process.tail()}")
            with suppress(EngineError):
                await self._calls.ask(self._dialect.ready_path, seconds=5.0, method="GET")
                return
            if time.monotonic() > deadline:
                log = "" if self.process is None else f"; its log ends with: {self.process.tail()}"
                raise DeadlineError(
                    f"{self._calls.name} at {self.address} did not serve within {seconds:g} s; raise "
                    f"--engine-start-timeout-seconds{log}"
                )
            await asyncio.sleep(0.25)

    async def close(self) -> None:
        """End the server that was started for it (an external one is left running); requests in flight are aborted."""
        if self._closed:
            return
        if any(not task.done() for task in self._running):
            try:
                await self._dialect.abort(self._ask)
                await self.abort()
            except EngineError:
                self._gone = True
        self._closed = True
        if self.process is None:
            with suppress(EngineError):
                await self._dialect.resume(self._ask)
        else:
            await asyncio.to_thread(self.process.close)
        self._let_go(False)
        for task in self._farewells:
            task.cancel()
        self._dialect.close()
        await self._calls.close()

    async def _ask(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        seconds: float | None = None,
        params: Mapping[str, Any] | None = None,
        method: str = "POST",
    ) -> Any:
        try:
            wait = seconds or self._limits.answer_seconds
            return await self._calls.ask(path, body, seconds=wait, params=params, method=method)
        except EngineLostError as error:
            raise self._lost(error) from error

    def _lost(self, error: EngineLostError) -> EngineLostError:
        """The same with the end of the log, where the server is ours and ended."""
        if self.process is None or self.process.is_alive:
            return error
        return EngineLostError(f"{error}; its log ends with: {self.process.tail()}")


def _aborted(index: int) -> Completion:
    nothing = np.zeros(0, dtype=np.int32)
    return Completion(index, nothing, nothing.astype(np.float32), nothing, Status.ABORTED, "abort")
