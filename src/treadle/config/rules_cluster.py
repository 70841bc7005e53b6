"""Rules about runtimes, workers and schedules; each is one function and says one thing."""

from __future__ import annotations

import re
from collections.abc import Iterator

from treadle.config.findings import Finding, Rule, fault, warning
from treadle.config.sections import ClusterSection, Config
from treadle.config.values import written

_RAY_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:]+\]|[\w.-]+):\d{1,5}", re.ASCII)
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_SERVER_SETTINGS = (
    *("health_check_interval_seconds", "health_check_timeout_seconds", "max_restarts"),
    *("weight_transport", "weight_folder", "train_timeout_seconds", "num_cpus_per_worker"),
)
"""Settings that a run in one process has a use for where its engine is a server."""


def cluster_settings_are_used(config: Config) -> Iterator[Finding]:
    """Settings of the cluster differ from their defaults only where there is one."""
    cluster = config.cluster
    if cluster.runtime == "ray":
        return
    given = [
        name for name, info in ClusterSection.model_fields.items() if cluster.model_dump()[name] != info.get_default()
    ]
    if config.rollout.rollout_engine != "torch":
        given = [name for name in given if name not in _SERVER_SETTINGS]
    if cluster.max_lag:
        yield fault(
            f"max_lag = {cluster.max_lag} needs runtime = ray: in one process trainer and engine take turns, "
            "so nothing can run ahead of the weights"
        )
    given = [name for name in given if name != "max_lag"]
    if given:
        yield warning(f"{', '.join(given)} do nothing with runtime = local; set runtime = ray")


def train_workers_fill_their_grid(config: Config) -> Iterator[Finding]:
    cluster = config.cluster
    replicate, tensor = config.parallel.fsdp_replicate_size, config.parallel.tensor_parallel_size
    for group, kind, count in (
        ("actor", "train", cluster.num_train_workers),
        ("critic", "critic", cluster.num_critic_workers),
    ):
        if cluster.runtime == "ray" and count % (replicate * tensor):
            yield fault(
                f"{group}_num_nodes × {group}_num_gpus_per_node = {count} {kind} workers can't be divided into "
                f"fsdp_replicate_size × tensor_parallel_size = {replicate} × {tensor}"
            )


def engines_share_out_their_gpus(config: Config) -> Iterator[Finding]:
    cluster = config.cluster
    if cluster.runtime != "ray":
        return
    each, wanted = cluster.rollout_num_gpus_per_engine, cluster.rollout_num_gpus
    if each > 1 and config.rollout.rollout_engine == "torch":
        yield fault(
            f"rollout_num_gpus_per_engine = {each}: the torch engine runs on one; leave it at 1 and raise rollout_num_gpus"
        )
    elif wanted is not None and wanted % each:
        yield fault(f"rollout_num_gpus = {wanted} is not a multiple of rollout_num_gpus_per_engine = {each}")
    shared = cluster.num_train_workers + cluster.num_critic_workers
    if cluster.colocate and wanted is not None and wanted > shared:
        yield fault(
            f"rollout_num_gpus = {wanted} with colocate: the engines live on the {shared} that train; lower it, "
            "or drop colocate"
        )


def turns_are_taken(config: Config) -> Iterator[Finding]:
    cluster = config.cluster
    if cluster.colocate and cluster.max_lag:
        yield fault(
            f"max_lag = {cluster.max_lag} with colocate: engines sleep while the trainer works, so nothing can run ahead; "
            "drop one of them"
        )
    for name, value in (("offload_rollout", cluster.offload_rollout), ("offload_train", cluster.offload_train)):
        if not value and not cluster.colocate and cluster.runtime == "ray":
            yield warning(f"{name} = false does nothing without colocate: each side keeps its own memory anyway")


def publish_meets_requests(config: Config) -> Iterator[Finding]:
    cluster = config.cluster
    if cluster.on_publish != "wait" and cluster.max_lag == 0 and cluster.runtime == "ray":
        yield warning(f"on_publish = {cluster.on_publish} does nothing with max_lag = 0: nothing is in flight then")


def old_samples_are_corrected(config: Config) -> Iterator[Finding]:
    if config.cluster.max_lag and config.algorithm.rollout_correction is None:
        yield warning(
            f"max_lag = {config.cluster.max_lag} trains on samples of older weights; rollout_correction (tis, say) "
            "weighs them"
        )


def transport_has_its_place(config: Config) -> Iterator[Finding]:
    cluster = config.cluster
    if cluster.weight_folder is not None and not cluster.weight_transport.startswith("disk"):
        yield warning(
            f"weight_folder = {cluster.weight_folder} is read by the disk transports only; set weight_transport = disk"
        )


def handles_stay_on_one_gpu(config: Config) -> Iterator[Finding]:
    cluster = config.cluster
    if cluster.weight_transport != "cuda_ipc":
        return
    if config.model.device == "cpu":
        yield fault("weight_transport = cuda_ipc hands over GPU memory and device = cpu has none; take shm")
    if cluster.runtime == "ray" and not cluster.colocate:
        yield fault(
            "weight_transport = cuda_ipc without colocate: engines are on other GPUs than the trainer; take broadcast"
        )
    if cluster.runtime == "ray" and cluster.num_train_workers > 1:
        yield fault(
            f"weight_transport = cuda_ipc with {cluster.num_train_workers} train workers: their shards are put together "
            "in host memory; take shm or broadcast"
        )


def ray_is_started_or_joined(config: Config) -> Iterator[Finding]:
    cluster = config.cluster
    if cluster.runtime != "ray" or cluster.ray_address is None:
        return
    for name, given in (
        ("ray_num_cpus", cluster.ray_num_cpus is not None),
        ("ray_bind_address", cluster.ray_bind_address not in _LOOPBACK),
        ("ray_dashboard", cluster.ray_dashboard),
    ):
        if given:
            yield warning(f"{name} does nothing with ray_address: the Ray that is joined has its own")
    if cluster.ray_address != "auto" and not _RAY_ADDRESS.fullmatch(cluster.ray_address):
        yield fault(f"ray_address = {written(cluster.ray_address)} is no address of a Ray; give host:port or auto")


def training_from_files_is_on_time(config: Config) -> Iterator[Finding]:
    if config.cluster.max_lag and (config.debug.debug_train_only or config.debug.debug_rollout_only):
        yield fault(f"max_lag = {config.cluster.max_lag} needs both halves of the loop; drop the debug setting")


def evaluation_is_local(config: Config) -> Iterator[Finding]:
    if config.cluster.runtime == "ray":
        yield warning("runtime = ray does nothing here: treadle eval runs in one process")


CLUSTER_RULES: tuple[Rule, ...] = (
    cluster_settings_are_used,
    train_workers_fill_their_grid,
    engines_share_out_their_gpus,
    turns_are_taken,
    publish_meets_requests,
    old_samples_are_corrected,
    transport_has_its_place,
    handles_stay_on_one_gpu,
    ray_is_started_or_joined,
    training_from_files_is_on_time,
)
