"""The placement of a run's workers: one bundle for each GPU (or CPU worker), sorted by node and device.

Train workers take the first bundles, engines those after them, or the same ones with colocate.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from treadle.config import ClusterSection, Config
from treadle.errors import ConfigError, DeadlineError
from treadle.run.ray.worker import Call

SAY_EVERY_SECONDS = 10.0
_PROBE_SECONDS = 120.0


@dataclass(frozen=True)
class Bundle:
    """One place of the placement group: its number there, its node, and its device on that node (-1 for a CPU)."""

    index: int
    node_id: str
    node_ip: str
    device: int


@dataclass(frozen=True)
class Places:
    """The bundles of a run: one for each train and critic worker, one for each engine (the first of its GPUs)."""

    group: Any
    train: tuple[Bundle, ...]
    engines: tuple[Bundle, ...]
    uses_gpus: bool
    critic: tuple[Bundle, ...] = ()

    @property
    def on_one_node(self) -> bool:
        """True if weights don't leave a node on their way to the engines."""
        return len({bundle.node_id for bundle in (*self.train, *self.engines)}) == 1


def wanted_bundles(
    cluster: ClusterSection, uses_gpus: bool, *, trains: bool, generates: bool
) -> list[dict[str, float]]:
    """Return what is asked of Ray: a bundle for each GPU or CPU worker.

    >>> wanted_bundles(ClusterSection(rollout_num_gpus=2), False, trains=True, generates=True)
    [{'CPU': 1}, {'CPU': 1}, {'CPU': 1}]
    """
    one: dict[str, float] = {**({"GPU": 1} if uses_gpus else {}), "CPU": cluster.num_cpus_per_worker}
    train = cluster.num_train_workers + cluster.num_critic_workers if trains else 0
    engines = cluster.num_engines * cluster.rollout_num_gpus_per_engine if generates else 0
    count = max(train, engines) if cluster.colocate else train + engines
    return [dict(one) for _ in range(count)]


def worker_options(config: Config, places: Places, bundle: Bundle, *, shares: bool) -> dict[str, Any]:
    """Return Ray's options of a worker in this bundle; two that share it take half a GPU each, and turns."""
    cpus = config.cluster.num_cpus_per_worker
    return {
        "num_cpus": 0 if shares else cpus,
        "num_gpus": (0.5 if shares else 1) if places.uses_gpus else 0,
        "scheduling_strategy": _inside(places.group, bundle.index),
        "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(cpus)}},
        "max_restarts": 0,
        "max_task_retries": 0,
    }


async def place(config: Config, note: Callable[[str], None], *, can_grow: bool) -> Places:
    """Reserve the bundles; note every 10 s what is wanted and what is free.

    Args:
        config: the run's configuration.
        note: shows a line to the user.
        can_grow: False for a Ray that nobody else can add nodes to, so that too few bundles are refused at once.
    Raises:
        ConfigError: if the bundles can never be had, or an engine or a node's workers lie on several nodes.
        DeadlineError: after `placement_timeout_seconds`.
    """
    import ray
    from ray.util import placement_group, remove_placement_group

    cluster, seconds = config.cluster, config.cluster.placement_timeout_seconds
    trains, generates = not config.debug.debug_rollout_only, not config.debug.debug_train_only
    uses_gpus = config.model.device != "cpu" and ray.cluster_resources().get("GPU", 0) > 0
    wanted = wanted_bundles(cluster, uses_gpus, trains=trains, generates=generates)
    each = " and ".join(f"{count:g} {kind}" for kind, count in wanted[0].items())
    text = f"{len(wanted)} workers with {each} each"
    critics = ", --critic-num-nodes, --critic-num-gpus-per-node" if cluster.num_critic_workers else ""
    remedy = (
        f"lower --actor-num-nodes, --actor-num-gpus-per-node{critics} or --rollout-num-gpus, or give the cluster more"
    )
    if not can_grow and any(ray.cluster_resources().get(kind, 0) < sum(b[kind] for b in wanted) for kind in wanted[0]):
        raise ConfigError(f"the run wants {text}, this Ray has {_free()}; {remedy} (--ray-num-cpus counts CPUs)")
    group = placement_group(wanted, strategy="PACK")
    try:
        ready, deadline = group.ready(), time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            try:
                await Call[None]("a placement", ready).value(min(SAY_EVERY_SECONDS, left))
            except DeadlineError:
                note(f"waiting for {text}; the cluster has {_free()}")
            else:
                bundles = await _sorted_bundles(group, len(wanted), uses_gpus)
                return _share_out(cluster, group, bundles, trains=trains, generates=generates)
        raise DeadlineError(
            f"waited {seconds:g} s for {text}; the cluster has {_free()}; {remedy}, or raise --placement-timeout-seconds"
        )
    except BaseException:
        remove_placement_group(group)
        raise


