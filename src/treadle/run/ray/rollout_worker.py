"""The worker that collects rollouts: prompts, rewards, evaluation sets, and the pool of engines it starts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

from treadle.chat import load_codec
from treadle.data import PromptSource
from treadle.errors import EngineLostError
from treadle.metrics import Metric, metric
from treadle.models.model_config import context_length, load_config
from treadle.rollout.engines.base import EnginePart
from treadle.rollout.engines.pool import EnginePool
from treadle.run import build
from treadle.run.loop import Collection
from treadle.run.ray.engine_worker import EngineActor, RemoteEngine
from treadle.run.ray.placement import Places, worker_options
from treadle.run.ray.worker import Worker, WorkerActor, WorkerSetup
from treadle.run.resume import random_state, set_random_state
from treadle.run.rollouts import Rollouts
from treadle.run.servers import is_server, pool_limits
from treadle.types import Group

Result = TypeVar("Result")


@dataclass(frozen=True)
class RolloutStatus:
    """What the driver sees of the rollout worker while it waits: the phase, its warnings, and whether an engine that was
    restarted waits for a publish."""

    phase: tuple[str, int, int] | None
    warnings: list[str]
    wants_weights: bool


class RolloutActor(WorkerActor):
    """The rollout worker of a run. It starts and restarts the engines."""

    def __init__(self, setup: WorkerSetup, places: Places):
        super().__init__(setup)
        self._places = places
        self._codec = load_codec(setup.model_path, setup.config.data.template_kwargs)
        self._stack = AsyncExitStack()
        self._phase: tuple[str, int, int] | None = None
        self._source: PromptSource | None = None
        self._pool: EnginePool | None = None
        self._engines: dict[int, RemoteEngine] = {}  # the newest of each slot of the pool

    @property
    def pool(self) -> EnginePool:
        assert self._pool is not None, "open first"
        return self._pool

    async def load(self) -> int:
        """Read the prompts; return how many there are."""
        config, codec, longest = self._config, self._codec, self._setup.max_prompt
        source = await asyncio.to_thread(build.load_source, config, codec, longest, self._warnings.warn)
        self._source = source
        return len(source)

    async def open(self) -> None:
        """Start engines and rewards, and load the evaluation sets."""
        config, cluster = self._config, self._config.cluster
        starting = [asyncio.create_task(self._start_engine(i)) for i in range(cluster.num_engines)]
        scoring = await build.open_scoring(config, self._codec, self._setup.max_prompt, self._stack)
        engines: list[RemoteEngine | None] = []
        for task in starting:
            try:
                engines.append(await task)
            except EngineLostError as error:  # the pool starts it again
                self._warnings.warn(str(error))
                engines.append(None)
        self._pool = EnginePool(engines, self._start_engine, pool_limits(config), self._warnings.warn)
        self._stack.push_async_callback(self._pool.close)
        context = context_length(load_config(self._setup.model_path))
        generation = await build.open_generation(
            config, self.pool, self._codec, context, self._source, scoring, self._stack
        )
        self._rollouts = Rollouts(config, generation, self._show)

    def _show(self, phase: str, done: int, total: int) -> None:
        self._phase = (phase, done, total)

    async def _start_engine(self, index: int) -> RemoteEngine:
        import ray

        cluster = self._config.cluster
        options = worker_options(self._config, self._places, self._places.engines[index], shares=cluster.colocate)
        handle = ray.remote(EngineActor).options(**options).remote(self._setup, index)
        limits = cluster.health_check_timeout_seconds, cluster.train_timeout_seconds
        engine = RemoteEngine(Worker(f"engine {index}", handle), *limits)
        seconds = cluster.worker_start_timeout_seconds
        if is_server(self._config):
            seconds += self._config.engine.engine_start_timeout_seconds
        await engine.start(seconds)
        self._engines[index] = engine  # not before: a process that did not start ends when nothing refers to it
        return engine

    async def ask_engines(self, method: Callable[..., Awaitable[Result]], *args: Any) -> Result:
        """Call this method of the pool of engines."""
        answer: Result = await getattr(self.pool, method.__name__)(*args)
        return answer

    # What the loop asks for

    async def collect(self, rollout_id: int) -> Collection:
        return await self._rollouts.collect(rollout_id)

    async def evaluate(self) -> list[tuple[str, list[Group]]]:
        return await self._rollouts.evaluate()

    async def sleep(self) -> list[Metric]:
        """Free what the engines hold on their devices; return the peak memory of each."""
        await self.pool.sleep()
        return [metric("perf/engine_awake_gib", gib) for gib in self._turns()]

    async def wake(self, part: EnginePart) -> list[Metric]:
        """Restore a part of what `sleep` freed; with the weights, return the peak memory of each engine without them."""
        await self.pool.wake(part)
        return [metric("perf/engine_asleep_gib", gib) for gib in self._turns()]

    def _turns(self) -> list[float]:
        """Return the peak memory of each engine in the turn that ended, in GiB, if it is known."""
        return [engine.turn_gib for engine in self._engines.values() if engine.turn_gib is not None]

    async def state(self, done: int) -> dict[str, Any]:
        """Return where prompts and random generators stand for a run that resumes at rollout `done`, in JSON values."""
        return {**await self._rollouts.state(done), "rollout_random": random_state()}

    async def load_state(self, state: dict[str, Any]) -> None:
        """Go to where `state` was taken."""
        assert self._source is not None
        if "source" in state:
            self._source.load_state(state["source"])
        if "rollout_random" in state:
            set_random_state(state["rollout_random"])

    async def skip(self, rollouts: int) -> None:
        """Pass over the prompts of the first rollouts, for a run that starts in the middle."""
        assert self._source is not None
        self._source.next_prompts(rollouts * self._config.rollout.rollout_batch_size)

    async def status(self) -> RolloutStatus:
        return RolloutStatus(self._phase, self._warnings.take(), self._pool is not None and self._pool.wants_weights)

    async def close(self) -> None:
        await self._stack.aclose()
