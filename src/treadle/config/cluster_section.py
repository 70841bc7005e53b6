"""Settings of a run that is spread over processes and nodes."""

from __future__ import annotations

import math
import re
from typing import Literal

from treadle.catalog import TRANSPORTS
from treadle.config.conditions import TRAINS_A_CRITIC, absent, choice, given, when
from treadle.config.section import Section, seconds, setting

_RAY_ADDRESS = re.compile(r"auto|(\[[0-9A-Fa-f:]+\]|[\w.-]+):\d{1,5}", re.ASCII)
# fmt: off
_RAY = choice("runtime", "ray", warn=True, together=True)
_STARTED_RAY = absent("ray_address", "the joined Ray cluster has its own", warn=True, together=True)
_WORKERS = when(lambda c: c.cluster.runtime == "ray" or c.rollout.rollout_engine != "torch",  # a server has workers too
                "does nothing with runtime = local; set runtime = ray, or drop it", warn=True, together=True)
_REACHABLE = when(lambda c: bool(_RAY_ADDRESS.fullmatch(c.cluster.ray_address or "auto")),
                  "is not the address of a Ray cluster; give host:port or auto")
_OFFLOAD = given("colocate", why="each side keeps its own memory anyway", warn=True)
_RUNS_AHEAD = (
    when(lambda c: c.cluster.runtime == "ray",
         "needs runtime = ray: in one process trainer and engine take turns, so nothing can run ahead of the weights"),
    when(lambda c: not c.cluster.colocate,
         "with colocate: engines sleep while the trainer works, so nothing can run ahead; drop one of them"),
    when(lambda c: not (c.debug.debug_train_only or c.debug.debug_rollout_only),
         "needs both halves of the loop; drop the debug setting"),
    when(lambda c: c.algorithm.rollout_correction is not None,
         "trains on samples of older weights; set rollout_correction (for example tis) to correct for that", warn=True),
)
_IN_FLIGHT = when(lambda c: c.cluster.max_lag > 0,
                  "does nothing with max_lag = 0: nothing is in flight then; set max_lag, or drop it", warn=True)
_READS_FOLDER = when(lambda c: c.cluster.weight_transport.startswith("disk") or ":" in c.cluster.weight_transport,
                     "is read by the disk transports only; set weight_transport = disk, or drop it", warn=True)
# fmt: on


