"""The engine that Treadle sees: a vLLM server, and the state it was asked to be in."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

from treadle.errors import DeadlineError, EngineError, EngineLostError
from treadle.rollout.engines.base import EnginePart, check_request
from treadle.rollout.engines.http_calls import HttpCalls, RefusedError
from treadle.rollout.engines.server_process import ServerProcess
from treadle.rollout.engines.vllm_engine.replies import GENERATE, completion_of, request_of
from treadle.types import Completion, SamplingParams, Status
from treadle.weights import Offer

_ABORT_AGAIN_SECONDS = 0.05


@dataclass(frozen=True)
class VllmLimits:
    """`max_length` is the context of the model as the server was started. `seeded`: it can draw each sample from a seed
    of its own (its CPU build can't). `sleeps`: it frees its memory when it sleeps (on a GPU, in sleep mode)."""

    max_length: int
    answer_seconds: float = 30.0
    weights_seconds: float = 600.0
    seeded: bool = False
    sleeps: bool = False


class VllmEngine:
    """Generates with a vLLM server, one request for each sample.

    A sample depends on the weights, the prompt and `sampling` alone only where the server takes seeds. All methods
    belong to one event loop.
    """

    def __init__(
        self,
        calls: HttpCalls,
        eos_token_ids: Collection[int],
        limits: VllmLimits,
        process: ServerProcess | None = None,
    ):
        self._calls, self._eos, self._limits = calls, frozenset(eos_token_ids), limits
        self.process = process
        self._version = -1
        self._running: set[asyncio.Task[Completion]] = set()
        self._paused = self._asleep = self._weights_asleep = self._updating = self._closed = False
        self._torn: str | None = None
        self._gate = asyncio.Lock()  # of what changes the server's state

    @property
    def version(self) -> int:
        return self._version

    @property
    def address(self) -> str:
        return str(self._calls.client.base_url)

    async def set_version(self, version: int) -> None:
        """Say what the weights are called that the server has now."""
        await self._ask("/update_weight_version", {"new_version": str(version)})
        self._version = version

    async def num_workers(self) -> int:
        """Processes that the server divides its model among; each of them receives weights."""
        reply = await self._ask("/get_world_size", method="GET")
        try:
            return int((reply or {})["world_size"])  # type: ignore[call-overload]
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"{self._calls.name} does not say how many workers it has: {reply}") from error

    # Generation

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, n: int = 1
    ) -> AsyncIterator[Completion]:
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
            for task in tasks:  # a request whose connection is closed is given up by the server
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._running -= tasks

    def _ensure_serving(self) -> None:
        if self._closed:
            raise EngineError(f"{self._calls.name} is closed")
        if self._torn is not None:
            raise EngineError(f"{self._calls.name} has no whole weights: {self._torn}")

    async def _sample(self, token_ids: Sequence[int], sampling: SamplingParams, index: int) -> Completion:
        body = request_of(token_ids, sampling, index, self._eos, seeded=self._limits.seeded)
        try:
            reply = await self._calls.ask(GENERATE, body, seconds=None)  # its deadline is the caller's
        except EngineLostError as error:
            if self._closed:
                return _aborted(index)
            raise self._lost(error) from error
        except RefusedError as error:
            if error.status < 500:
                raise
            raise self._lost(EngineLostError(str(error))) from error  # its scheduler died, not this request
        return completion_of(reply, index, self._eos, self._calls.name)

    async def abort(self) -> None:
        """End what is in flight now; requests that come meanwhile are not meant."""
        meant = set(self._running)
        deadline = time.monotonic() + self._limits.answer_seconds
        while waiting := [task for task in meant if not task.done()]:
            # A request may still be on its way to the scheduler when it is told to end all it knows: tell it again.
            await self._ask("/abort_requests", {})
            await asyncio.wait(waiting, timeout=_ABORT_AGAIN_SECONDS)
            if time.monotonic() > deadline:
                raise EngineLostError(
                    f"{self._calls.name}: {len(waiting)} requests did not end within {self._limits.answer_seconds:g} s "
                    "of an abort"
                )

    # State

    async def pause(self) -> None:
        """Stop between two tokens; what is in flight keeps its place."""
        async with self._gate:
            await self._ask("/pause", params={"mode": "keep", "clear_cache": "false"})
            self._paused = True

    async def resume(self) -> None:
        """Go on, unless the weights are not whole or the engine sleeps: then nothing may be generated."""
        async with self._gate:
            self._paused = False
            await self._go_on()

    async def _go_on(self) -> None:
        if not (self._paused or self._asleep or self._torn is not None):
            await self._ask("/resume")

    async def sleep(self) -> None:
        if any(not task.done() for task in self._running):
            raise EngineError(f"{self._calls.name} can't sleep with samples running; abort or finish them first")
        async with self._gate:
            if self._asleep:
                return
            if self._limits.sleeps:
                await self._ask("/sleep", params={"level": 1}, seconds=self._limits.weights_seconds)
            else:
                await self._ask("/pause", params={"mode": "keep", "clear_cache": "false"})
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
                await self._ask("/wake_up", params={"tags": "kv_cache"}, seconds=self._limits.weights_seconds)
            self._asleep = False
            await self._go_on()

    async def _wake_weights(self) -> None:
        if self._weights_asleep:
            await self._ask("/wake_up", params={"tags": "weights"}, seconds=self._limits.weights_seconds)
            self._weights_asleep = False

    async def receive(self, offer: Offer) -> None:
        """Bring the server to the offered weights, between two tokens.

        What is in flight goes on with the new weights, its keys and values computed anew. Raises `EngineError`; where
        the update broke off half-way, what is in flight is aborted and nothing is generated until a whole one succeeds.
        """
        async with self._gate:
            if offer.version < self._version:
                raise EngineError(
                    f"version {offer.version} is offered, {self._calls.name} already has {self._version}; start it anew"
                )
            self._updating = True
            try:
                await self._wake_weights()
                await self._ask("/pause", params={"mode": "keep", "clear_cache": "false"})
                await self._take(offer)
                self._torn, self._version = None, offer.version
            finally:
                self._updating = False
                if not self._closed and self._torn is None:
                    await self._go_on()

    async def _take(self, offer: Offer) -> None:
        update = {"offer": offer.to_json()}
        seconds = self._limits.weights_seconds
        await self._ask("/start_weight_update", seconds=seconds)
        await self._ask("/update_weights", {"update_info": {**update, "check_only": True}}, seconds=seconds)
        self._torn = f"the update to version {offer.version} broke off half-way; push a whole version"
        try:
            await self._ask("/update_weights", {"update_info": update}, seconds=seconds)
            await self._ask("/finish_weight_update", {"weight_version": str(offer.version)}, seconds=seconds)
            await self._forget_keys_and_values()
        except EngineLostError:
            raise
        except EngineError:
            await self.abort()
            raise

    async def _forget_keys_and_values(self) -> None:
        """Those of the old weights; requests in flight have theirs computed anew."""
        reply = await self._ask("/reset_prefix_cache", params={"reset_running_requests": "true"})
        if not (reply or {}).get("success"):
            raise EngineError(f"{self._calls.name} can't let go of keys and values of the old weights")

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
        await self._ask("/health", method="GET")
        await self._ask("/is_paused", method="GET")  # goes through to the scheduler, which `/health` does not ask

    async def wait_until_ready(self, seconds: float) -> None:
        """Return once the server serves; raises `EngineError` with the end of its log where it does not come up."""
        deadline = time.monotonic() + seconds
        while True:
            if self.process is not None and not self.process.is_alive:
                raise EngineError(f"{self._calls.name} did not start: {self.process.tail()}")
            with suppress(EngineError):
                await self._calls.ask("/health", seconds=5.0, method="GET")
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
        with suppress(EngineError):
            if any(not task.done() for task in self._running):
                await self.abort()
        self._closed = True
        if self.process is None:
            with suppress(EngineError):
                await self._ask("/resume")
        else:
            await asyncio.to_thread(self.process.close)
        await self._calls.close()

    async def _ask(
        self,
        path: str,
        body: dict[str, object] | None = None,
        *,
        seconds: float | None = None,
        params: dict[str, object] | None = None,
        method: str = "POST",
    ) -> dict[str, object] | None:
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
    import numpy as np

    nothing = np.zeros(0, dtype=np.int32)
    return Completion(index, nothing, nothing.astype(np.float32), nothing, Status.ABORTED, "abort")
