"""Rules about runtimes, workers and schedules; one rule a function."""

from __future__ import annotations

from collections.abc import Iterator

from treadle.config.findings import Finding, fault, rule, warning
from treadle.config.sections import Config


@rule("run")
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


@rule("run")
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


@rule("run")
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


@rule("eval")
def evaluation_is_local(config: Config) -> Iterator[Finding]:
    if config.cluster.runtime == "ray":
        yield warning("runtime = ray does nothing here: treadle eval runs in one process")


@rule("all")
def folders_have_names(config: Config) -> Iterator[Finding]:
    folders = {"run_dir": config.observe.run_dir, "save": config.checkpoint.save, "load": config.checkpoint.load}
    for name, value in folders.items():
        if value is not None and (not value.strip() or "\0" in value):
            yield fault(f"{name} = {value!r} names no folder; leave it out, or write . for the current folder")
