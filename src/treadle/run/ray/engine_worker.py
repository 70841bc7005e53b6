"""An engine in a worker process of its own (the torch engine, or the client of a server that it starts), and the engine
that its callers see."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from treadle.chat import load_codec
from treadle.errors import DeadlineError, EngineError, EngineLostError, TreadleError, WorkerLostError
from treadle.rollout.engines.base import EnginePart
from treadle.rollout.engines.server_engine import ServerEngine
from treadle.rollout.engines.torch_engine import TorchEngine
from treadle.run import build
from treadle.run.compute import ComputeThread
from treadle.run.memory import PeakMemory
from treadle.run.ray.calls import Call
from treadle.run.ray.worker import Worker, WorkerActor, WorkerSetup
from treadle.run.servers import ServerPlace, is_server, open_server
from treadle.training.offload import HostCopies
from treadle.types import Completion, SamplingParams
from treadle.weights import Offer, ServedWeights
from treadle.weights.base import WeightReceiver
from treadle.weights.named import open_receiver

Result = TypeVar("Result")


class EngineActor(WorkerActor):
    """One engine with its own copy of the model. A server ends with this process, however it ends."""

    def __init__(self, setup: WorkerSetup, index: int):
        super().__init__(setup)
        self._index = index
        self._engine: TorchEngine | ServerEngine | None = None
        self._served: ServedWeights | None = None
        self._receivers: dict[str, WeightReceiver] = {}
        self._host, self._memory = HostCopies(), PeakMemory()
        self._compute = ComputeThread()

    @property
    def engine(self) -> TorchEngine | ServerEngine:
        assert self._engine is not None, "start first"
        return self._engine

    async def start(self) -> int:
        """Load the model; it generates only after its first weights. How many processes of it receive them."""
        config = self._setup.config
        codec = await asyncio.to_thread(load_codec, self._setup.model_path)
        if is_server(config):
            logs = Path(tempfile.mkdtemp(prefix="treadle-engine-"))
            server = self._engine = await open_server(
                config, ServerPlace(self._setup.model_path, codec, logs), self._index
            )
            return await server.num_workers()
        model = await self._compute.run(build.load_policy, config, self._setup.model_path, trainable=False)
        self._engine = build.open_torch_engine(config, model, codec, self._compute)
        return 1

    async def generate(self, token_ids: tuple[int, ...], sampling: SamplingParams, n: int) -> list[Completion]:
        return [completion async for completion in self.engine.generate(token_ids, sampling, n)]

    async def receive(self, offer: dict[str, Any]) -> int:
        """Take offered weights; the version."""
        given, engine = Offer.from_json(offer), self.engine
        if isinstance(engine, ServerEngine):
            await engine.receive(given)
            return engine.version
        if self._served is None:
            self._served = ServedWeights(dict(engine.model.named_parameters()), engine.set_version)
        if given.transport not in self._receivers:
            self._receivers[given.transport] = open_receiver(given.transport, self._served)
        await engine.receive_weights(self._receivers[given.transport], given)
        return engine.version

    async def set_version(self, version: int) -> int:
        if isinstance(self.engine, ServerEngine):
            await self.engine.set_version(version)
        else:
            self.engine.set_version(version)
        return version

    async def abort(self) -> None:
        await self.engine.abort()

    async def pause(self) -> None:
        await self.engine.pause()

    async def resume(self) -> None:
        await self.engine.resume()

    async def sleep(self) -> float | None:
        """Free keys and values, and the device's memory of the model's own copy, which goes to the host.

        The most memory of the turn that ends, in GiB; None of a server, which has its own.
        """
        engine = self.engine
        if isinstance(engine, ServerEngine):
            await engine.sleep()
            return None
        most = self._memory.turn(engine.model.device.type)
        await engine.sleep()
        await self._compute.run(self._host.sleep, [*engine.model.parameters(), *engine.model.buffers()])
        self._memory.turn(engine.model.device.type)
        return most

    async def wake(self, part: EnginePart) -> float | None:
        """Inverse of `sleep`, by parts; with the weights, the most memory of the turn that ends."""
        engine, most = self.engine, None
        if part == "weights" and not isinstance(engine, ServerEngine):
            most = self._memory.turn(engine.model.device.type)
            await self._compute.run(self._host.wake)
        await engine.wake(part)
        return most

    async def health(self) -> None:
        await self.engine.health()


class RemoteEngine:
    """An `Engine` whose work is done by an `EngineActor`.

    A call of an engine that died or is late raises `EngineLostError`, one that it refuses `EngineError`. The samples of a
    request come together, when the last of them is done.
    """

    def __init__(self, worker: Worker[EngineActor], answer_seconds: float, weights_seconds: float):
        self._worker, self._answer_seconds, self._weights_seconds = worker, answer_seconds, weights_seconds
        self._version = -1
        self.turn_gib: float | None = None  # the peak memory of the last turn, of waking or of sleeping, where known

    @property
    def version(self) -> int:
        return self._version

    async def start(self, seconds: float) -> int:
        """Load the model; return the number of processes that receive weights."""
        return await _answer(self._worker.call("its start", EngineActor.start), seconds)

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, n: int = 1
    ) -> AsyncIterator[Completion]:
        # Its deadline is the caller's, as for every engine: it knows how long a rollout may take.
        call = self._worker.call("generation", EngineActor.generate, tuple(token_ids), sampling, n)
        for completion in await _answer(call, None):
            yield completion

    async def receive(self, offer: Offer) -> None:
        """Bring the engine to the offered weights."""
        call = self._worker.call(f"weights {offer.version}", EngineActor.receive, offer.to_json())
        self._version = await _answer(call, self._weights_seconds)

    async def set_version(self, version: int) -> None:
        """Say what the weights it was loaded with are called."""
        call = self._worker.call("the version", EngineActor.set_version, version)
        self._version = await _answer(call, self._answer_seconds)

    async def abort(self) -> None:
        await _answer(self._worker.call("abort", EngineActor.abort), self._answer_seconds)

    async def pause(self) -> None:
        await _answer(self._worker.call("pause", EngineActor.pause), self._answer_seconds)

    async def resume(self) -> None:
        await _answer(self._worker.call("resume", EngineActor.resume), self._answer_seconds)

    async def sleep(self) -> None:
        self.turn_gib = await _answer(self._worker.call("sleep", EngineActor.sleep), self._answer_seconds)

    async def wake(self, part: EnginePart) -> None:
        call = self._worker.call(f"wake {part}", EngineActor.wake, part)
        self.turn_gib = await _answer(call, self._answer_seconds)

    async def health(self) -> None:
        await _answer(self._worker.call("health", EngineActor.health), self._answer_seconds)

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
