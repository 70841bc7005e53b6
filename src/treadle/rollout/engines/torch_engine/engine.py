"""The engine that generates with a module of this process: requests in, completions out, one step at a time in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from treadle.chat import Codec
from treadle.errors import EngineError
from treadle.models.forward import head_of
from treadle.models.model_config import context_length
from treadle.models.offload import HostCopies
from treadle.models.trainable import FULL
from treadle.rollout.engines.base import EnginePart, check_request
from treadle.rollout.engines.torch_engine.model_runner import ModelRunner
from treadle.rollout.engines.torch_engine.scheduler import Ended, EngineLimits, Request, Scheduler
from treadle.types import Completion, SamplingParams
from treadle.weights import Offer, ServedWeights, WeightReceiver, find_transport

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SETTLE_TURNS = 4


@torch.inference_mode()
def generate_step(scheduler: Scheduler, runner: ModelRunner) -> Ended:
    """Admit what fits and sample its first tokens, or else one token for each running row; return what ended."""
    batch = scheduler.schedule()
    return scheduler.postprocess(batch, *runner.run(batch), runner.version)


class TorchEngine:
    """Generates with the module it is given, usually the trainer's own: then no weights are copied.

    The model must not be trained while a step runs; the loop's lease ensures that. All methods belong to one event loop.
    Everything that computes runs on the one thread of `compute`, which its owner closes and which must not be the thread
    that makes the engine. Without `compute` the engine has a thread of its own. If it `owns_weights`, they are in host
    memory while it sleeps.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        codec: Codec,
        limits: EngineLimits,
        compute: Executor | None = None,
        *,
        owns_weights: bool = False,
    ):
        self.model = model
        self._host = HostCopies() if owns_weights else None
        self._served: ServedWeights | None = None
        self._receivers: dict[str, WeightReceiver] = {}  # by transport
        self._max_length = context_length(model.config)
        self._executor = compute or ThreadPoolExecutor(1, thread_name_prefix="torch-engine")
        self._owns_executor = compute is None
        unused = codec.ids_without_token(head_of(model).weight.shape[0])
        self._runner = self._executor.submit(ModelRunner, model, limits, unused).result()
        self._scheduler = Scheduler(self._runner.store, codec.eos_token_ids, codec.decode)
        self._queues: dict[Request, asyncio.Queue[Completion | BaseException]] = {}
        self._arrived: list[Request] = []
        self._left: list[Request] = []
        self._driver: asyncio.Task[None] | None = None
        self._running = asyncio.Event()
        self._running.set()
        self._between_steps = asyncio.Lock()
        self._failure: BaseException | None = None
        self._torn: str | None = None
        self._closed = False

    @property
    def version(self) -> int:
        return self._runner.version

    def hold_version(self, version: int) -> None:
        """Note that the module now holds the weights of this version."""
        self._runner.version = version

    async def set_version(self, version: int) -> None:
        self.hold_version(version)

    async def num_receivers(self) -> int:
        return 1

    async def receive(self, offer: Offer) -> None:
        if self._served is None:
            self._served = ServedWeights(FULL.published(self.model), self.hold_version)
        if offer.transport not in self._receivers:
            self._receivers[offer.transport] = find_transport(offer.transport).open_receiver(self._served)
        await self.receive_by(self._receivers[offer.transport], offer)

    async def receive_by(self, receiver: WeightReceiver, offer: Offer) -> None:
        """Do what `receive` does with a receiver that serves this engine's module and calls `hold_version`."""
        async with self._between_steps:
            work = asyncio.get_running_loop().run_in_executor(self._executor, receiver.receive, offer)
            try:
                await asyncio.shield(work)
            except asyncio.CancelledError:
                await asyncio.wait([work])  # the thread can't be stopped, and nothing may generate while it writes
                raise
            finally:
                self._torn = receiver.served.torn
                if self._torn is not None:
                    self._settle()
                    self._hand_out(self._scheduler.abort())

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, n: int = 1
    ) -> AsyncGenerator[Completion, None]:
        await self.health()
        check_request(token_ids, sampling, n, self._max_length)
        request = Request(tuple(token_ids), sampling, n)
        queue = self._queues[request] = asyncio.Queue()
        self._arrived.append(request)
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        try:
            for _ in range(n):
                item = await queue.get()  # the deadline is the caller's: it knows how long a rollout may take
                if isinstance(item, BaseException):
                    raise EngineError(f"the torch engine failed: {item!r}") from item
                yield item
        finally:
            del self._queues[request]
            self._left.append(request)

    async def _drive(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._arrived or self._scheduler.has_work:
                # Requests that the last completions lead to (the next prompt, for example) join before the next step,
                # so the batches of a rollout do not depend on timing.
                for _ in range(_SETTLE_TURNS):
                    await asyncio.sleep(0)
                await self._running.wait()
                async with self._between_steps:
                    self._settle()
                    if not self._scheduler.has_work:
                        continue  # aborted, or dropped because the callers left
                    done = await loop.run_in_executor(self._executor, generate_step, self._scheduler, self._runner)
                self._hand_out(done)
        except Exception as error:  # every waiting caller gets it, whatever it is
            self._failure = error
            for queue in self._queues.values():
                queue.put_nowait(error)

    def _settle(self) -> None:
        """Give the scheduler the requests that arrived and left; only between steps, which run in another thread."""
        self._scheduler.waiting.extend(self._arrived)
        self._scheduler.drop(self._left)
        self._arrived.clear()
        self._left.clear()

    def _hand_out(self, done: Ended) -> None:
        for request, completion in done:
            if request in self._queues:  # else the caller has left
                self._queues[request].put_nowait(completion)

    async def abort(self) -> None:
        async with self._between_steps:
            self._settle()
            self._hand_out(self._scheduler.abort())

    async def pause(self) -> None:
        self._running.clear()
        async with self._between_steps:
            return

    async def resume(self) -> None:
        self._running.set()

    async def sleep(self) -> None:
        async with self._between_steps:
            self._settle()
            if self._scheduler.rows:
                raise EngineError("the torch engine can't sleep with samples running; abort or finish them first")
            self._runner.release()
            if self._host is not None:
                held = [*self.model.parameters(), *self.model.buffers()]
                await asyncio.get_running_loop().run_in_executor(self._executor, self._host.sleep, held)

    async def wake(self, part: EnginePart) -> None:
        """Restore weights that the engine owns. Keys and values are allocated when the first request comes."""
        if part == "weights" and self._host is not None:
            await asyncio.get_running_loop().run_in_executor(self._executor, self._host.wake)

    async def health(self) -> None:
        if self._closed:
            raise EngineError("the torch engine is closed")
        if self._failure is not None:
            raise EngineError(f"the torch engine failed earlier: {self._failure!r}") from self._failure
        if self._torn is not None:
            raise EngineError(f"the torch engine has no whole weights: {self._torn}")

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._running.set()
        await self.abort()
        if self._driver is not None:
            await self._driver
        if self._owns_executor:
            self._executor.shutdown(wait=True)