class ClusterSection(Section):
    """Where the parts of a run live: in one process, or in workers of their own on a Ray cluster."""

    runtime: Literal["local", "ray"] = "local"
    """`local` is one process; `ray` gives trainer and engines workers of their own (needs the `ray` extra)."""
    ray_address: str | None = setting(None, _RAY, _REACHABLE)
    """Ray cluster to join, `host:port` or `auto`. Default: start one for this run."""
    ray_bind_address: str = setting("127.0.0.1", _RAY, _STARTED_RAY)
    """Address on which a Ray cluster started for this run listens. The default is reachable from this machine only."""
    ray_num_cpus: int | None = setting(None, _RAY, _STARTED_RAY, ge=1)
    """CPUs that a Ray cluster started for this run has. Default: the machine's cores."""
    ray_dashboard: bool = setting(False, _RAY, _STARTED_RAY)
    """Start Ray's dashboard (needs `ray[default]`) at the bind address."""
    actor_num_nodes: int = setting(1, _RAY, ge=1)
    """Number of nodes that train the policy."""
    actor_num_gpus_per_node: int = setting(1, _RAY, ge=1)
    """Train workers per node, with one GPU each; CPU workers if the cluster has no GPU."""
    critic_num_nodes: int | None = setting(None, TRAINS_A_CRITIC, _RAY, ge=1)
    """Number of nodes that train the critic alone. Default: the critic shares the policy's workers."""
    critic_num_gpus_per_node: int | None = setting(None, TRAINS_A_CRITIC, _RAY, ge=1)
    """Critic workers per node. Default: 1 if critic_num_nodes is set."""
    rollout_num_gpus: int | None = setting(None, _RAY, ge=1)
    """GPUs (or CPU workers) of all engines together. Default: as many as train."""
    rollout_num_gpus_per_engine: int = setting(1, _RAY, ge=1)
    """GPUs of one engine."""
    num_cpus_per_worker: int = setting(1, _WORKERS, ge=1)
    """CPUs, and threads, of each train worker and engine."""
    colocate: bool = setting(False, _RAY)
    """Engines and train workers share the same GPUs and take turns."""
    offload_rollout: bool = setting(True, _RAY, _OFFLOAD)
    """With colocate: free the engines' memory while training runs."""
    offload_train: bool = setting(True, _RAY, _OFFLOAD)
    """With colocate: free the trainer's memory while engines generate."""
    max_lag: int = setting(0, *_RUNS_AHEAD, ge=0)
    """Rollouts that generation may run ahead of the weights: 0 is on-policy, 1 is one step off."""
    on_publish: Literal["wait", "pause", "abort"] = setting("wait", _RAY, _IN_FLIGHT)
    """What happens to in-flight requests when new weights arrive: wait for them, pause them between two tokens, or
    abort and rerun them."""
    weight_transport: str = setting("auto", _WORKERS, names=TRANSPORTS, path=True)
    """How weights reach the engines; `auto` is shm on one node and broadcast between nodes. cuda_ipc needs engine and
    trainer on one GPU. Or the path of your own `treadle.weights.Transport`."""
    weight_folder: str | None = setting(None, _WORKERS, _READS_FOLDER, path=True)
    """Folder of the disk transports, which all nodes can read. Default: `weights` in the run folder."""
    health_check_interval_seconds: float = seconds(10.0, _WORKERS)
    """Interval of the engines' health checks and of the other workers' heartbeats (seconds)."""
    health_check_timeout_seconds: float = seconds(30.0, _WORKERS)
    """An engine whose health check takes longer than this (seconds) counts as dead and is restarted."""
    worker_silence_seconds: float = seconds(120.0, _RAY)
    """A train, critic or rollout worker that sends no heartbeat for longer than this counts as dead."""
    max_restarts: int = setting(3, _WORKERS, ge=0)
    """How often a run continues from its last checkpoint after a worker died, and how often an engine that finishes
    nothing is restarted."""
    placement_timeout_seconds: float = seconds(600.0, _RAY)
    """Deadline of the wait for free GPUs or CPUs (seconds)."""
    worker_start_timeout_seconds: float = seconds(600.0, _RAY)
    """Deadline of starting a worker and loading its model (seconds)."""
    train_timeout_seconds: float = seconds(3600.0, _WORKERS)
    """Deadline of a train worker's step, of a save and of a publish (seconds)."""

    @property
    def num_train_workers(self) -> int:
        """Workers that train the policy."""
        return self.actor_num_nodes * self.actor_num_gpus_per_node

    @property
    def critic_numbers(self) -> dict[str, int | None]:
        """The settings that give the critic workers of its own, by name."""
        return {"critic_num_nodes": self.critic_num_nodes, "critic_num_gpus_per_node": self.critic_num_gpus_per_node}

    @property
    def num_critic_workers(self) -> int:
        """Workers that train the critic alone; 0 if it shares the policy's."""
        given = [number for number in self.critic_numbers.values() if number is not None]
        return math.prod(given) if given else 0

    @property
    def num_shared_workers(self) -> int:
        """Workers whose GPUs colocated engines can use: those of the policy and of the critic."""
        return self.num_train_workers + self.num_critic_workers

    @property
    def num_engines(self) -> int:
        """Number of engines. Unless rollout_num_gpus is set, they use as many GPUs as train the policy, or with
        `colocate` as many as train the policy and the critic."""
        usual = self.num_shared_workers if self.colocate else self.num_train_workers
        return max(1, (self.rollout_num_gpus or usual) // self.rollout_num_gpus_per_engine)
