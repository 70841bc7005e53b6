"""The ranks that train, as the driver calls them.

The driver plans a rollout and puts each rank's share into the object store once.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from treadle.config import batch_arithmetic
from treadle.metrics import Metric, metric
from treadle.observe.progress import Progress
from treadle.run.ray.placement import Bundle, Places, worker_options
from treadle.run.ray.train_workers import CriticActor, RankActor, Rendezvous, TrainActor, Trained
from treadle.run.ray.worker import HEALTH_CHECKS, BusyWorker, Call, WorkerSetup, all_in_time, show_warnings
from treadle.training.checkpoint import Checkpoint
from treadle.training.parallel import ParallelSpec
from treadle.training.rollout_plan import Planner, RankShare
from treadle.types import Group
from treadle.weights import Offer, TransportPlan

Given = ParamSpec("Given")
Result = TypeVar("Result")
Rank = TypeVar("Rank", bound=RankActor)


class RankGroup(Generic[Rank]):
    """All ranks of one model."""

    def __init__(
        self, kind: type[Rank], name: str, setup: WorkerSetup, places: Places, bundles: Sequence[Bundle], *args: Any
    ):
        import ray

        config = setup.config
        self.num_shares = ParallelSpec.of(config, len(bundles)).num_data_ranks
        self._bundles, self._start_seconds = bundles, config.cluster.worker_start_timeout_seconds
        self._data_ranks: list[int] = []  # which share of the samples each rank has
        remote: Any = ray.remote  # its types know no concurrency groups
        actor = remote(concurrency_groups=HEALTH_CHECKS)(kind)
        self.workers: list[BusyWorker[Rank]] = []
        for rank, bundle in enumerate(bundles):
            options = worker_options(config, places, bundle, shares=config.cluster.colocate)
            handle = actor.options(**options).remote(setup, *args)
            self.workers.append(BusyWorker(name if len(bundles) == 1 else f"{name} {rank}", handle))

    async def build(
        self,
        method: Callable[[Rank, Rendezvous, int, str | None], int],
        num_rollout: int,
        checkpoint: Checkpoint | None,
    ) -> None:
        """Have all ranks join, load their models with this method and go to where the checkpoint was taken."""
        address, seconds = self._bundles[0].node_ip, self._start_seconds
        on_one_node = len({bundle.node_ip for bundle in self._bundles}) == 1
        call = self.workers[0].call("start", RankActor.rendezvous, address, on_one_node=on_one_node)
        at, size = await call.in_time(seconds), len(self.workers)
        path = None if checkpoint is None else str(checkpoint.path)
        calls = [
            worker.call("loading the models", method, Rendezvous(rank, size, address, at), num_rollout, path)
            for rank, worker in enumerate(self.workers)
        ]
        self._data_ranks = await all_in_time(calls, seconds)

    def call(
        self, what: str, method: Callable[Concatenate[Rank, Given], Result], *args: Given.args, **kwargs: Given.kwargs
    ) -> list[Call[Result]]:
        """Start the same call on all ranks."""
        return [worker.call(what, method, *args, **kwargs) for worker in self.workers]

    def call_with_shares(
        self,
        what: str,
        method: Callable[Concatenate[Rank, RankShare, Given], Result],
        shares: Sequence[RankShare],
        *args: Given.args,
        **kwargs: Given.kwargs,
    ) -> list[Call[Result]]:
        """Start the same call on all ranks, each with its share, of which the object store holds one copy."""
        import ray

        refs: list[Any] = [ray.put(share) for share in shares]
        return [
            worker.call(what, method, refs[data_rank], *args, **kwargs)
            for worker, data_rank in zip(self.workers, self._data_ranks, strict=True)
        ]

    def one_of_each_share(self, calls: Sequence[Call[Result]]) -> list[Any]:
        """Return references to the results of one rank for each share."""
        return list(dict(zip(self._data_ranks, (call.ref for call in calls), strict=True)).values())


class TrainGroup:
    """All ranks of the policy, and of a critic with workers of its own if there is one.

    A rank that dies or is late raises `WorkerLostError`: the run can be resumed.
    """

    def __init__(
        self, setup: WorkerSetup, places: Places, teacher_path: str | None, progress: Progress, turns: list[Metric]
    ):
        self.weights = asyncio.Lock()  # held while the weights change or are sent
        self.is_ahead = False  # of what was published: from the start of a training step to its publish
        self._progress, self._turns, self._asleep = progress, turns, False
        self._seconds = setup.config.cluster.train_timeout_seconds
        self._policy = RankGroup(TrainActor, "train worker", setup, places, places.train, teacher_path)
        self._critic = RankGroup(CriticActor, "critic worker", setup, places, places.critic) if places.critic else None
        arithmetic = batch_arithmetic(setup.config)
        self._planner = Planner(setup.config, arithmetic, self._policy.num_shares, progress.warn)

    @property
    def workers(self) -> list[BusyWorker[Any]]:
        """The workers of all ranks."""
        return [*self._policy.workers, *([] if self._critic is None else self._critic.workers)]

    async def build(self, num_rollout: int, checkpoint: Checkpoint | None) -> None:
        """Have all ranks join, load their models and go to where the checkpoint was taken."""
        waits = [self._policy.build(TrainActor.build, num_rollout, checkpoint)]
        if self._critic is not None:
            waits.append(self._critic.build(CriticActor.build, num_rollout, checkpoint))
        await asyncio.gather(*waits)
        if checkpoint is not None:
            self._planner.load_state(dict(checkpoint.state))

    async def train(self, rollout_id: int, groups: Sequence[Group]) -> list[Metric]:
        """Take the optimizer steps of one rollout; return the metrics of all ranks, and show their warnings."""
        async with self.weights:
            self.is_ahead = True
            trained = await self._train(f"training of rollout {rollout_id}", rollout_id, groups)
        show_warnings([text for part in trained for text in part.warnings], self._progress)
        return [found for part in trained for found in part.metrics]

    async def _train(self, what: str, rollout_id: int, groups: Sequence[Group]) -> list[Trained]:
        """Take the steps. With a critic of its own, values and returns are exchanged before both groups take theirs.

        All calls are made at once: Ray starts each when the results it needs have come from the other group.
        """
        planner, policy, critic = self._planner, self._policy, self._critic
        planned = await asyncio.to_thread(planner.prepare, groups)
        shares = await asyncio.to_thread(planner.deal, planned, policy.num_shares)
        if critic is None:
            calls = policy.call_with_shares(what, TrainActor.train, shares, rollout_id)
            return await all_in_time(calls, self._seconds)
        critic_shares = await asyncio.to_thread(planner.deal, planned, critic.num_shares)
        scored = policy.call_with_shares(f"scores for {what}", TrainActor.score, shares)
        values = critic.call_with_shares(f"values for {what}", CriticActor.values, critic_shares)
        returns = policy.call(f"advantages for {what}", TrainActor.spread, *critic.one_of_each_share(values))
        steps = policy.call(what, TrainActor.take_steps, rollout_id)
        steps += critic.call(what, CriticActor.train, rollout_id, *policy.one_of_each_share(returns))
        first: list[Call[Any]] = [*scored, *values, *returns]
        return (await all_in_time([*first, *steps], self._seconds))[len(first) :]

    async def save(self, folder: Path, done: int, state: Mapping[str, Any]) -> None:
        """Write a checkpoint; raises `CheckpointError` if that fails and training can go on."""
        whole, part = {**self._planner.state(), **state}, None
        if self._critic is not None:
            name = f"{done:06d}_{uuid.uuid4().hex[:8]}"
            written = self._critic.call("its part of a save", CriticActor.write, folder.absolute(), name)
            part, whole["critic_steps"] = (await all_in_time(written, self._seconds))[0]
        calls = self._policy.call(f"the save after {done} rollouts", TrainActor.save, folder, done, whole, part)
        await all_in_time(calls, self._seconds)

    # Weights

    async def connect(self, plan: TransportPlan) -> None:
        """Open the sending end of the weights, on the first rank."""
        call = self._policy.workers[0].call("the sending end of the weights", TrainActor.connect, plan)
        await call.in_time(self._seconds)

    async def offer(self, version: int) -> Offer:
        """Make the current weights ready; return the offer for the engines."""
        calls = self._policy.call(f"the offer of version {version}", TrainActor.offer, version)
        offer = (await all_in_time(calls, self._seconds))[0]
        assert offer is not None, "the first rank sends"
        return offer

    async def deliver(self, version: int) -> None:
        """Take part in the transfer of the weights if the transport needs the trainer to."""
        call = self._policy.workers[0].call(f"the delivery of version {version}", TrainActor.deliver)
        await call.in_time(self._seconds)

    # Memory

    async def sleep(self) -> None:
        """Free the devices' memory; do nothing if the ranks sleep."""
        if not self._asleep:
            peaks = await self._end_turn("sleep", RankActor.sleep)
            self._turns += [metric("perf/train_awake_gib", gib) for gib in peaks]

    async def wake(self) -> None:
        """Restore what `sleep` freed; do nothing if the ranks are awake."""
        if self._asleep:
            peaks = await self._end_turn("wake", RankActor.wake)
            self._turns += [metric("perf/train_asleep_gib", gib) for gib in peaks]

    async def _end_turn(self, what: str, method: Callable[[RankActor], float]) -> list[float]:
        """Call all ranks; return the peak memory of each in the turn that ends, in GiB."""
        peaks = await all_in_time([worker.call(what, method) for worker in self.workers], self._seconds)
        self._asleep = not self._asleep
        return peaks
