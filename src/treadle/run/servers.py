"""Engines that are servers, as the configuration asks for them; and a run in one process whose engine is one."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from treadle.chat import Codec
from treadle.config import Config
from treadle.config.rollout_section import EngineValue
from treadle.errors import ConfigError, EngineError, EngineLostError
from treadle.models.context import context_length, context_note
from treadle.models.load import compute_dtype, load_config, name_of, pick_device
from treadle.rollout.engines.base import Engine
from treadle.rollout.engines.pool import PUBLISH_TRIES, EnginePool, PoolLimits
from treadle.rollout.engines.server_engine import Dialect, ServerEngine, ServerLimits
from treadle.rollout.engines.server_start import Client, ServerLaunch
from treadle.rollout.engines.sglang_engine import SglangDialect, connect_sglang, start_sglang
from treadle.rollout.engines.sglang_engine.dialect import ServedModel
from treadle.rollout.engines.vllm_engine import VllmDialect, connect_vllm, start_vllm
from treadle.run.exchange import exchange
from treadle.weights import Offer, SentWeights, broadcast, sglang_group
from treadle.weights.base import WeightSender
from treadle.weights.named import HOLDS_EVERYTHING, TransportPlan, open_sender

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
    """Interval and timeout of the engines' health checks, and how often an engine is restarted."""
    cluster = config.cluster
    return PoolLimits(cluster.health_check_interval_seconds, cluster.health_check_timeout_seconds, cluster.max_restarts)


async def open_server(config: Config, place: ServerPlace, index: int) -> ServerEngine:
    """Start server `index`, or reach the one that runs; raises `EngineError` or `DeadlineError`."""
    kind = KINDS[config.rollout.rollout_engine]
    client = Client(kind.dialect(config, place), place.codec.eos_token_ids, _limits(config, place, kind))
    addresses = config.engine.rollout_external_engine_addrs
    if addresses:
        seconds = config.engine.engine_start_timeout_seconds
        return await kind.connect(addresses[index], client, seconds=seconds)
    return await kind.start(_launch(config, place, index), client, f"{kind.name} engine {index}")


@dataclass(frozen=True)
class _Kind:
    """A kind of server: `length_argument` of its own sets the context, `broadcast` is the one that it takes part in."""

    name: str
    length_argument: str
    broadcast: str
    dialect: Callable[[Config, ServerPlace], Dialect]
    start: Callable[[ServerLaunch, Client, str], Awaitable[ServerEngine]]
    connect: Callable[..., Awaitable[ServerEngine]]


def _vllm_dialect(config: Config, place: ServerPlace) -> Dialect:
    return VllmDialect(seeded=pick_device(config.model.device).type != "cpu")


def _sglang_dialect(config: Config, place: ServerPlace) -> Dialect:
    dtype = compute_dtype(config.model.dtype, config.model.device)
    tied = bool(getattr(load_config(place.model_path).get_text_config(), "tie_word_embeddings", False))
    return SglangDialect(ServedModel(Path(place.model_path), dtype, tied))


KINDS = {
    "vllm": _Kind("vLLM", "max_model_len", broadcast.NAME, _vllm_dialect, start_vllm, connect_vllm),
    "sglang": _Kind("SGLang", "context_length", sglang_group.NAME, _sglang_dialect, start_sglang, connect_sglang),
}
"""Kinds of servers by their name in `rollout_engine`."""


def transport_name(config: Config, asked: str) -> str:
    """The transport of that name in `weight_transport`, as the run's engines take part in it."""
    if asked == "broadcast" and is_server(config):
        return KINDS[config.rollout.rollout_engine].broadcast
    return asked


def arguments_for(config: Config, model_path: str) -> dict[str, EngineValue]:
    """Return the server's own arguments: the user's, and the context of a model whose positions switch with the length.

    A server that is open to longer samples uses the factors of long ones for all samples; the trainer those of short ones.

    Raises:
        ConfigError: if the user's context is past the switch.
    """
    engine = config.rollout.rollout_engine
    given, kind, hf_config = config.engine.arguments(engine), KINDS[engine], load_config(model_path)
    note, context, length = context_note(hf_config), context_length(hf_config), _length(given, kind)
    if not note:
        return given
    if length is None:
        return {**given, kind.length_argument: str(context)}
    if length > context:
        name = f"--{engine}-{kind.length_argument.replace('_', '-')}"
        raise ConfigError(f"{name} {length} is past the model's context of {context}{note}; leave it out")
    return given


def _length(given: Mapping[str, EngineValue], kind: _Kind) -> int | None:
    """Return the context that arguments of a server set, if they do."""
    length = given.get(kind.length_argument, given.get(kind.length_argument.replace("_", "-")))
    return int(length) if isinstance(length, str | int) else None


def _limits(config: Config, place: ServerPlace, kind: _Kind) -> ServerLimits:
    length = _length(arguments_for(config, place.model_path), kind)
    on_device = pick_device(config.model.device).type != "cpu"
    return ServerLimits(
        max_length=context_length(load_config(place.model_path)) if length is None else length,
        answer_seconds=config.cluster.health_check_timeout_seconds,
        weights_seconds=config.cluster.train_timeout_seconds,
        sleeps=on_device and not config.engine.rollout_external_engine_addrs,
    )


