"""An engine in its own worker process (the torch engine, or the client of a server that it starts), and its proxy."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from treadle.chat import load_codec
from treadle.errors import DeadlineError, EngineError, EngineLostError, TreadleError, WorkerLostError
from treadle.models.load import pick_device
from treadle.rollout.engines.base import Engine, EnginePart
from treadle.run import build
from treadle.run.compute import ComputeThread
from treadle.run.memory import PeakMemory
from treadle.run.ray.worker import Call, Worker, WorkerActor, WorkerSetup
from treadle.run.servers import ServerPlace, is_server, open_server
from treadle.types import Completion, SamplingParams
from treadle.weights import Offer

Result = TypeVar("Result")


class EngineActor(WorkerActor):
    """One engine with its own copy of the model. A server ends with this process, however it ends."""

    def __init__(self, setup: WorkerSetup, index: int):
        super().__init__(setup)
        self._index = index
        self._engine: Engine | None = None
        # Memory is measured of engines that compute in this process; a server has its own.
        self._memory = None if is_server(setup.config) else PeakMemory(pick_device(setup.config.model.device).type)
        self._compute = ComputeThread()

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "start first"
        return self._engine

    async def start(self) -> int:
        """Load the model; the engine generates only after its first weights. Return the processes that receive them."""
        config, model_path = self._setup.config, self._setup.model_path
        codec = await asyncio.to_thread(load_codec, model_path)
        if self._memory is None:
            logs = Path(tempfile.mkdtemp(prefix="treadle-engine-"))
            self._engine = await open_server(config, ServerPlace(model_path, codec, logs), self._index)
        else:
            model = await self._compute.run(build.load_policy, config, model_path, trainable=False)
            self._engine = build.open_torch_engine(config, model, codec, self._compute, owns_weights=True)
        return await self.engine.num_receivers()

    async def generate(self, token_ids: tuple[int, ...], sampling: SamplingParams, n: int) -> list[Completion]:
        return [completion async for completion in self.engine.generate(token_ids, sampling, n)]

    async def receive(self, offer: Offer) -> int:
        """Receive the offered weights; return their version."""
        await self.engine.receive(offer)
        return self.engine.version

    async def ask(self, method: Callable[..., Awaitable[None]], *args: Any) -> None:
        """Call this method of the engine."""
        await getattr(self.engine, method.__name__)(*args)

    async def sleep(self) -> float | None:
        """Put the engine to sleep; return the peak memory of the turn that ends, in GiB (None for a server)."""
        peak = self._turn()
        await self.engine.sleep()
        self._turn()
        return peak

    async def wake(self, part: EnginePart) -> float | None:
        """Wake a part of the engine; with the weights, return the peak memory of the turn that ends, in GiB."""
        peak = self._turn() if part == "weights" else None
        await self.engine.wake(part)
        return peak

    def _turn(self) -> float | None:
        return None if self._memory is None else self._memory.turn()


class RemoteEngine:
    """An `Engine` whose work is done by an `EngineActor`.

    If the actor dies or is late, a call raises `EngineLostError`; if the engine refuses, `EngineError`. The samples of a
    request come together, when the last of them is done.
    """

    def __init__(self, worker: Worker[EngineActor], answer_seconds: float, weights_seconds: float):
        self._worker, self._answer_seconds, self._weights_seconds = worker, answer_seconds, weights_seconds
        self._version, self._num_receivers = -1, 1
        self.turn_gib: float | None = None  # the peak memory of the last turn, awake or asleep, if known

    @property
    def version(self) -> int:
        return self._version

    async def start(self, seconds: float) -> None:
        """Load the model."""
        self._num_receivers = await _answer(self._worker.call("its start", EngineActor.start), seconds)

    async def num_receivers(self) -> int:
        return self._num_receivers

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, n: int = 1
    ) -> AsyncGenerator[Completion, None]:
        # Its deadline is the caller's, as for every engine: it knows how long a rollout may take.
        call = self._worker.call("generation", EngineActor.generate, tuple(token_ids), sampling, n)
        for completion in await _answer(call, None):
            yield completion

    async def receive(self, offer: Offer) -> None:
        call = self._worker.call(f"weights {offer.version}", EngineActor.receive, offer)
        self._version = await _answer(call, self._weights_seconds)

    async def set_version(self, version: int) -> None:
        await self._ask("the version", Engine.set_version, version)
        self._version = version

    async def abort(self) -> None:
        await self._ask("abort", Engine.abort)

    async def pause(self) -> None:
        await self._ask("pause", Engine.pause)

    async def resume(self) -> None:
        await self._ask("resume", Engine.resume)

    async def health(self) -> None:
        await self._ask("health", Engine.health)

    async def _ask(self, what: str, method: Callable[..., Awaitable[None]], *args: Any) -> None:
        await _answer(self._worker.call(what, EngineActor.ask, method, *args), self._answer_seconds)

    async def sleep(self) -> None:
        self.turn_gib = await _answer(self._worker.call("sleep", EngineActor.sleep), self._answer_seconds)

    async def wake(self, part: EnginePart) -> None:
        call = self._worker.call(f"wake {part}", EngineActor.wake, part)
        self.turn_gib = await _answer(call, self._answer_seconds)

    async def close(self) -> None:
        """End the process at once."""
        with suppress(EngineLostError):
            self._worker.kill()


async def _answer(call: Call[Result], timeout_seconds: float | None) -> Result:
    """Return the call's result; raise `EngineLostError` if the engine died or is late, else an `EngineError`."""
    try:
        return await call.value(timeout_seconds)
    except (WorkerLostError, DeadlineError) as error:
        raise EngineLostError(str(error)) from error
    except EngineError:
        raise
    except TreadleError as error:
        raise EngineError(str(error)) from error
