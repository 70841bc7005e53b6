"""Engines that are servers, as the configuration asks for them; and a run in one process whose engine is one."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from treadle.chat import Codec
from treadle.config import Config
from treadle.errors import EngineLostError
from treadle.models.load import compute_dtype, context_length, load_config, name_of, pick_device
from treadle.rollout.engines.base import Engine
from treadle.rollout.engines.pool import PUBLISH_TRIES, EnginePool, PoolLimits
from treadle.rollout.engines.vllm_engine import VllmEngine, VllmLaunch, VllmLimits, connect_vllm, start_vllm
from treadle.weights import Offer, SentWeights
from treadle.weights.base import WeightSender
from treadle.weights.named import TransportPlan, open_sender

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class ServerPlace:
    """The model that servers load, its tokenizer, and the folder their logs go to."""

    model_path: str
    codec: Codec
    logs: Path


def is_server(config: Config) -> bool:
    """True where the engine is a server of its own."""
    return config.rollout.rollout_engine != "torch"


def pool_limits(config: Config) -> PoolLimits:
    """When an engine of the run is taken for dead, and how often it is started anew."""
    cluster = config.cluster
    return PoolLimits(cluster.health_check_interval_seconds, cluster.health_check_timeout_seconds, cluster.max_restarts)


async def open_server(config: Config, place: ServerPlace, index: int) -> VllmEngine:
    """Start server `index`, or reach the one that runs; raises `EngineError` or `DeadlineError`."""
    engine, rollout = config.engine, config.rollout
    device = pick_device(config.model.device).type
    given = engine.vllm.get("max_model_len")
    limits = VllmLimits(
        max_length=int(given) if isinstance(given, str | int) else context_length(load_config(place.model_path)),
        answer_seconds=config.cluster.health_check_timeout_seconds,
        weights_seconds=config.cluster.train_timeout_seconds,
        seeded=device != "cpu",
        sleeps=device != "cpu" and not engine.rollout_external_engine_addrs,
    )
    eos = place.codec.eos_token_ids
    if engine.rollout_external_engine_addrs:
        address = engine.rollout_external_engine_addrs[index]
        return await connect_vllm(address, eos, limits, seconds=engine.engine_start_timeout_seconds)
    launch = VllmLaunch(
        python=engine.engine_python or sys.executable,
        model_path=place.model_path,
        dtype=name_of(compute_dtype(config.model.dtype, config.model.device)),
        device=device,
        log=place.logs / f"vllm-{index}.log",
        start_seconds=engine.engine_start_timeout_seconds,
        kv_cache_gib=rollout.kv_cache_gib,
        max_num_seqs=rollout.max_running_requests,
        seed=rollout.rollout_seed + index,
        threads=config.cluster.num_cpus_per_worker if config.cluster.runtime == "ray" else None,
        gpus=config.cluster.rollout_num_gpus_per_engine if config.cluster.runtime == "ray" else 1,
        arguments=engine.vllm,
    )
    return await start_vllm(launch, eos, limits, f"vLLM engine {index}")


class LocalServers:
    """The servers of a run in one process, and how the trainer's weights reach them."""

    def __init__(self, config: Config, place: ServerPlace, sender: WeightSender, warn: Callable[[str], None]):
        self._config, self._place, self._sender, self._warn = config, place, sender, warn
        self._offer: Offer | None = None
        self._pool: EnginePool | None = None

    @classmethod
    async def open(
        cls,
        config: Config,
        place: ServerPlace,
        model: PreTrainedModel,
        warn: Callable[[str], None],
        stack: AsyncExitStack,
    ) -> LocalServers:
        """Start (or reach) all servers; they have the trainer's weights after the first `publish`."""
        count = max(1, len(config.engine.rollout_external_engine_addrs))
        sender = open_sender(_plan(config, count, place.logs), SentWeights(dict(model.named_parameters())))
        stack.callback(sender.close)
        servers = cls(config, place, sender, warn)
        engines = await asyncio.gather(*(open_server(config, place, i) for i in range(count)))
        servers._pool = EnginePool(engines, servers._start_again, pool_limits(config), warn)
        stack.push_async_callback(servers._pool.close)
        return servers

    @property
    def pool(self) -> EnginePool:
        assert self._pool is not None, "open first"
        return self._pool

    async def publish(self, version: int) -> None:
        """Bring all servers to the trainer's weights; one that is lost meanwhile is started anew and offered them again."""
        offer = await asyncio.to_thread(self._sender.offer, version)

        async def apply(engine: Engine) -> None:
            assert isinstance(engine, VllmEngine)
            await engine.receive(offer)

        for attempt in range(PUBLISH_TRIES):
            await self.pool.prepare("wait")
            try:
                await self.pool.update(apply)
                break
            except EngineLostError as error:
                if attempt == PUBLISH_TRIES - 1:
                    raise
                self._warn(f"weights {version} did not reach every engine ({error}); they are sent again")
        self._offer = offer
        self._sender.deliver()

    async def _start_again(self, index: int) -> Engine:
        engine = await open_server(self._config, self._place, index)
        if self._offer is not None:
            await engine.receive(self._offer)
        return engine


def _plan(config: Config, count: int, folder: Path) -> TransportPlan:
    asked = config.cluster
    name = "shm" if asked.weight_transport == "auto" else asked.weight_transport
    where = folder / "weights" if asked.weight_folder is None else Path(asked.weight_folder)
    return TransportPlan(name, count, where.absolute())
