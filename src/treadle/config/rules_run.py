"""Rules about runtimes, workers and schedules."""

from __future__ import annotations

from collections.abc import Iterator

from treadle.config.conditions import Finding, fault, refuse, rule, warn_of
from treadle.config.sections import Config


@rule("run")
def train_workers_fill_their_grid(config: Config) -> Iterator[Finding]:
    cluster = config.cluster
    replicate, tensor = config.parallel.fsdp_replicate_size, config.parallel.tensor_parallel_size
    workers = (("actor", "train", cluster.num_train_workers), ("critic", "critic", cluster.num_critic_workers))
    for group, kind, count in workers if cluster.runtime == "ray" else ():
        if count % (replicate * tensor):
            yield fault(
                f"{group}_num_nodes × {group}_num_gpus_per_node = {count} {kind} workers can't be divided into "
                f"fsdp_replicate_size × tensor_parallel_size = {replicate} × {tensor}; give sizes whose product "
                f"divides {count}"
            )


def _spreads_one_gpu_engines(config: Config) -> bool:
    """True if the torch engine, which runs on one GPU, is given several."""
    return config.rollout.rollout_engine == "torch" and config.cluster.rollout_num_gpus_per_engine > 1


def _hands_over_memory(config: Config) -> bool:
    return config.cluster.runtime == "ray" and config.cluster.weight_transport == "cuda_ipc"


# fmt: off
refuse("run", lambda c: c.cluster.runtime == "ray" and _spreads_one_gpu_engines(c),
       "rollout_num_gpus_per_engine = {rollout_num_gpus_per_engine}, but a torch engine runs on one; leave it at 1 and "
       "raise rollout_num_gpus")
refuse("run", lambda c: c.cluster.runtime == "ray" and not _spreads_one_gpu_engines(c)
       and (c.cluster.rollout_num_gpus or 0) % c.cluster.rollout_num_gpus_per_engine,
       "rollout_num_gpus = {rollout_num_gpus} is not a multiple of rollout_num_gpus_per_engine = "
       "{rollout_num_gpus_per_engine}; change one of them")
refuse("run", lambda c: c.cluster.runtime == "ray" and c.cluster.colocate
       and (c.cluster.rollout_num_gpus or 0) > c.cluster.num_shared_workers,
       "rollout_num_gpus = {rollout_num_gpus} with colocate, but the engines share the {cluster.num_shared_workers} "
       "that train; lower it, or drop colocate")
refuse("run", lambda c: c.cluster.weight_transport == "cuda_ipc" and c.model.device == "cpu",
       "weight_transport = cuda_ipc hands over GPU memory and device = cpu has none; use shm")
refuse("run", lambda c: _hands_over_memory(c) and not c.cluster.colocate,
       "weight_transport = cuda_ipc without colocate: engines are on other GPUs than the trainer; use broadcast")
refuse("run", lambda c: _hands_over_memory(c) and c.cluster.num_train_workers > 1,
       "weight_transport = cuda_ipc with {cluster.num_train_workers} train workers: their shards are put together in host "
       "memory; use shm or broadcast")
warn_of("eval", lambda c: c.cluster.runtime == "ray",
        "runtime = ray does nothing here: treadle eval runs in one process; drop it")
# fmt: on


@rule("all")
def folders_have_names(config: Config) -> Iterator[Finding]:
    folders = {"run_dir": config.observe.run_dir, "save": config.checkpoint.save, "load": config.checkpoint.load}
    for name, value in folders.items():
        if value is not None and (not value.strip() or "\0" in value):
            yield fault(f"{name} = {value!r} names no folder; leave it out, or write . for the current folder")
