"""The workers that train the policy: one process for each rank, and the group of them that the driver sees.

The driver plans a rollout and puts each rank's share into the object store once; ranks exchange gradients among
themselves. The first rank sends the weights and makes the checkpoints, to which all of them write. A critic with workers
of its own trains beside them: values and returns go from rank to rank through the object store.
"""

from __future__ import annotations

import asyncio
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from treadle.chat import load_codec
from treadle.config import batch_arithmetic
from treadle.metrics import Metric, metric
from treadle.observe.progress import Progress
from treadle.run import build
from treadle.run.ray.calls import Call, all_in_time
from treadle.run.ray.critic_workers import CriticActor
from treadle.run.ray.placement import Places
from treadle.run.ray.rank_workers import RankActor, RankGroup, Rendezvous, Trained
from treadle.run.ray.worker import BusyWorker, WorkerSetup, show_notes
from treadle.run.resume import save_trainer
from treadle.training.checkpoint import Checkpoint
from treadle.training.rollout_plan import Planner, RankShare, TokenNumbers, numbers_at
from treadle.training.trainer import Rollout
from treadle.types import Group
from treadle.weights import Offer, SentWeights, TransportPlan, WeightSender, open_sender


class TrainActor(RankActor):
    """The trainer of one rank in a process of its own."""

    def __init__(self, setup: WorkerSetup, teacher_path: str | None):
        super().__init__(setup)
        self._teacher_path = teacher_path
        self._sender: WeightSender | None = None
        self._whole: dict[str, torch.Tensor] = {}  # of a sharded model, on the first rank
        self._saves = 0
        self._rollout: Rollout | None = None  # where it is trained in parts

    def build(self, group: Rendezvous, num_rollout: int, checkpoint: str | None) -> int:
        """Join the ranks and load all models, then the checkpoint; return which share is this rank's."""
        config = self._config
        grid = self._join(group)
        model = build.load_on_ranks(config, self._setup.model_path, grid)
        elsewhere = config.cluster.num_critic_workers > 0
        self._trainer = build.build_trainer(
            config, model, num_rollout, self._notes.warn, self._teacher_path, critic_elsewhere=elsewhere
        )
        if grid.is_first:
            self._trainer.try_writing(load_codec(self._setup.model_path).save)
        if checkpoint is not None:
            self._trainer.load(self._found(checkpoint))
        return grid.data.rank

    def train(self, share: RankShare, rollout_id: int) -> Trained:
        """The rollout's optimizer steps on this rank's share."""
        return self._trained(self._trainer.train_share(share, rollout_id))

    # The same in parts, with a critic elsewhere

    def score(self, share: RankShare) -> None:
        """What the models of this group say of the share's samples."""
        self._rollout = self._trainer.score(share)

    def spread(self, *values: TokenNumbers) -> TokenNumbers:
        """Advantages, with the critic's values; the returns of the share's samples."""
        assert self._rollout is not None, "scores come first"
        places = self._rollout.share.places
        batch = replace(self._rollout.batch, values=numbers_at(places, values))
        self._rollout = self._trainer.spread(replace(self._rollout, batch=batch))
        returns = self._rollout.batch.returns
        assert returns is not None
        return TokenNumbers(places, batch.lengths, returns)

    def take_steps(self, rollout_id: int) -> Trained:
        """The rollout's optimizer steps on the scored share."""
        assert self._rollout is not None, "advantages come first"
        rollout, self._rollout = self._rollout, None
        return self._trained(self._trainer.take_steps(rollout, rollout_id))

    def _trained(self, metrics: Sequence[Any]) -> Trained:
        memory = self._memory(reports_current=self._trainer.policy.grid.is_first)
        return Trained([*metrics, *memory], self._notes.take())

    def save(self, folder: Path, done: int, state: dict[str, Any], critic: Path | None) -> None:
        """Write a checkpoint with all ranks; `state` is what the other parts of the run need to resume, `critic` where
        the critic's part of it was written, which the first rank moves to its place."""
        trainer, world = self._trainer, self._trainer.policy.grid.world
        self._saves += 1
        told = _Told(f"save-{self._saves}", is_alone=world.is_alone)
        if world.rank > 0:
            for what, write in (("model", trainer.write_model), ("rest", trainer.write_rest)):
                path = told.hear(what)
                if path is None:
                    return  # the first rank gave up, and says why
                write(path)
            return

        try:
            save_codec = load_codec(self._setup.model_path).save
            save_trainer(trainer, save_codec, folder, done, state, announce=told.tell, critic=critic)
        finally:
            told.end()
            if critic is not None:
                shutil.rmtree(critic, ignore_errors=True)  # there is none where it was moved

    # Weights

    def connect(self, plan: TransportPlan) -> None:
        """Open the sending end, on the first rank. Of a sharded model it holds a whole copy in host memory."""
        trainer = self._trainer
        if trainer.policy.is_sharded:
            specs = trainer.weight_specs()
            self._whole = {name: torch.empty(spec.shape, dtype=spec.dtype) for name, spec in specs.items()}
        tensors = self._whole or trainer.published()
        self._sender = open_sender(plan, SentWeights(tensors))

    def offer(self, version: int) -> Offer | None:
        """Make the current weights ready; return the offer for the engines on the first rank. All ranks call this."""
        if self._trainer.policy.is_sharded:
            for name, weight in self._trainer.full_parameters():
                if self._whole:
                    self._whole[name].copy_(weight)
        return None if self._sender is None else self._sender.offer(version)

    def deliver(self) -> None:
        """Do the sender's part, on the first rank."""
        assert self._sender is not None, "connect first"
        self._sender.deliver()

    # Memory

    def sleep(self) -> float:
        """Move weights and optimizer off the device, nothing on a CPU; the most memory of the turn that ends, in GiB."""
        return self._end_turn(self._trainer.sleep)

    def wake(self) -> float:
        return self._end_turn(self._trainer.wake)

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None
        super().close()


