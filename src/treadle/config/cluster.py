"""The settings of a run that is spread over processes and nodes."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from treadle.config.section import MAX_SECONDS, Section


class ClusterSection(Section):
    """Where the parts of a run live: in one process, or in workers of their own on a Ray cluster."""

    runtime: Literal["local", "ray"] = Field(
        "local",
        description="`local` is one process; `ray` gives trainer and engines workers of their own (needs the `ray` extra).",
    )
    ray_address: str | None = Field(
        None, description="Ray cluster to join, `host:port` or `auto`; where not given a Ray is started for this run."
    )
    ray_bind_address: str = Field(
        "127.0.0.1", description="Address that a Ray started for this run listens on; loopback is this machine only."
    )
    ray_num_cpus: int | None = Field(
        None, ge=1, description="CPUs that a Ray started for this run counts; the machine's cores where not given."
    )
    ray_dashboard: bool = Field(False, description="Start Ray's dashboard (needs `ray[default]`) at the bind address.")
    actor_num_nodes: int = Field(1, ge=1, description="Nodes that train.")
    actor_num_gpus_per_node: int = Field(
        1, ge=1, description="Train workers on each of them, one GPU each; CPU workers where the cluster has no GPU."
    )
    critic_num_nodes: int | None = Field(
        None, ge=1, description="Nodes that train the critic alone; where not given it shares the policy's workers."
    )
    critic_num_gpus_per_node: int | None = Field(
        None, ge=1, description="Critic workers on each of them; 1 where only critic_num_nodes is given."
    )
    rollout_num_gpus: int | None = Field(
        None, ge=1, description="GPUs (CPU workers) of all engines together; as many as train where not given."
    )
    rollout_num_gpus_per_engine: int = Field(1, ge=1, description="GPUs of one engine.")
    num_cpus_per_worker: int = Field(1, ge=1, description="CPUs of each train worker and engine: their threads.")
    colocate: bool = Field(False, description="Engines and train workers share the same GPUs and take turns.")
    offload_rollout: bool = Field(True, description="With colocate: free the engines' memory while training runs.")
    offload_train: bool = Field(True, description="With colocate: free the trainer's memory while engines generate.")
    max_lag: int = Field(
        0, ge=0, description="Rollouts that generation may run ahead of the weights: 0 is on-policy, 1 one step off."
    )
    on_publish: Literal["wait", "pause", "abort"] = Field(
        "wait",
        description="Requests in flight when new weights come: wait for them, pause them between two tokens, or redo them.",
    )
    weight_transport: Literal["auto", "shm", "disk", "disk-delta", "broadcast", "cuda_ipc"] = Field(
        "auto",
        description="How weights reach the engines; `auto` is shm on one node, broadcast between nodes. cuda_ipc needs engine and trainer on one GPU.",
    )
    weight_folder: str | None = Field(
        None, description="Folder of the disk transports, seen by all nodes; `weights` in the run folder by default."
    )
    health_check_interval_seconds: float = Field(
        10.0,
        gt=0,
        le=MAX_SECONDS,
        description="How often an engine is asked if it is well, and any other worker for a sign of life.",
    )
    health_check_timeout_seconds: float = Field(
        30.0,
        gt=0,
        le=MAX_SECONDS,
        description="An engine that answers later than this is taken for dead, and started anew.",
    )
    worker_silence_seconds: float = Field(
        120.0,
        gt=0,
        le=MAX_SECONDS,
        description="A train, critic or rollout worker that gives no sign of life for longer is lost.",
    )
    max_restarts: int = Field(
        3,
        ge=0,
        description="How often a run goes on from its last checkpoint after a lost worker, and an engine that finishes nothing is started anew.",
    )
    placement_timeout_seconds: float = Field(
        600.0, gt=0, le=MAX_SECONDS, description="Deadline of the wait for free GPUs or CPUs."
    )
    worker_start_timeout_seconds: float = Field(
        600.0, gt=0, le=MAX_SECONDS, description="Deadline of starting a worker and loading its model."
    )
    train_timeout_seconds: float = Field(
        3600.0, gt=0, le=MAX_SECONDS, description="Deadline of a train worker's step, of a save and of a publish."
    )

    @property
    def num_train_workers(self) -> int:
        return self.actor_num_nodes * self.actor_num_gpus_per_node

    @property
    def critic_numbers(self) -> dict[str, int | None]:
        """The flags that give the critic workers of its own, by name."""
        return {
            "critic_num_nodes": self.critic_num_nodes,
            "critic_num_gpus_per_node": self.critic_num_gpus_per_node,
        }

    @property
    def num_critic_workers(self) -> int:
        """Workers that train the critic alone; 0 where it shares the policy's."""
        given = [number for number in self.critic_numbers.values() if number is not None]
        return math.prod(given) if given else 0

    @property
    def num_engines(self) -> int:
        """Engines of the run; as many GPUs generate as train the policy where no number is given, with `colocate` as
        many as train at all."""
        own = self.num_critic_workers if self.colocate else 0
        return max(1, (self.rollout_num_gpus or self.num_train_workers + own) // self.rollout_num_gpus_per_engine)