def release(places: Places) -> None:
    """Give the bundles back; what runs in them ends."""
    from ray.util import remove_placement_group

    remove_placement_group(places.group)


async def until_gone(places: Places, seconds: float) -> None:
    """Wait until the bundles are given back, so that a new attempt finds them free; at most so many seconds."""
    from ray.util import placement_group_table

    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and placement_group_table(places.group)["state"] != "REMOVED":
        await asyncio.sleep(0.1)


async def _sorted_bundles(group: Any, count: int, uses_gpus: bool) -> list[Bundle]:
    """Return all bundles by node and device; the driver's node first, the others by address."""
    import ray
    from ray.util import placement_group_table

    nodes = placement_group_table(group)["bundles_to_node_id"]
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    devices = [-1] * count
    if uses_gpus:

        def device() -> int:
            return int(ray.get_gpu_ids()[0])

        options = [{"num_cpus": 0, "num_gpus": 1, "scheduling_strategy": _inside(group, i)} for i in range(count)]
        refs = [ray.remote(device).options(**how).remote() for how in options]
        devices = [await Call[int]("the number of a GPU", ref).value(_PROBE_SECONDS) for ref in refs]
    here = ray.get_runtime_context().get_node_id()
    bundles = [Bundle(i, nodes[i], addresses[nodes[i]], devices[i]) for i in range(count)]
    return sorted(bundles, key=lambda b: (b.node_id != here, _address_key(b.node_ip), b.node_id, b.device, b.index))


def _inside(group: Any, index: int) -> Any:
    """Return Ray's strategy that schedules into this bundle."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)


def _share_out(
    cluster: ClusterSection, group: Any, bundles: Sequence[Bundle], *, trains: bool, generates: bool
) -> Places:
    """Give each worker its bundle; raise `ConfigError` if what belongs on one node lies on several."""
    num_train, num_critic = (cluster.num_train_workers, cluster.num_critic_workers) if trains else (0, 0)
    train, critic = tuple(bundles[:num_train]), tuple(bundles[num_train : num_train + num_critic])
    rest = bundles if cluster.colocate else bundles[num_train + num_critic :]
    each, count = cluster.rollout_num_gpus_per_engine, cluster.num_engines if generates else 0
    engines = _chunks("engine", rest[: each * count], each)
    together = {
        **engines,
        **_chunks("training node", train, cluster.actor_num_gpus_per_node),
        **_chunks("critic node", critic, cluster.critic_num_gpus_per_node or 1),
    }
    for what, chunk in together.items():
        if len({bundle.node_id for bundle in chunk}) > 1:
            nodes = ", ".join(sorted({bundle.node_ip for bundle in chunk}))
            raise ConfigError(
                f"the GPUs of {what} lie on several nodes ({nodes}); choose numbers that fill whole nodes"
            )
    return Places(group, train, tuple(chunk[0] for chunk in engines.values()), bundles[0].device >= 0, critic)


def _chunks(what: str, bundles: Sequence[Bundle], size: int) -> dict[str, Sequence[Bundle]]:
    return {f"{what} {i // size}": bundles[i : i + size] for i in range(0, len(bundles), size)}


def _address_key(ip: str) -> tuple[tuple[int, ...], str]:
    """Return a key that sorts addresses by their numbers: node 9 comes before node 10."""
    return tuple(int(part) for part in ip.split(".") if part.isdigit()), ip


def _free() -> str:
    """Return what is free of what there is, by kind, zero included."""
    import ray

    total, free = ray.cluster_resources(), ray.available_resources()
    kinds = ["CPU", *(["GPU"] if total.get("GPU") else [])]
    nodes = sum(node["Alive"] for node in ray.nodes())
    counts = ", ".join(f"{free.get(kind, 0):g} of {total.get(kind, 0):g} {kind} free" for kind in kinds)
    return f"{counts} on {nodes} node{'s' if nodes != 1 else ''}"
