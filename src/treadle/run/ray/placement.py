"""Where the workers of a run go: one bundle for each GPU (or CPU worker), sorted by node and device.

Train workers take the first bundles, engines those after them, or the same ones with colocate.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
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
        """True where weights don't leave a node on their way to the engines."""
        return len({bundle.node_id for bundle in (*self.train, *self.engines)}) == 1


def wanted_bundles(
    cluster: ClusterSection, uses_gpus: bool, *, trains: bool, generates: bool
) -> list[dict[str, float]]:
    """What is asked of Ray, a bundle for each GPU or CPU worker.

    >>> wanted_bundles(ClusterSection(rollout_num_gpus=2), False, trains=True, generates=True)
    [{'CPU': 1}, {'CPU': 1}, {'CPU': 1}]
    """
    one: dict[str, float] = {"CPU": cluster.num_cpus_per_worker}
    if uses_gpus:
        one = {"GPU": 1, **one}
    train = cluster.num_train_workers + cluster.num_critic_workers if trains else 0
    engines = cluster.num_engines * cluster.rollout_num_gpus_per_engine if generates else 0
    count = max(train, engines) if cluster.colocate else train + engines
    return [dict(one) for _ in range(count)]


def worker_options(config: Config, places: Places, bundle: Bundle, *, shares: bool) -> dict[str, Any]:
    """Ray's options of a worker in this bundle; two that share it take half a GPU each, and turns."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    strategy = PlacementGroupSchedulingStrategy(places.group, placement_group_bundle_index=bundle.index)
    cpus = config.cluster.num_cpus_per_worker
    return {
        "num_cpus": 0 if shares else cpus,
        "num_gpus": (0.5 if shares else 1) if places.uses_gpus else 0,
        "scheduling_strategy": strategy,
        "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(cpus)}},
        "max_restarts": 0,
        "max_task_retries": 0,
    }


async def place(
    config: Config, note: Callable[[str], None], *, trains: bool, generates: bool, can_grow: bool
) -> Places:
    """Reserve the bundles. Says every 10 s what is wanted and what is free; `can_grow` is False for a Ray that nobody
    else can add nodes to, where too few are refused at once.

    Raises `DeadlineError` with the same text after `placement_timeout_seconds`.
    """
    import ray
    from ray.util import placement_group, remove_placement_group

    cluster = config.cluster
    uses_gpus = config.model.device != "cpu" and ray.cluster_resources().get("GPU", 0) > 0
    wanted = wanted_bundles(cluster, uses_gpus, trains=trains, generates=generates)
    text = f"{len(wanted)} workers with {_resources(wanted[0])} each"
    critics = ", --critic-num-nodes, --critic-num-gpus-per-node" if cluster.num_critic_workers else ""
    remedy = (
        f"lower --actor-num-nodes, --actor-num-gpus-per-node{critics} or --rollout-num-gpus, or give the cluster more"
    )
    if not can_grow and any(ray.cluster_resources().get(kind, 0) < sum(b[kind] for b in wanted) for kind in wanted[0]):
        raise ConfigError(f"the run wants {text}, this Ray has {_free()}; {remedy} (--ray-num-cpus counts CPUs)")
    group = placement_group(wanted, strategy="PACK")
    try:
        began = time.monotonic()
        ready = group.ready()
        while True:
            left = cluster.placement_timeout_seconds - (time.monotonic() - began)
            if left <= 0:
                raise DeadlineError(
                    f"waited {cluster.placement_timeout_seconds:g} s for {text}; the cluster has {_free()}; {remedy}, "
                    "or raise --placement-timeout-seconds"
                )
            try:
                await Call[None]("a placement", ready).value(min(SAY_EVERY_SECONDS, left))
                break
            except DeadlineError:
                note(f"waiting for {text}; the cluster has {_free()}")
        bundles = await _sorted_bundles(group, wanted)
        return _share_out(cluster, group, bundles, trains=trains, generates=generates)
    except BaseException:
        remove_placement_group(group)
        raise


def release(places: Places) -> None:
    """Give the bundles back; what runs in them ends."""
    from ray.util import remove_placement_group

    remove_placement_group(places.group)


async def _sorted_bundles(group: Any, wanted: Sequence[Mapping[str, float]]) -> list[Bundle]:
    """All bundles by node and device; the driver's node first, the others by address."""
    import ray
    from ray.util import placement_group_table
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    table = placement_group_table(group)["bundles_to_node_id"]
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    devices = [-1] * len(wanted)
    if "GPU" in wanted[0]:

        def device() -> int:
            return int(ray.get_gpu_ids()[0])

        refs = []
        for i in range(len(wanted)):
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i)
            refs.append(ray.remote(device).options(num_cpus=0, num_gpus=1, scheduling_strategy=strategy).remote())
        devices = [await Call[int]("the number of a GPU", ref).value(_PROBE_SECONDS) for ref in refs]
    here = ray.get_runtime_context().get_node_id()
    bundles = [Bundle(i, table[i], addresses[table[i]], devices[i]) for i in range(len(wanted))]
    return sorted(bundles, key=lambda b: (b.node_id != here, _address_key(b.node_ip), b.node_id, b.device, b.index))