class _Told:
    """What the first rank tells the others during a save: the folder of each part, or that it gave up."""

    def __init__(self, name: str, *, is_alone: bool):
        self._name, self._store = name, None if is_alone else dist.distributed_c10d._get_default_store()
        self._left = ["model", "rest"]

    def tell(self, what: str, path: Path) -> None:
        if self._store is not None:
            self._store.set(f"{self._name}-{what}", str(path))
        self._left.remove(what)

    def hear(self, what: str) -> Path | None:
        """The folder, or None where there will be none; waits as long as the ranks' deadline."""
        assert self._store is not None
        text = self._store.get(f"{self._name}-{what}").decode()
        return Path(text) if text else None

    def end(self) -> None:
        """Nobody waits for what was not told."""
        for what in self._left:
            if self._store is not None:
                self._store.set(f"{self._name}-{what}", "")
        self._left = []


class TrainGroup:
    """All ranks of the policy, and of a critic of its own if there is one. A rank that dies or is late raises
    `WorkerLostError`: the run can be resumed."""

    def __init__(
        self, setup: WorkerSetup, places: Places, teacher_path: str | None, progress: Progress, turns: list[Metric]
    ):
        self.weights = asyncio.Lock()  # held while the weights change or are sent
        self.is_ahead = False  # of what was published: from the start of a training step to its publish
        self._progress, self._turns, self._asleep = progress, turns, False
        self._seconds = setup.config.cluster.train_timeout_seconds
        self._policy = RankGroup(TrainActor, "train worker", setup, places, places.train, teacher_path)
        self._critic = RankGroup(CriticActor, "critic worker", setup, places, places.critic) if places.critic else None
        num_shares = self._policy.spec.num_data_ranks
        self._planner = Planner(setup.config, batch_arithmetic(setup.config), num_shares, progress.warn)

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
        """Take the optimizer steps of one rollout; return the metrics of all ranks, and show their notes."""
        async with self.weights:
            self.is_ahead = True
            trained = await self._train(rollout_id, groups)
        show_notes([note for part in trained for note in part.notes], self._progress)
        return [found for part in trained for found in part.metrics]

    async def _train(self, rollout_id: int, groups: Sequence[Group]) -> list[Trained]:
        planned = await asyncio.to_thread(self._planner.prepare, groups)
        shares = await asyncio.to_thread(self._planner.deal, planned, self._policy.spec.num_data_ranks)
        what = f"training of rollout {rollout_id}"
        if self._critic is None:
            calls = self._policy.call_with_shares(what, TrainActor.train, shares, rollout_id)
            return await all_in_time(calls, self._seconds)
        dealt = await asyncio.to_thread(self._planner.deal, planned, self._critic.spec.num_data_ranks)
        return await self._train_both(self._critic, shares, dealt, rollout_id)

    async def _train_both(
        self, critic: RankGroup[CriticActor], shares: Sequence[RankShare], dealt: Sequence[RankShare], rollout_id: int
    ) -> list[Trained]:
        """Exchange values and returns, then take the steps of both groups at the same time.

        All calls are made at once: Ray starts each when the results it needs have come from the other group.
        """
        what, policy = f"training of rollout {rollout_id}", self._policy
        scored = policy.call_with_shares(f"scores for {what}", TrainActor.score, shares)
        values = critic.call_with_shares(f"values for {what}", CriticActor.values, dealt)
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

    async def connect(self, plan: TransportPlan) -> None:
        """Open the sending end of the weights, on the first rank."""
        await self._first.call("the sending end of the weights", TrainActor.connect, plan).in_time(self._seconds)

    async def offer(self, version: int) -> Offer:
        """Make the current weights ready; return the offer for the engines."""
        calls = self._policy.call(f"the offer of version {version}", TrainActor.offer, version)
        offer = (await all_in_time(calls, self._seconds))[0]
        assert offer is not None, "the first rank sends"
        return offer

    async def deliver(self, version: int) -> None:
        """Take part in the transfer of the weights, where the transport needs the trainer to."""
        await self._first.call(f"the delivery of version {version}", TrainActor.deliver).in_time(self._seconds)

    @property
    def _first(self) -> BusyWorker[TrainActor]:
        return self._policy.workers[0]

    async def sleep(self) -> None:
        """Free the devices' memory; nothing if the ranks sleep."""
        if not self._asleep:
            calls = self._policy.call("sleep", TrainActor.sleep)
            calls += [] if self._critic is None else self._critic.call("sleep", CriticActor.sleep)
            peaks = await all_in_time(calls, self._seconds)
            self._turns += [metric("perf/train_awake_gib", gib) for gib in peaks]
            self._asleep = True

    async def wake(self) -> None:
        """Inverse of `sleep`; nothing if the ranks are awake."""
        if self._asleep:
            calls = self._policy.call("wake", TrainActor.wake)
            calls += [] if self._critic is None else self._critic.call("wake", CriticActor.wake)
            peaks = await all_in_time(calls, self._seconds)
            self._turns += [metric("perf/train_asleep_gib", gib) for gib in peaks]
            self._asleep = False
