"""The cluster runtime: the same loop over workers that Ray runs, on one machine or many.

A rollout worker drives the engines, train workers are the ranks of the trainer; this process plans, saves, records and decides what
happens when a worker is lost.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from treadle.config import Config
from treadle.errors import EngineLostError, WorkerLostError
from treadle.metrics import Metric, metric
from treadle.rollout.engines.pool import PUBLISH_TRIES
from treadle.run import build
from treadle.run.differences import check_supplies
from treadle.run.exchange import exchange
from treadle.run.lease import FreeLease, Holder, Lease
from treadle.run.loop import Collection, Schedule, train_loop
from treadle.run.ray.calls import Call
from treadle.run.ray.connection import ray_running
from treadle.run.ray.placement import Places, place, release, until_gone
from treadle.run.ray.rank_workers import RankActor
from treadle.run.ray.rollout_worker import RolloutActor
from treadle.run.ray.train_workers import TrainGroup
from treadle.run.ray.worker import Note, Worker, WorkerSetup, while_alive
from treadle.run.record import Outputs, Record
from treadle.run.rollouts import saved_rollout
from treadle.run.servers import transport_name
from treadle.run.session import Session, finish, is_finished, open_outputs, schedule_of
from treadle.run.stop import Stop, stops_on_signals
from treadle.training.checkpoint import PREFIX, find_checkpoint
from treadle.types import Group
from treadle.weights.named import TransportPlan

Result = TypeVar("Result")

STATUS_SECONDS = 0.3
CLOSE_SECONDS = 20.0
MANY_CALLS = 100_000
"""Calls a worker holds at once: a rollout has one for each prompt."""


@dataclass(frozen=True, eq=False)
class Workers:
    """Handles of the run's workers; None for a half of the loop that does not run."""

    places: Places
    rollout: Worker[RolloutActor] | None
    trainer: TrainGroup | None

    @property
    def all(self) -> list[Worker[Any]]:
        rollout: list[Worker[Any]] = [] if self.rollout is None else [self.rollout]
        return rollout + ([] if self.trainer is None else [*self.trainer.workers])