def _share_out(
    cluster: ClusterSection, group: Any, bundles: Sequence[Bundle], *, trains: bool, generates: bool
) -> Places:
    num_train, num_critic = (cluster.num_train_workers, cluster.num_critic_workers) if trains else (0, 0)
    train, critic = tuple(bundles[:num_train]), tuple(bundles[num_train : num_train + num_critic])
    rest = bundles if cluster.colocate else bundles[num_train + num_critic :]
    each = cluster.rollout_num_gpus_per_engine
    chunks = [rest[i * each : (i + 1) * each] for i in range(cluster.num_engines if generates else 0)]
    nodes_of = [
        *_nodes("training", train, cluster.actor_num_gpus_per_node),
        *_nodes("critic", critic, cluster.critic_num_gpus_per_node or 1),
    ]
    for what, chunk in (*((f"engine {i}", chunk) for i, chunk in enumerate(chunks)), *nodes_of):
        nodes = sorted({bundle.node_ip for bundle in chunk})
        if len({bundle.node_id for bundle in chunk}) > 1:
            raise ConfigError(
                f"the GPUs of {what} lie on several nodes ({', '.join(nodes)}); choose numbers that fill whole nodes"
            )
    return Places(group, train, tuple(chunk[0] for chunk in chunks), bundles[0].device >= 0, critic)


def _nodes(what: str, bundles: Sequence[Bundle], size: int) -> list[tuple[str, Sequence[Bundle]]]:
    return [(f"{what} node {i // size}", bundles[i : i + size]) for i in range(0, len(bundles), size)]


def _address_key(ip: str) -> tuple[tuple[int, ...], str]:
    """Addresses in the order of their numbers: node 9 comes before node 10."""
    return tuple(int(part) for part in ip.split(".") if part.isdigit()), ip


def _resources(bundle: Mapping[str, float]) -> str:
    return " and ".join(f"{count:g} {kind}" for kind, count in bundle.items())


def _free() -> str:
    """What is free of what there is, by kind; zero is said as well."""
    import ray

    total, free = ray.cluster_resources(), ray.available_resources()
    kinds = ["CPU", *(["GPU"] if total.get("GPU") else [])]
    nodes = sum(node["Alive"] for node in ray.nodes())
    counts = ", ".join(f"{free.get(kind, 0):g} of {total.get(kind, 0):g} {kind} free" for kind in kinds)
    return f"{counts} on {nodes} node{'s' if nodes != 1 else ''}"


async def until_gone(places: Places, seconds: float) -> None:
    """Wait until the bundles are given back, so that a new attempt finds them free; at most so many seconds."""
    from ray.util import placement_group_table

    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and placement_group_table(places.group)["state"] != "REMOVED":
        await asyncio.sleep(0.1)
