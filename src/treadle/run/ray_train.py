"""The workers that train: one process for each rank, and the group of them that the driver sees.

The driver plans a rollout and puts each rank's share into the object store once; ranks exchange gradients among
themselves. The first rank sends the weights and makes the checkpoints, to which all of them write.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from treadle.chat import load_codec
from treadle.config import batch_arithmetic
from treadle.errors import DeadlineError, RankError, WorkerLostError
from treadle.metrics import Metric, metric
from treadle.models.load import pick_device
from treadle.run import build
from treadle.run.notes import Note, Notes
from treadle.run.placement import Places, worker_options
from treadle.run.ray_calls import settle
from treadle.run.state import random_state, seed_everything, set_random_state
from treadle.run.worker_setup import WorkerSetup, enter_worker
from treadle.training.checkpoint import Checkpoint, find_checkpoint, save_checkpoint
from treadle.training.parallel import ParallelSpec, build_grid
from treadle.training.plan import Planner, RankShare
from treadle.training.ranks import join_ranks, leave_ranks
from treadle.types import Group
from treadle.weights import SentWeights, WeightSender
from treadle.weights.named import TransportPlan, open_sender

GIB = 2**30
LOSS_SECONDS = 3.0
"""Once a rank has failed, how long the others may take to say so: the one that died is the cause."""


@dataclass(frozen=True)
class Meeting:
    """Where the ranks meet: an address of the first rank, as the others reach it."""

    rank: int
    address: str
    port: int


@dataclass(frozen=True)
class Trained:
    """What a rank says of a rollout: metrics, and notes to show."""

    metrics: Sequence[Metric]
    notes: list[Note]


class TrainActor:
    """The trainer of one rank in a process of its own. Calls are done one after the other."""

    def __init__(self, setup: WorkerSetup, teacher_path: str | None):
        enter_worker(setup)
        self._setup, self._config, self._teacher_path = setup, setup.config, teacher_path
        self._notes = Notes()
        self._sender: WeightSender | None = None
        self._whole: dict[str, torch.Tensor] = {}  # of a sharded model, on the first rank
        self._peak_gib = 0.0
        self._saves = 0
        seed_everything(setup.config.train.seed)

    def free_port(self, address: str) -> int:
        """A port of this machine that nobody listens on."""
        with socket.socket() as probe:
            probe.bind((address, 0))
            return int(probe.getsockname()[1])

    def build(self, meeting: Meeting, num_rollout: int, checkpoint: str | None) -> int:
        """Join the ranks and load model, reference, critic and teacher, then the checkpoint; which share is this rank's."""
        config = self._config
        spec = ParallelSpec.of(config, config.cluster.num_train_workers)
        device = pick_device(config.model.device)
        if spec.num_ranks > 1:
            seconds, port = spec.timeout_seconds, meeting.port
            join_ranks(
                meeting.rank, spec.num_ranks, port=port, device=device, timeout_seconds=seconds, address=meeting.address
            )
        grid = build_grid(spec, device)
        model = build.load_on_ranks(config, self._setup.model_path, grid)
        self._trainer = build.build_trainer(config, model, num_rollout, self._notes, self._teacher_path)
        if checkpoint is not None:
            found = find_checkpoint(Path(checkpoint), self._notes.warn)
            self._trainer.load(found)
            set_random_state(found.state["random"])
        return grid.data.rank

    def train(self, share: RankShare, rollout_id: int) -> Trained:
        """The rollout's optimizer steps on this rank's share."""
        metrics = self._trainer.train_share(share, rollout_id)
        return Trained([*metrics, *self._memory()], self._notes.take())

    def save(self, folder: Path, done: int, state: dict[str, Any]) -> None:
        """Write a checkpoint with all ranks; `state` is what the other parts of the run need to resume."""
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

        def write_model(path: Path) -> None:
            told.tell("model", path)
            trainer.write_model(path)
            load_codec(self._setup.model_path).save(path)

        def write_rest(path: Path) -> None:
            told.tell("rest", path)
            trainer.write_rest(path)

        own = {**trainer.state(), "random": random_state(), "dtype": self._config.model.dtype}
        try:
            save_checkpoint(
                folder,
                done,
                write_model=write_model,
                write_rest=write_rest,
                optimizer=None if trainer.policy.is_sharded else trainer.optimizer.state_tensors(),
                state={**own, **state},
                config=self._config.model_dump(mode="json"),
                keep=self._config.checkpoint.keep_checkpoints,
            )
        finally:
            told.end()

    # Weights

    def connect(self, plan: TransportPlan) -> None:
        """Open the sending end, on the first rank. Of a sharded model it holds a whole copy in host memory."""
        trainer = self._trainer
        if trainer.policy.is_sharded:
            specs = trainer.weight_specs()
            self._whole = {name: torch.empty(spec.shape, dtype=spec.dtype) for name, spec in specs.items()}
        tensors = self._whole or dict(trainer.model.named_parameters())
        self._sender = open_sender(plan, SentWeights(tensors))

    def offer(self, version: int) -> dict[str, Any] | None:
        """Make the weights of now ready; what the engines are to be told, from the first rank. All ranks call this."""
        if self._trainer.policy.is_sharded:
            for name, weight in self._trainer.full_parameters():
                if self._whole:
                    self._whole[name].copy_(weight)
        return None if self._sender is None else self._sender.offer(version).to_json()

    def deliver(self) -> None:
        """Take part in the exchange, where the transport needs it."""
        assert self._sender is not None, "connect first"
        self._sender.deliver()

    # Memory

    def sleep(self) -> None:
        """Move weights and optimizer off the device; nothing to do on a CPU."""
        self._trainer.sleep()

    def wake(self) -> None:
        self._trainer.wake()

    def _memory(self) -> list[Metric]:
        if self._trainer.device.type == "cuda":
            now, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        else:
            now = peak = psutil.Process().memory_info().rss
        self._peak_gib = max(self._peak_gib, peak / GIB)
        own = [metric("perf/memory_gib", now / GIB)] if self._trainer.policy.grid.is_first else []
        return [*own, metric("perf/peak_memory_gib", self._peak_gib)]

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None
        leave_ranks()


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
    """All ranks, as the driver uses them. A rank that dies or is late is a `WorkerLostError`: the run can be resumed."""

    def __init__(self, setup: WorkerSetup, places: Places, teacher_path: str | None, warn: Callable[[str], None]):
        import ray

        self._config, self._places = setup.config, places
        self._seconds = setup.config.cluster.train_timeout_seconds
        shares = setup.config.cluster.colocate
        self.actors = [
            ray.remote(TrainActor)
            .options(**worker_options(setup.config, places, bundle, shares=shares))
            .remote(setup, teacher_path)
            for bundle in places.train
        ]
        spec = ParallelSpec.of(setup.config, len(self.actors))
        self._planner = Planner(setup.config, batch_arithmetic(setup.config), spec.num_data_ranks, warn)
        self._data_ranks: list[int] = []

    async def build(self, num_rollout: int, checkpoint: Checkpoint | None) -> None:
        """Have all ranks meet, load their models and go to where the checkpoint was taken."""
        seconds = self._config.cluster.worker_start_timeout_seconds
        address = self._places.train[0].node_ip
        port = await self._one("the first train worker to start", self.actors[0].free_port.remote(address), seconds)
        path = None if checkpoint is None else str(checkpoint.path)
        refs = [
            actor.build.remote(Meeting(rank, address, port), num_rollout, path)
            for rank, actor in enumerate(self.actors)
        ]
        self._data_ranks = await self._all("the start", refs, seconds)
        if checkpoint is not None:
            self._planner.load_state(dict(checkpoint.state))

    async def train(self, groups: Sequence[Group], rollout_id: int) -> Trained:
        """Take the optimizer steps of one rollout; the metrics of all ranks."""
        import ray

        shares = [ray.put(share) for share in await asyncio.to_thread(self._planner.plan, groups)]
        refs = [
            actor.train.remote(shares[share], rollout_id)
            for actor, share in zip(self.actors, self._data_ranks, strict=True)
        ]
        trained: list[Trained] = await self._all(f"training of rollout {rollout_id}", refs)
        return Trained([m for part in trained for m in part.metrics], [n for part in trained for n in part.notes])

    async def save(self, folder: Path, done: int, state: dict[str, Any]) -> None:
        """Write a checkpoint; raises `CheckpointError` where that fails and training can go on."""
        whole = {**self._planner.state(), **state}
        await self._all(f"the save after {done} rollouts", [a.save.remote(folder, done, whole) for a in self.actors])

    async def connect(self, plan: TransportPlan) -> None:
        await self._one("the sending end of the weights", self.actors[0].connect.remote(plan))

    async def offer(self, version: int) -> dict[str, Any]:
        """Make the weights of now ready; the offer for the engines."""
        offers = await self._all(f"the offer of version {version}", [a.offer.remote(version) for a in self.actors])
        return offers[0]

    async def deliver(self, version: int) -> None:
        await self._one(f"the delivery of version {version}", self.actors[0].deliver.remote())

    async def sleep(self) -> None:
        await self._all("sleep", [actor.sleep.remote() for actor in self.actors])

    async def wake(self) -> None:
        await self._all("wake", [actor.wake.remote() for actor in self.actors])

    async def _one(self, what: str, ref: Any, seconds: float | None = None) -> Any:
        return (await self._all(what, [ref], seconds))[0]

    async def _all(self, what: str, refs: Sequence[Any], seconds: float | None = None) -> list[Any]:
        """The values of all ranks' calls. Of several errors the one that names a dead rank is raised."""
        many = len(refs) > 1
        names = [f"train worker{f' {rank}' if many else ''}: {what}" for rank in range(len(refs))]
        calls: list[Coroutine[Any, Any, Any]] = [
            settle(ref, name, seconds or self._seconds) for ref, name in zip(refs, names, strict=True)
        ]
        tasks = [asyncio.create_task(call) for call in calls]
        try:
            _, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if waiting:
                await asyncio.wait(waiting, timeout=LOSS_SECONDS)
            errors = [e for task in tasks if task.done() and (e := task.exception()) is not None]
            if not errors:
                return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        error = next((e for e in errors if isinstance(e, WorkerLostError)), errors[0])
        if isinstance(error, RankError | DeadlineError):
            raise WorkerLostError(str(error)) from error
        raise error