class ClusterParts:
    """What `train_loop` drives, over workers."""

    def __init__(self, config: Config, schedule: Schedule, outputs: Outputs, workers: Workers):
        self.config, self.schedule, self.out = config, schedule, outputs
        self._rollout, self.trainer = workers.rollout, workers.trainer
        self.written = Record(config, schedule, outputs)
        self.saved: int | None = None  # the newest checkpoint of this attempt
        self._version = schedule.start_rollout_id  # of the weights that the engines have
        self._trainer_ahead = False  # True from the start of a training step to its publish
        self._publishing = asyncio.Lock()
        self._engines_asleep = self._trainer_asleep = False
        self._again: asyncio.Task[None] | None = None
        self._turns: list[Metric] = []  # memory of those who gave theirs up or took it back, since the last rollout

        # Of a call that may have to wait for requests in flight.
        self._seconds = config.rollout.rollout_timeout_seconds + config.cluster.worker_start_timeout_seconds

    @property
    def rollout(self) -> Worker[RolloutActor]:
        assert self._rollout is not None, "nothing generates in this run"
        return self._rollout

    # The loop's parts

    async def collect(self, rollout_id: int) -> Collection:
        if self.config.debug.debug_train_only:
            return saved_rollout(self.config, rollout_id)
        collection = await self._watched(self.rollout.call(f"rollout {rollout_id}", RolloutActor.collect, rollout_id))
        self.written.rollout(rollout_id, collection.groups)
        return collection

    async def train(self, rollout_id: int, groups: Sequence[Group]) -> Sequence[Metric]:
        if self.trainer is None:
            return []
        self.out.progress.phase("training")
        async with self._publishing:
            self._trainer_ahead = True
            trained = await self.trainer.train(groups, rollout_id)
        self._show(trained.notes)
        return trained.metrics

    async def publish(self, version: int) -> Sequence[Metric]:
        if self._rollout is None:
            return []
        began = time.perf_counter()
        async with self._publishing:
            if self._engines_asleep:
                self._turns += await self.rollout.call("onload of weights", RolloutActor.onload_weights).in_time(
                    self._seconds
                )
            await self._exchange(version)
            self._version, self._trainer_ahead = version, False
        return [metric("perf/publish_seconds", time.perf_counter() - began)]

    async def evaluate(self, done: int) -> None:
        began = time.perf_counter()
        found = await self._watched(self.rollout.call(f"evaluation after {done} rollouts", RolloutActor.evaluate))
        self.written.evaluation(done, found, time.perf_counter() - began)

    async def save(self, done: int, *, last: bool = False) -> Sequence[Metric] | None:
        return await self.written.save(done, lambda: self._save(done), last=last)

    def record(self, rollout_id: int, metrics: Sequence[Metric]) -> None:
        self.written.step(rollout_id, [*metrics, *self._turns])
        self._turns = []

    # Whose turn it is

    @asynccontextmanager
    async def hold(self, holder: Holder) -> AsyncIterator[None]:
        """A lease where engines and trainer share devices: the other side sleeps."""
        cluster = self.config.cluster
        if holder == "training":
            if self._rollout is not None and cluster.offload_rollout and not self._engines_asleep:
                self._turns += await self.rollout.call("offload", RolloutActor.offload).in_time(self._seconds)
                self._engines_asleep = True
            if self.trainer is not None and self._trainer_asleep:
                self._turns += await self.trainer.wake()
                self._trainer_asleep = False
        else:
            if self.trainer is not None and cluster.offload_train and not self._trainer_asleep:
                self._turns += await self.trainer.sleep()
                self._trainer_asleep = True
            if self._engines_asleep:
                await self.rollout.call("onload of the KV cache", RolloutActor.onload_kv).in_time(self._seconds)
                self._engines_asleep = False
        yield

    async def close(self) -> None:
        """End what still runs beside the loop."""
        if self._again is not None:
            self._again.cancel()
            await asyncio.gather(self._again, return_exceptions=True)

    # Their insides

    async def _save(self, done: int) -> None:
        assert self.trainer is not None
        state = {}
        if self._rollout is not None:
            state = await self._rollout.call("its part of a save", RolloutActor.state, done).in_time(self._seconds)
        await self.trainer.save(self.out.checkpoints, done, state)
        self.saved = done

    async def _exchange(self, version: int) -> None:
        """Offer, receive and deliver; again where an engine is lost on the way."""
        if self.trainer is None:
            await self.rollout.call("the version", RolloutActor.set_version, version).in_time(self._seconds)
            return
        for tries_left in reversed(range(PUBLISH_TRIES)):
            on_publish = self.config.cluster.on_publish
            await self.rollout.call("a pause for new weights", RolloutActor.prepare, on_publish).in_time(self._seconds)
            offer = await self.trainer.offer(version)
            receiving = self.rollout.call("new weights", RolloutActor.receive, offer).in_time(self._seconds)
            errors = await exchange(offer["transport"], receiving, partial(self.trainer.deliver, version))
            if not errors:
                return
            lost = any(isinstance(error, EngineLostError) for error in errors)
            if not lost or not tries_left or any(isinstance(error, WorkerLostError) for error in errors):
                raise next((e for e in errors if isinstance(e, WorkerLostError)), errors[0])
            self.out.progress.warn(f"version {version} did not reach every engine ({errors[0]}); it is offered again")

    async def _publish_again(self) -> None:
        """Give the engines' current version to one that was restarted, unless the trainer has moved on."""
        async with self._publishing:
            if self._trainer_ahead:
                return
            if self._trainer_asleep and self.trainer is not None:  # and awake it stays, until the next rollout
                await self.trainer.wake()
                self._trainer_asleep = False
            await self._exchange(self._version)

    async def _watched(self, call: Call[Result]) -> Result:
        """Return the result of a long call of the rollout worker, which keeps the deadline; show its notes meanwhile."""
        waiting = asyncio.create_task(call.value())
        try:
            while not waiting.done():
                await asyncio.wait((waiting,), timeout=STATUS_SECONDS)
                await self._look()
            return waiting.result()
        finally:
            if not waiting.done():
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)

    async def _look(self) -> None:
        seconds = self.config.cluster.worker_silence_seconds
        seen = await self.rollout.call("its status", RolloutActor.status).in_time(seconds)
        self._show(seen.notes)
        if seen.phase is not None and not self._trainer_ahead:
            self.out.progress.phase(*seen.phase)
        if self._again is not None and self._again.done():
            self._again.result()  # raises what went wrong
            self._again = None
        if seen.wants_weights and self._again is None and not self._trainer_ahead:
            self._again = asyncio.create_task(self._publish_again())

    def _show(self, notes: Sequence[Note]) -> None:
        for kind, text in notes:
            (self.out.progress.warn if kind == "warn" else self.out.progress.note)(text)


async def train_on_cluster(session: Session, recipe_name: str, stop: Stop) -> dict[str, Any]:
    """Train over workers; after a lost one, go on from the last checkpoint of this run. Returns the summary."""
    began = time.perf_counter()
    progress, most = session.progress, session.config.cluster.max_restarts
    attempt = _Attempt(session, recipe_name, stop, teacher=_teacher(session))
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


def _teacher(session: Session) -> str | None:
    """The teacher's folder; what is wrong with the objective or with it is told before any worker starts."""
    if not session.config.debug.debug_rollout_only:
        check_supplies(build.resolve_objective(session.config), session.checkpoint)
    return build.find_teacher(session.config, session.codec, session.max_prompt)


