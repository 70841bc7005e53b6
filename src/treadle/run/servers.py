"""Engines that are servers, as the configuration asks for them; and a run in one process whose engine is one."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from treadle.catalog import SERVERS
from treadle.chat import Codec
from treadle.config import Config
from treadle.config.rollout_section import EngineValue
from treadle.errors import ConfigError, EngineError
from treadle.models.load import compute_dtype, name_of, pick_device
from treadle.models.model_config import context_length, context_note, load_config
from treadle.models.trainable import FULL
from treadle.rollout.engines.pool import EnginePool
from treadle.rollout.engines.restarts import PoolLimits
from treadle.rollout.engines.server_engine import ServerEngine, ServerSettings
from treadle.rollout.engines.server_kind import ServerKind, ServerLaunch
from treadle.weights import (
    Publisher,
    SentWeights,
    TransportPlan,
    choose_transport,
    open_sender,
)
from treadle.weights.publisher import LocalSource

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class ServerPlace:
    """The model that servers load, its tokenizer, and the folder their logs go to."""

    model_path: str
    codec: Codec
    logs: Path


def is_server(config: Config) -> bool:
    """Return True if the engine is a server."""
    return config.rollout.rollout_engine in SERVERS


def server_kind(name: str) -> ServerKind:
    """Return the kind of server with this name in `rollout_engine`."""
    kind: ServerKind = SERVERS[name].load()
    return kind


def pool_limits(config: Config) -> PoolLimits:
    """Interval and timeout of the engines' health checks, and how often an engine is restarted."""
    cluster = config.cluster
    return PoolLimits(cluster.health_check_interval_seconds, cluster.health_check_timeout_seconds, cluster.max_restarts)


async def open_server(config: Config, place: ServerPlace, index: int) -> ServerEngine:
    """Start server `index`, or reach the one that runs; raises `EngineError` or `DeadlineError`."""
    kind = server_kind(config.rollout.rollout_engine)
    arguments = arguments_for(config, place.model_path)
    settings = _settings(config, place, kind, arguments)
    addresses = config.engine.rollout_external_engine_addrs
    if addresses:
        seconds = config.engine.engine_start_timeout_seconds
        return await kind.connect(addresses[index], settings, seconds=seconds)
    return await kind.start(_launch(config, place, index, arguments), settings, f"{kind.name} engine {index}")


def arguments_for(config: Config, model_path: str) -> dict[str, EngineValue]:
    """Return the server's own arguments: the user's, and the context of a model whose positions switch with the length.

    A server that is open to longer samples uses the factors of long ones for all samples; the trainer those of short ones.

    Raises:
        ConfigError: if the user's context is past the switch.
    """
    engine = config.rollout.rollout_engine
    given, kind, hf_config = config.engine.arguments(engine), server_kind(engine), load_config(model_path)
    note, context, length = context_note(hf_config), context_length(hf_config), _length(given, kind)
    if not note:
        return given
    if length is None:
        return {**given, kind.length_argument: str(context)}
    if length > context:
        name = f"--{engine}-{kind.length_argument.replace('_', '-')}"
        raise ConfigError(f"{name} {length} is past the model's context of {context}{note}; leave it out")
    return given


def _length(given: Mapping[str, EngineValue], kind: ServerKind) -> int | None:
    """Return the context that arguments of a server set, if they do."""
    length = given.get(kind.length_argument, given.get(kind.length_argument.replace("_", "-")))
    return int(length) if isinstance(length, str | int) else None


def _settings(
    config: Config, place: ServerPlace, kind: ServerKind, arguments: Mapping[str, EngineValue]
) -> ServerSettings:
    length = _length(arguments, kind)
    dtype, device = compute_dtype(config.model.dtype, config.model.device), pick_device(config.model.device).type
    return ServerSettings(
        kind.dialect(Path(place.model_path), dtype, device),
        place.codec.eos_token_ids,
        max_length=context_length(load_config(place.model_path)) if length is None else length,
        answer_seconds=config.cluster.health_check_timeout_seconds,
        weights_seconds=config.cluster.train_timeout_seconds,
        sleeps=device != "cpu" and not config.engine.rollout_external_engine_addrs,
    )


def _launch(config: Config, place: ServerPlace, index: int, arguments: Mapping[str, EngineValue]) -> ServerLaunch:
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
        arguments=arguments,
    )


async def open_local_servers(
    config: Config, place: ServerPlace, model: PreTrainedModel, warn: Callable[[str], None], stack: AsyncExitStack
) -> tuple[EnginePool, Publisher]:
    """Start or reach the servers of a run in one process, and return what brings them to the trainer's weights.

    If a server restarts while the trainer changes its weights, it may read some of them too early. It does no harm: nothing is
    generated before the next publish.
    """
    count = max(1, len(config.engine.rollout_external_engine_addrs))
    engines = await asyncio.gather(*(open_server(config, place, i) for i in range(count)))
    pool = EnginePool(engines, partial(open_server, config, place), pool_limits(config), warn)
    stack.push_async_callback(pool.close)
    external, on_gpu = config.engine.rollout_external_engine_addrs, pick_device(config.model.device).type == "cuda"
    plan = transport_plan(
        config,
        await pool.num_receivers(),
        place.logs,
        on_one_node=True,
        on_gpu=on_gpu,
        host=host_towards(external),
        shares_gpu=not external,
    )
    sender = open_sender(plan, SentWeights(FULL.published(model)))
    stack.callback(sender.close)
    publisher = Publisher(LocalSource(sender), pool.receive, warn, partial(pool.prepare, "wait"))
    pool.republish = lambda: publisher.repeat(lambda: pool.wants_weights)
    return pool, publisher


def transport_plan(
    config: Config, num_receivers: int, folder: Path, *, on_one_node: bool, on_gpu: bool, host: str, shares_gpu: bool
) -> TransportPlan:
    """Plan how weights go from the trainer to the engines.

    Args:
        config: the run's configuration.
        num_receivers: number of processes that receive weights.
        folder: where weights are written if no other folder is set.
        on_one_node: True if trainer and engines are on one node.
        on_gpu: True if the trainer computes on a GPU.
        host: the trainer's address as the engines reach it.
        shares_gpu: True if trainer and engines use the same GPUs, which two ranks of NCCL cannot.
    """
    cluster = config.cluster
    name = choose_transport(cluster.weight_transport, on_one_node=on_one_node, on_gpu=on_gpu)
    if name == "broadcast" and is_server(config):
        name = server_kind(config.rollout.rollout_engine).broadcast
    folder = folder / "weights" if cluster.weight_folder is None else Path(cluster.weight_folder)
    backend = "nccl" if on_gpu and not shares_gpu else "gloo"
    return TransportPlan(name, num_receivers, folder.absolute(), host=host, backend=backend)


def host_towards(addresses: Sequence[str]) -> str:
    """Return this machine's address as servers at these addresses reach it; loopback if all of them are on it.

    >>> host_towards([]), host_towards(["127.0.0.1:8000", "http://localhost:8001"])
    ('127.0.0.1', '127.0.0.1')
    """
    found = "127.0.0.1"
    for address in addresses:
        url = urlsplit(address if "://" in address else f"http://{address}")
        try:
            where = socket.getaddrinfo(url.hostname, url.port or 80, socket.AF_INET, socket.SOCK_DGRAM)[0][4]
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
                route.connect(where)  # on a datagram socket this sends nothing and only looks up the route
                host = str(route.getsockname()[0])
        except OSError as error:
            raise EngineError(
                f"{address} can't be reached from here ({error}); see --rollout-external-engine-addrs"
            ) from error
        if not host.startswith("127."):
            found = host
    return found
