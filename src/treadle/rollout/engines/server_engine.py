"""The engine whose samples a server generates: its state, and the requests in flight.

What one kind of server is asked, and how its replies read, is its `Dialect`; everything else is the same for all.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

import numpy as np

from treadle.errors import EngineError, EngineLostError
from treadle.rollout.engines.base import EnginePart, check_request
from treadle.rollout.engines.server_client import Call, RefusedError, ServerClient
from treadle.rollout.engines.server_dialect import Dialect, completion_of
from treadle.rollout.engines.server_process import ServerProcess
from treadle.types import Completion, SamplingParams, Status
from treadle.weights import Offer

_ABORT_AGAIN_SECONDS = 0.05
_GIVE_UP_SECONDS = 1.0


@dataclass(frozen=True)
class ServerSettings:
    """How a server is used.

    `max_length` is the context of the model as the server was started. `answer_seconds` and `weights_seconds` are the
    deadlines of usual requests and of those that move weights. `sleeps`: the server frees its memory when it sleeps, which
    needs a GPU and a server that was started for it.
    """

    dialect: Dialect
    eos_token_ids: Collection[int]
    max_length: int
    answer_seconds: float = 30.0
    weights_seconds: float = 600.0
    sleeps: bool = False


@dataclass(eq=False)
class InFlight:
    """The samples that are generated now. While the server is stopped, new ones are held here, so that an abort reaches them."""

    client: ServerClient
    settings: ServerSettings
    going: asyncio.Event = field(
        default_factory=asyncio.Event
    )  # cleared while the server is stopped between two tokens
    running: set[asyncio.Task[Completion]] = field(default_factory=set)
    held: set[asyncio.Task[Completion]] = field(default_factory=set)  # of the running ones, those that are not sent yet
    given_up: set[asyncio.Task[Completion]] = field(default_factory=set)
    farewells: set[asyncio.Task[None]] = field(default_factory=set)
    closed: bool = False
    lost: bool = False  # closed because the server does not answer: samples are lost, not aborted

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, n: int
    ) -> AsyncGenerator[Completion, None]:
        """Yield the n samples of a prompt in the order they end."""
        tasks = {asyncio.create_task(self._sample(token_ids, sampling, i)) for i in range(n)}
        self.running |= tasks
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
            self.running -= tasks

    async def _sample(self, token_ids: Sequence[int], sampling: SamplingParams, index: int) -> Completion:
        task, name = asyncio.current_task(), uuid.uuid4().hex
        assert task is not None
        dialect, eos = self.settings.dialect, self.settings.eos_token_ids
        call = Call(dialect.commands.generate, dialect.request_of(token_ids, sampling, index, eos, name))
        self.held.add(task)
        try:
            while not self.going.is_set():
                await self.going.wait()
            self.held.discard(task)
            reply = await self.client.ask(call, seconds=math.inf)  # the caller keeps the deadline
        except asyncio.CancelledError:
            if task in self.given_up:
                task.uncancel()
                return self._ended(index)
            if task not in self.held:
                self._say_farewell(name)
            raise
        except EngineLostError:
            if self.closed:
                return self._ended(index)
            raise
        except RefusedError as error:
            if error.status < 500:
                raise
            raise EngineLostError(f"{error}{self.client.log_end}") from error  # its scheduler died, not this request
        finally:
            self.held.discard(task)
        return completion_of(dialect, reply, index, sampling, eos, self.client.name)

    def _ended(self, index: int) -> Completion:
        if self.lost:
            raise EngineLostError(f"{self.client.name} was lost before it ended sample {index}")
        nothing = np.zeros(0, dtype=np.int32)
        return Completion(index, nothing, nothing.astype(np.float32), nothing, Status.ABORTED, "abort")

    def _say_farewell(self, name: str) -> None:
        async def tell(call: Call) -> None:
            with suppress(EngineError):
                await self.client.ask(call)

        call = self.settings.dialect.give_up(name)
        if call is not None and not self.closed:
            task = asyncio.create_task(tell(call))
            self.farewells.add(task)
            task.add_done_callback(self.farewells.discard)

    async def abort(self) -> None:
        """End the samples that run now, not those that are asked for meanwhile."""
        meant = set(self.running)
        await asyncio.sleep(0)  # all of them start
        await self._give_up(meant & self.held)
        start = time.monotonic()
        while waiting := {task for task in meant if not task.done()}:
            # A request may still be on its way to the scheduler when it is told to end all it knows: tell it again.
            await self.client.ask(self.settings.dialect.commands.abort)
            await asyncio.wait(waiting, timeout=_ABORT_AGAIN_SECONDS)
            waited = time.monotonic() - start
            if not self.going.is_set() and waited > _GIVE_UP_SECONDS:
                await self._give_up(waiting)  # the server got them as it stopped: they have no token yet
            elif waited > self.settings.answer_seconds:
                raise EngineLostError(
                    f"{self.client.name}: {len(waiting)} requests did not end within {self.settings.answer_seconds:g} s "
                    "of an abort"
                )

    async def _give_up(self, tasks: set[asyncio.Task[Completion]]) -> None:
        """End samples that have no token."""
        self.given_up |= tasks
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.given_up -= tasks

    async def close(self) -> None:
        """End what an abort did not reach, and the connections."""
        await self._give_up(set(self.held))
        for task in self.farewells:
            task.cancel()
        await self.client.close()


class ServerEngine:
    """Generates with a server, one request for each sample. All methods belong to one event loop.

    A sample depends only on the weights, the prompt and `sampling` if the server takes seeds.
    """

    def __init__(self, address: str, name: str, settings: ServerSettings, process: ServerProcess | None = None):
        self.process, self._settings, self._dialect = process, settings, settings.dialect
        seconds = settings.answer_seconds, settings.weights_seconds
        self.client = ServerClient(address, name, seconds, process)
        self._version = -1
        self._in_flight = InFlight(self.client, settings)
        self._going = self._in_flight.going
        self._going.set()
        self._paused = self._updating = False
        self._asleep: set[EnginePart] = set()
        self._torn: str | None = None
        self._gate = asyncio.Lock()  # held while the server's state changes

    @property
    def version(self) -> int:
        return self._version

    async def set_version(self, version: int) -> None:
        await self.client.ask(self._dialect.set_version(version))
        self._version = version

    async def num_receivers(self) -> int:
        return await self._dialect.num_workers(self.client)

    def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, n: int = 1
    ) -> AsyncGenerator[Completion, None]:
        self._ensure_serving()
        check_request(token_ids, sampling, n, self._settings.max_length)
        return self._in_flight.generate(token_ids, sampling, n)

    def _ensure_serving(self) -> None:
        if self._in_flight.closed:
            raise EngineError(f"{self.client.name} is closed")
        if self._torn is not None:
            raise EngineError(f"{self.client.name} has no whole weights: {self._torn}")

    async def abort(self) -> None:
        await self._in_flight.abort()

    # State

    async def pause(self) -> None:
        async with self._gate:
            await self._stop()
            self._paused = True

    async def _stop(self) -> None:
        self._going.clear()
        try:
            await self.client.ask(self._dialect.commands.pause)
        except EngineError:
            self._going.set()
            raise

    async def resume(self) -> None:
        """Continue, unless the weights are not whole or the engine sleeps: then nothing may be generated."""
        async with self._gate:
            self._paused = False
            await self._go_on()

    async def _go_on(self) -> None:
        if not (self._paused or self._asleep or self._torn is not None):
            await self.client.ask(self._dialect.commands.resume)
            self._going.set()

    async def sleep(self) -> None:
        if any(not task.done() for task in self._in_flight.running):
            raise EngineError(f"{self.client.name} can't sleep with samples running; abort or finish them first")
        async with self._gate:
            if self._asleep:
                return
            if self._settings.sleeps:
                self._going.clear()
                for call in self._dialect.commands.sleep:
                    await self.client.ask(call)
                self._asleep = {"weights", "kv"}
            else:
                await self._stop()
                self._asleep = {"kv"}

    async def wake(self, part: EnginePart) -> None:
        async with self._gate:
            if self._asleep:
                await self._wake("weights")
                if part == "kv":
                    await self._wake("kv")
                await self._go_on()

    async def _wake(self, part: EnginePart) -> None:
        if part in self._asleep:
            if self._settings.sleeps:
                await self.client.ask(self._dialect.commands.wake[part])
            self._asleep.discard(part)

    async def receive(self, offer: Offer) -> None:
        """Bring the server to the offered weights; the keys and values of in-flight requests are computed again."""
        async with self._gate:
            if offer.version < self._version:
                raise EngineError(
                    f"version {offer.version} is offered, {self.client.name} already has {self._version}; restart it"
                )
            self._updating = True
            try:
                await self._wake("weights")
                await self._stop()
                with ExitStack() as held:
                    await self._dialect.check(self.client, offer, held)
                    self._torn = f"the update to version {offer.version} broke off half-way; push a whole version"
                    await self._dialect.load(self.client, offer)
                self._torn, self._version = None, offer.version
            except EngineError as error:
                if self._torn is not None and not isinstance(error, EngineLostError):
                    await self.abort()
                raise
            finally:
                self._updating = False
                if not self._in_flight.closed and self._torn is None:
                    await self._go_on()

    # Life

    async def health(self) -> None:
        if self.process is not None and not self.process.is_alive and not self._in_flight.closed:
            raise self.client.lost("died: its process ended")
        if self._updating and not self._in_flight.closed:
            return  # the update has a deadline of its own, and its workers answer nothing else meanwhile
        self._ensure_serving()
        for call in self._dialect.commands.health:
            await self.client.ask(call)

    async def close(self) -> None:
        """End the server if it was started for this engine, else let it run on; requests in flight are aborted."""
        if self._in_flight.closed:
            return
        try:
            await self.abort()
        except EngineError:
            self._in_flight.lost = True
        self._in_flight.closed = True
        if self.process is None:
            with suppress(EngineError):
                await self.client.ask(self._dialect.commands.resume)
        else:
            await asyncio.to_thread(self.process.close)
        self._dialect.close()
        await self._in_flight.close()
