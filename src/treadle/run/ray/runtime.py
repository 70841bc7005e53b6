"""The cluster runtime: the same loop over workers that Ray runs, on one machine or many.

A rollout worker drives the engines, train workers are the ranks of the trainer. This process plans, saves, records, and
restarts all workers from the last checkpoint if one of them dies.
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
from treadle.run.ray.worker import Worker, WorkerSetup, while_alive
from treadle.run.record import Outputs
from treadle.run.servers import transport_plan
from treadle.run.session import Session, check_training, finish, is_finished, note_resumed, open_outputs, schedule_of
from treadle.run.stop import Stop, stops_on_signals
from treadle.training.checkpoint import PREFIX, find_checkpoint
from treadle.weights import TransportPlan

CLOSE_SECONDS = 20.0
MANY_CALLS = 100_000
"""Calls a worker holds at once: a rollout has one for each prompt."""


async def train_on_cluster(session: Session, recipe_name: str, stop: Stop) -> dict[str, Any]:
    """Train over workers; if one dies, go on from the last checkpoint of this run. Returns the summary."""
    began = time.perf_counter()
    progress, most = session.progress, session.config.cluster.max_restarts
    attempt = _Attempt(session, stop, check_training(session))
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
    """One life of the workers, from a start or a checkpoint to the end of the run or of a worker."""

    def __init__(self, session: Session, stop: Stop, teacher: str | None, outputs: Outputs | None = None):
        self.session, self.stop, self.teacher, self.outputs = session, stop, teacher, outputs
        self.finished_after: int | None = None
        self._parts: Parts | None = None

    def again(self) -> _Attempt:
        """Return the next attempt: from the newest checkpoint this run wrote, or else from where this one started."""
        session = self.session
        if self._parts is not None and self._parts.saved is not None:
            path = self._parts.out.checkpoints / f"{PREFIX}{self._parts.saved:06d}"
            session = replace(session, checkpoint=find_checkpoint(path, session.progress.warn))
        return _Attempt(session, self.stop, self.teacher, self.outputs)

    async def run(self, can_grow: bool) -> None:
        """Start the workers, run the loop, end the workers."""
        session, config, progress = self.session, self.session.config, self.session.progress
        cluster, is_restart = config.cluster, self.outputs is not None
        async with AsyncExitStack() as stack:
            progress.phase("waiting for a place")
            places = await place(config, progress.note, can_grow=can_grow)
            stack.push_async_callback(until_gone, places, CLOSE_SECONDS)
            stack.callback(release, places)
            workers = _start_workers(session, places, self.teacher)
            stack.push_async_callback(workers.close)
            progress.phase("starting the workers")
            schedule = schedule_of(session, None if workers.rollouts is None else await workers.rollouts.load())
            if not is_restart and is_finished(session, schedule):
                return
            await workers.load(session, schedule)
            self.outputs = open_outputs(session, stack, again=is_restart)
            driven, interval = self._drive(workers, schedule, self.outputs), cluster.health_check_interval_seconds
            await while_alive(driven, workers.all, interval, cluster.worker_silence_seconds)

    async def _drive(self, workers: _Workers, schedule: Schedule, outputs: Outputs) -> None:
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


@dataclass(frozen=True, eq=False)
class _Workers:
    """Both sides of the run; a side that does not run is None. `turns` gets the peak memory of those that sleep and wake."""

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

    async def load(self, session: Session, schedule: Schedule) -> None:
        """Have both sides load what they need and go to where the checkpoint was taken, side by side."""
        waits = []
        if self.trainer is not None:
            waits.append(self.trainer.build(schedule.num_rollout, session.checkpoint))
        if self.rollouts is not None:
            waits.append(self.rollouts.open(session.checkpoint, session.start_rollout_id))
        await asyncio.gather(*waits)
        note_resumed(session)

    async def close(self) -> None:
        """Have the workers release what they hold, all at once, then end their processes."""
        ends = [] if self.rollouts is None else [self.rollouts.worker.call("its end", RolloutActor.close)]
        ends += [] if self.trainer is None else [w.call("its end", RankActor.close) for w in self.trainer.workers]
        waits = [call.value(CLOSE_SECONDS) for call in ends]
        await asyncio.gather(*waits, return_exceptions=True)  # one of them may have died
        for worker in self.all:
            worker.kill()


def _start_workers(session: Session, places: Places, teacher: str | None) -> _Workers:
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
    return _Workers(places, rollouts, trainer, turns)


def _transport(config: Config, places: Places, receivers: int, folder: Path) -> TransportPlan:
    """Plan how weights go from the first train worker to this many receivers."""
    elsewhere = config.engine.rollout_external_engine_addrs or not places.on_one_node
    return transport_plan(
        config,
        receivers,
        folder,
        on_one_node=places.on_one_node,
        on_gpu=places.uses_gpus,
        host=places.train[0].node_ip if elsewhere else "127.0.0.1",
        shares_gpu=config.cluster.colocate,
    )