class _Attempt:
    """One life of the workers, from a start or a checkpoint to the end or a loss."""

    def __init__(self, session: Session, name: str, stop: Stop, *, teacher: str | None, outputs: Outputs | None = None):
        self.session, self.name, self.stop, self.teacher, self.outputs = session, name, stop, teacher, outputs
        self.finished_after: int | None = None
        self._parts: ClusterParts | None = None

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
            parts = self._parts = ClusterParts(config, schedule, self.outputs, workers)
            stack.push_async_callback(parts.close)
            cluster = config.cluster
            await while_alive(
                self._drive(parts, workers),
                workers.all,
                cluster.health_check_interval_seconds,
                cluster.worker_silence_seconds,
            )

    async def _drive(self, parts: ClusterParts, workers: Workers) -> None:
        """Give the engines their first weights, then run the loop."""
        config, progress, schedule = parts.config, self.session.progress, parts.schedule
        if workers.rollout is not None and workers.trainer is not None:
            receivers = await workers.rollout.call("the number of engines", RolloutActor.num_receivers).in_time(
                CLOSE_SECONDS
            )
            await workers.trainer.connect(_transport(config, workers.places, receivers, parts.out.folder.path))
        await parts.publish(schedule.start_rollout_id)
        progress.start(schedule.num_rollout, schedule.start_rollout_id)
        lease: Lease = parts if config.cluster.colocate else FreeLease()
        with stops_on_signals(self.stop, progress.note):
            self.finished_after = await train_loop(parts, lease, schedule, self.stop)

    async def _load(self, workers: Workers) -> Schedule | None:
        """Have the workers load what they need and go to where the checkpoint was taken, side by side; None if nothing is
        left to do."""
        session, checkpoint = self.session, self.session.checkpoint
        seconds = session.config.cluster.worker_start_timeout_seconds
        num_prompts = None
        if workers.rollout is not None:
            num_prompts = await workers.rollout.call("loading the data", RolloutActor.load).in_time(seconds)
        schedule = schedule_of(session, num_prompts)
        if self.outputs is None and is_finished(session, schedule):
            return None
        waits = []
        if workers.trainer is not None:
            waits.append(workers.trainer.build(schedule.num_rollout, checkpoint))
        if workers.rollout is not None:
            waits.append(workers.rollout.call("starting the engines", RolloutActor.open).in_time(seconds))
            what = "finding its place in the data"
            if checkpoint is not None:
                call = workers.rollout.call(what, RolloutActor.load_state, dict(checkpoint.state))
            else:
                call = workers.rollout.call(what, RolloutActor.skip, session.start_rollout_id)
            waits.append(call.in_time(seconds))
        await asyncio.gather(*waits)
        if checkpoint is not None:
            session.progress.note(f"resuming at rollout {checkpoint.rollout_id} from {checkpoint.path}")
        return schedule


def _start_workers(session: Session, places: Places, teacher: str | None) -> Workers:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    config = session.config
    path = session.model_path
    if config.debug.debug_rollout_only and session.checkpoint is not None:  # no trainer that would load it
        path = str(session.checkpoint.path / "model")
    setup = WorkerSetup.here(config, path, session.max_prompt)
    rollout: Worker[RolloutActor] | None = None
    trainer = None
    if places.engines:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options = {"num_cpus": 0, "scheduling_strategy": here, "max_concurrency": MANY_CALLS, "max_restarts": 0}
        rollout = Worker("rollout worker", ray.remote(RolloutActor).options(**options).remote(setup, places))
    if places.train:
        trainer = TrainGroup(setup, places, teacher, session.progress.warn)
    return Workers(places, rollout, trainer)


def _transport(config: Config, places: Places, receivers: int, folder: Path) -> TransportPlan:
    """The transport of this run; `auto` is shared memory on one node, else a broadcast."""
    cluster = config.cluster
    name: str = cluster.weight_transport
    if name == "auto":
        name = "shm" if places.on_one_node else "broadcast"
    folder = folder / "weights" if cluster.weight_folder is None else Path(cluster.weight_folder)
    nccl = places.uses_gpus and not cluster.colocate
    elsewhere = config.engine.rollout_external_engine_addrs or not places.on_one_node
    host = places.train[0].node_ip if elsewhere else "127.0.0.1"
    name = transport_name(config, name)
    return TransportPlan(name, receivers, folder.absolute(), host=host, backend="nccl" if nccl else "gloo")


async def _end(workers: Workers) -> None:
    """Let the workers end what they hold, all at once, then end them."""
    ends: list[Call[None]] = []
    if workers.rollout is not None:
        ends.append(workers.rollout.call("its end", RolloutActor.close))
    if workers.trainer is not None:
        ends += [worker.call("its end", RankActor.close) for worker in workers.trainer.workers]
    waits = [call.value(CLOSE_SECONDS) for call in ends]
    await asyncio.gather(*waits, return_exceptions=True)  # one of them may be lost already
    for worker in workers.all:
        worker.kill()