def _launch(config: Config, place: ServerPlace, index: int) -> ServerLaunch:
    rollout, cluster, is_ray = config.rollout, config.cluster, config.cluster.runtime == "ray"
    return ServerLaunch(
        python=config.engine.engine_python or sys.executable,
        model_path=place.model_path,
        dtype=name_of(compute_dtype(config.model.dtype, config.model.device)),
        device=pick_device(config.model.device).type,
        log=place.logs / f"{rollout.rollout_engine}-{index}.log",
        start_seconds=config.engine.engine_start_timeout_seconds,
        kv_cache_gib=rollout.kv_cache_gib,
        max_num_seqs=rollout.max_running_requests,
        seed=rollout.rollout_seed + index,
        threads=cluster.num_cpus_per_worker if is_ray else None,
        gpus=cluster.rollout_num_gpus_per_engine if is_ray else 1,
        arguments=arguments_for(config, place.model_path),
    )


class LocalServers:
    """The servers of a run in one process, and how the trainer's weights reach them."""

    def __init__(self, config: Config, place: ServerPlace, model: PreTrainedModel, warn: Callable[[str], None]):
        self._config, self._place, self._model, self._warn = config, place, model, warn
        self._offer: Offer | None = None
        self._sender: WeightSender | None = None
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
        servers = cls(config, place, model, warn)
        engines = await asyncio.gather(*(open_server(config, place, i) for i in range(count)))
        servers._pool = EnginePool(engines, servers._start_again, pool_limits(config), warn)
        stack.push_async_callback(servers._pool.close)
        servers._sender = await servers._open_sender(engines)
        stack.callback(servers._sender.close)
        return servers

    @property
    def pool(self) -> EnginePool:
        assert self._pool is not None, "open first"
        return self._pool

    async def publish(self, version: int) -> None:
        """Bring all servers to the trainer's weights; one that dies meanwhile is restarted and offered them again."""
        sender = self._sender
        assert sender is not None, "open first"
        for tries_left in reversed(range(PUBLISH_TRIES)):
            await self.pool.prepare("wait")
            offer = await asyncio.to_thread(sender.offer, version)

            async def apply(engine: Engine, offer: Offer = offer) -> None:
                assert isinstance(engine, ServerEngine)
                await engine.receive(offer)

            errors = await exchange(offer.transport, self.pool.update(apply), lambda: asyncio.to_thread(sender.deliver))
            if not errors:
                break
            if not tries_left or not any(isinstance(error, EngineLostError) for error in errors):
                raise errors[0]
            self._warn(f"weights {version} did not reach every engine ({errors[0]}); they are sent again")
        self._offer = offer

    async def _start_again(self, index: int) -> Engine:
        """A new server with the weights of the last publish.

        Where an offer does not hold them they are sent to it alone. While the trainer changes them nothing is generated
        before the next publish, so what it then reads does no harm.
        """
        engine, offer = await open_server(self._config, self._place, index), self._offer
        try:
            if offer is not None and offer.transport in HOLDS_EVERYTHING:
                await engine.receive(offer)
            elif offer is not None:
                await self._send_again(engine, offer.version)
        except BaseException:
            await engine.close()
            raise
        return engine

    async def _send_again(self, engine: ServerEngine, version: int) -> None:
        sender = await self._open_sender([engine])
        try:
            offer = await asyncio.to_thread(sender.offer, version)
            receiving = engine.receive(offer)
            for error in await exchange(offer.transport, receiving, lambda: asyncio.to_thread(sender.deliver)):
                raise error
        finally:
            sender.close()

    async def _open_sender(self, engines: Sequence[ServerEngine]) -> WeightSender:
        """The trainer's end of the transport that was asked for, to these servers."""
        config, asked = self._config, self._config.cluster
        workers = [await engine.num_workers() for engine in engines]
        name: str = "shm" if asked.weight_transport == "auto" else asked.weight_transport
        where = self._place.logs / "weights" if asked.weight_folder is None else Path(asked.weight_folder)
        # A server that is started here is on the trainer's GPU, and two ranks of NCCL can't share one.
        external = config.engine.rollout_external_engine_addrs
        backend = "nccl" if external and pick_device(config.model.device).type == "cuda" else "gloo"
        name = transport_name(config, name)
        plan = TransportPlan(name, sum(workers), where.absolute(), host=host_towards(external), backend=backend)
        return open_sender(plan, SentWeights(dict(self._model.named_parameters())))


def host_towards(addresses: Sequence[str]) -> str:
    """This machine as servers at these addresses reach it; loopback where all of them are on it.

    >>> host_towards([]), host_towards(["127.0.0.1:8000", "http://localhost:8001"])
    ('127.0.0.1', '127.0.0.1')
    """
    found = "127.0.0.1"
    for address in addresses:
        url = urlsplit(address if "://" in address else f"http://{address}")
        try:
            where = socket.getaddrinfo(url.hostname, url.port or 80, socket.AF_INET, socket.SOCK_DGRAM)[0][4]
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
                route.connect(where)  # of a datagram socket: nothing is sent, the way there is looked up
                host = str(route.getsockname()[0])
        except OSError as error:
            raise EngineError(
                f"{address} can't be reached from here ({error}); see --rollout-external-engine-addrs"
            ) from error
        if not host.startswith("127."):
            found = host
    return found
