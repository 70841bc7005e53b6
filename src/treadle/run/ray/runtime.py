"""The cluster runtime: the same loop over workers that Ray runs, on one machine or many.

A rollout worker drives the engines, train workers are the ranks of the trainer; this process plans, saves, records and decides what
happens when a worker is lost.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from treadle.config import Config
from treadle.errors import WorkerLostError
from treadle.metrics import Metric
from treadle.run.lease import Lease
from treadle.run.loop import Schedule, train_loop
from treadle.run.parts import Parts
from treadle.run.ray.connection import ray_running
from treadle.run.ray.placement import Places, place, release, until_gone
from treadle.run.ray.publisher import ClusterPublisher
from treadle.run.ray.remote_rollouts import RemoteRollouts
from treadle.run.ray.rollout_worker import RolloutActor
from treadle.run.ray.train_group import TrainGroup
from treadle.run.ray.train_workers import RankActor
from treadle.run.ray.worker import Call, Worker, WorkerSetup, while_alive
from treadle.run.record import Outputs
from treadle.run.servers import transport_name
from treadle.run.session import Session, check_training, finish, is_finished, open_outputs, schedule_of
from treadle.run.stop import Stop, stops_on_signals
from treadle.training.checkpoint import PREFIX, find_checkpoint
from treadle.weights import TransportPlan, choose_transport

CLOSE_SECONDS = 20.0
MANY_CALLS = 100_000
"""Calls a worker holds at once: a rollout has one for each prompt."""


@dataclass(frozen=True, eq=False)
class Workers:
    """Both sides of the run; None for one that does not run. `turns` gets the peak memory of those that sleep and wake."""

    places: Places
    rollouts: RemoteRollouts | None
    trainer: TrainGroup | None
    turns: list[Metric]

    @property
    def all(self) -> list[Worker[Any]]:
        rollout: list[Worker[Any]] = [] if self.rollouts is None else [self.rollouts.worker]
        return rollout + ([] if self.trainer is None else [*self.trainer.workers])

    def take_turns(self) -> list[Metric]:
        """Return the peak memory of the turns since the last call."""
        taken = list(self.turns)
        self.turns.clear()
        return taken


async def train_on_cluster(session: Session, recipe_name: str, stop: Stop) -> dict[str, Any]:
    """Train over workers; after a lost one, go on from the last checkpoint of this run. Returns the summary."""
    began = time.perf_counter()
    progress, most = session.progress, session.config.cluster.max_restarts
    attempt = _Attempt(session, recipe_name, stop, teacher=check_training(session))
    summary: dict[str, Any] = {}
    with ray_running(session.config.cluster, progress) as can_grow:
        try:
            for restarts in range(most + 1):
                try:
                    await attempt.run(can_grow)
                    break
                except WorkerLostError as error:
                    if restarts == most or stop.requested:
                        raise
                    attempt = attempt.again()
                    progress.warn(
                        f"{error}; restart {restarts + 1} of {most}, from rollout {attempt.session.start_rollout_id}"
                    )
        finally:
            if attempt.outputs is not None:
                seconds = time.perf_counter() - began
                summary = finish(attempt.outputs.folder, recipe_name, seconds, attempt.finished_after)
    return summary


class _Attempt:
    """One life of the workers, from a start or a checkpoint to the end or a loss."""

    def __init__(self, session: Session, name: str, stop: Stop, *, teacher: str | None, outputs: Outputs | None = None):
        self.session, self.name, self.stop, self.teacher, self.outputs = session, name, stop, teacher, outputs
        self.finished_after: int | None = None
        self._parts: Parts | None = None

    def again(self) -> _Attempt:
        """The next attempt: from the newest checkpoint this run wrote, or else from where this one started."""
        session = self.session
        saved = None if self._parts is None else self._parts.saved
        if saved is not None:
            assert self.outputs is not None
            path = self.outputs.checkpoints / f"{PREFIX}{saved:06d}"
            session = replace(session, checkpoint=find_checkpoint(path, session.progress.warn))
        return _Attempt(session, self.name, self.stop, teacher=self.teacher, outputs=self.outputs)

    async def run(self, can_grow: bool) -> None:
        """Start the workers, run the loop, end the workers."""
        session, config, progress = self.session, self.session.config, self.session.progress
        generates, trains = not config.debug.debug_train_only, not config.debug.debug_rollout_only
        async with AsyncExitStack() as stack:
            progress.phase("waiting for a place")
            places = await place(config, progress.note, trains=trains, generates=generates, can_grow=can_grow)
            stack.push_async_callback(until_gone, places, CLOSE_SECONDS)
            stack.callback(release, places)
            workers = _start_workers(self.session, places, self.teacher)
            stack.push_async_callback(_end, workers)
            progress.phase("starting the workers")
            schedule = await self._load(workers)
            if schedule is None:
                return
            self.outputs = open_outputs(session, stack, again=self.outputs is not None)
            cluster = config.cluster
            await while_alive(
                self._drive(workers, schedule, self.outputs),
                workers.all,
                cluster.health_check_interval_seconds,
                cluster.worker_silence_seconds,
            )

    async def _drive(self, workers: Workers, schedule: Schedule, outputs: Outputs) -> None:
        """Give the engines their first weights, then run the loop."""
        config, progress, start = self.session.config, self.session.progress, schedule.start_rollout_id
        rollouts, trainer, cluster = workers.rollouts, workers.trainer, config.cluster
        async with AsyncExitStack() as stack:
            publish = None
            if rollouts is not None:
                publisher = ClusterPublisher(rollouts, trainer, progress)
                stack.push_async_callback(publisher.close)
                publish = publisher.publish
                if trainer is not None:
                    receivers = await rollouts.num_receivers()
                    await trainer.connect(_transport(config, workers.places, receivers, outputs.folder.path))
            parts = self._parts = Parts(config, schedule, outputs, rollouts, trainer, publish, workers.take_turns)
            await parts.publish(start)
            progress.start(schedule.num_rollout, start)
            lease = Lease(
                rollouts if cluster.colocate and cluster.offload_rollout else None,
                trainer if cluster.colocate and cluster.offload_train else None,
            )
            with stops_on_signals(self.stop, progress.note):
                self.finished_after = await train_loop(parts, lease, schedule, self.stop)

    async def _load(self, workers: Workers) -> Schedule | None:
        """Have the workers load what they need and go to where the checkpoint was taken, side by side.

        Returns None if nothing is left to do.
        """
        session, checkpoint = self.session, self.session.checkpoint
        schedule = schedule_of(session, None if workers.rollouts is None else await workers.rollouts.load())
        if self.outputs is None and is_finished(session, schedule):
            return None
        waits = []
        if workers.trainer is not None:
            waits.append(workers.trainer.build(schedule.num_rollout, checkpoint))
        if workers.rollouts is not None:
            waits.append(workers.rollouts.open(checkpoint, session.start_rollout_id))
        await asyncio.gather(*waits)
        if checkpoint is not None:
            session.progress.note(f"resuming at rollout {checkpoint.rollout_id} from {checkpoint.path}")
        return schedule


def _start_workers(session: Session, places: Places, teacher: str | None) -> Workers:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    config, progress = session.config, session.progress
    setup = WorkerSetup(config, session.policy_path, session.files.max_prompt)
    rollouts = trainer = None
    turns: list[Metric] = []
    if places.engines:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options = {"num_cpus": 0, "scheduling_strategy": here, "max_concurrency": MANY_CALLS, "max_restarts": 0}
        handle = ray.remote(RolloutActor).options(**options).remote(setup, places)
        rollouts = RemoteRollouts(config, Worker("rollout worker", handle), progress, turns)
    if places.train:
        trainer = TrainGroup(setup, places, teacher, progress, turns)
    return Workers(places, rollouts, trainer, turns)


def _transport(config: Config, places: Places, receivers: int, folder: Path) -> TransportPlan:
    """Plan how weights go from the first train worker to this many receivers."""
    cluster = config.cluster
    name = choose_transport(cluster.weight_transport, on_one_node=places.on_one_node, on_gpu=places.uses_gpus)
    folder = folder / "weights" if cluster.weight_folder is None else Path(cluster.weight_folder)
    nccl = places.uses_gpus and not cluster.colocate
    elsewhere = config.engine.rollout_external_engine_addrs or not places.on_one_node
    host = places.train[0].node_ip if elsewhere else "127.0.0.1"
    name = transport_name(config, name)
    return TransportPlan(name, receivers, folder.absolute(), host=host, backend="nccl" if nccl else "gloo")


async def _end(workers: Workers) -> None:
    """Let the workers end what they hold, all at once, then end them."""
    ends: list[Call[None]] = []
    if workers.rollouts is not None:
        ends.append(workers.rollouts.worker.call("its end", RolloutActor.close))
    if workers.trainer is not None:
        ends += [worker.call("its end", RankActor.close) for worker in workers.trainer.workers]
    waits = [call.value(CLOSE_SECONDS) for call in ends]
    await asyncio.gather(*waits, return_exceptions=True)  # one of them may be lost already
    for worker in workers.all:
        worker.kill()
