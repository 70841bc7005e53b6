"""Ranks as workers: what the processes of the policy and of a critic of its own have in common, and groups of them."""

from __future__ import annotations

import asyncio
import shutil
import socket
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from treadle.errors import DeadlineError, RankError, WorkerLostError
from treadle.metrics import Metric
from treadle.models.load import pick_device
from treadle.run.memory import PeakMemory
from treadle.run.notes import Note, Notes
from treadle.run.ray.calls import LOSS_SECONDS, settle
from treadle.run.ray.health import Watched
from treadle.run.ray.placement import Bundle, Places, worker_options
from treadle.run.ray.worker_setup import WorkerSetup, enter_worker
from treadle.run.state import seed_everything, set_random_state
from treadle.training.checkpoint import Checkpoint, find_checkpoint
from treadle.training.parallel import Grid, ParallelSpec, build_grid
from treadle.training.ranks import join_ranks, leave_ranks

HEALTH_CHECKS = {"health checks": 1}
"""The group of calls that don't wait for the one that a rank is busy with, and how many of them there are at once."""


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of a group meet: an address of the first one, as the others reach it, and a file or a port there."""

    rank: int
    size: int
    address: str
    at: Path | int


@dataclass(frozen=True)
class Trained:
    """What a rank says of a rollout: metrics, and notes to show."""

    metrics: Sequence[Metric]
    notes: list[Note]


class RankActor:
    """A rank in a process of its own. Calls run one after the other, except health checks."""

    def __init__(self, setup: WorkerSetup):
        enter_worker(setup)
        self._setup, self._config = setup, setup.config
        self._notes = Notes()
        self._meeting_folder: Path | None = None
        self._peak_memory = PeakMemory()
        seed_everything(setup.config.train.seed)

    def meeting_point(self, address: str, *, on_one_node: bool) -> Path | int:
        """Return where the ranks can find each other.

        On one node that is a file in a new folder of this user alone; else a port that nobody listens on.
        """
        if on_one_node:
            self._meeting_folder = Path(tempfile.mkdtemp(prefix="treadle-ranks-"))
            return self._meeting_folder / "store"
        with socket.socket() as probe:
            probe.bind((address, 0))
            return int(probe.getsockname()[1])

    def alive(self) -> None:
        """Answer a health check, also while another call runs."""

    def close(self) -> None:
        leave_ranks()
        if self._meeting_folder is not None:
            shutil.rmtree(self._meeting_folder, ignore_errors=True)

    def _meet(self, meeting: Meeting) -> Grid:
        spec = ParallelSpec.of(self._config, meeting.size)
        device = pick_device(self._config.model.device)
        if spec.num_ranks > 1:
            seconds, at = spec.timeout_seconds, meeting.at
            join_ranks(
                meeting.rank, spec.num_ranks, at=at, device=device, timeout_seconds=seconds, address=meeting.address
            )
        return build_grid(spec, device)

    def _found(self, checkpoint: str) -> Checkpoint:
        """The checkpoint to start from; random numbers go on where it was taken."""
        found = find_checkpoint(Path(checkpoint), self._notes.warn)
        set_random_state(found.entry("random", dict))
        return found

    def _turn_ends(self, device: torch.device, move: Callable[[], object]) -> float:
        """Have `move` free memory for others or take it back; the most of the turn before, in GiB. The move itself
        counts for neither turn."""
        most = self._peak_memory.turn(device.type)
        move()
        self._peak_memory.turn(device.type)
        return most

    def _memory(self, device: torch.device, *, speaks: bool) -> list[Metric]:
        """The most memory this process had; the one that `speaks` says what it is now, too."""
        now, peak = self._peak_memory.metrics(device.type)
        return [now, peak] if speaks else [peak]


@dataclass(frozen=True, eq=False)
class Call:
    """A remote call in flight, and what to say where it fails."""

    what: str
    ref: Any


def ask_alive(actor: Any) -> Callable[[], Any]:
    """Return the call that checks the health of a rank."""
    (group,) = HEALTH_CHECKS
    ask: Callable[[], Any] = actor.alive.options(concurrency_group=group).remote
    return ask


class RankGroup:
    """All ranks of one model, as the driver uses them."""

    def __init__(self, kind: type[RankActor], name: str, setup: WorkerSetup, places: Places, *args: Any):
        import ray

        self.name, self.config, self.bundles = name, setup.config, self._bundles(places)
        self.spec = ParallelSpec.of(setup.config, len(self.bundles))
        shares = setup.config.cluster.colocate
        actor = ray.remote(concurrency_groups=HEALTH_CHECKS)(kind)
        self.actors = [
            actor.options(**worker_options(setup.config, places, bundle, shares=shares)).remote(setup, *args)
            for bundle in self.bundles
        ]
        self._data_ranks: list[int] = []

    def _bundles(self, places: Places) -> tuple[Bundle, ...]:
        raise NotImplementedError

    async def build(self, num_rollout: int, checkpoint: Checkpoint | None) -> None:
        """Have all ranks meet, load their models and go to where the checkpoint was taken."""
        seconds = self.config.cluster.worker_start_timeout_seconds
        address = self.bundles[0].node_ip
        on_one_node = len({bundle.node_ip for bundle in self.bundles}) == 1
        point = self.actors[0].meeting_point.remote(address, on_one_node=on_one_node)
        (at,) = await all_of([Call(f"{self.name}: the first one to start", point)], seconds)
        path = None if checkpoint is None else str(checkpoint.path)
        size = len(self.actors)
        refs = [
            actor.build.remote(Meeting(rank, size, address, at), num_rollout, path)
            for rank, actor in enumerate(self.actors)
        ]
        self._data_ranks = await all_of(self.calls("the start", refs), seconds)

    def put(self, shares: Sequence[Any]) -> list[Any]:
        """One reference for each rank, to the share of its samples; neighbours with the same samples get the same."""
        import ray

        refs = [ray.put(share) for share in shares]
        return [refs[rank] for rank in self._data_ranks]

    def one_each(self, refs: Sequence[Any]) -> list[Any]:
        """Of results of all ranks those of one rank for each share."""
        return list(dict(zip(self._data_ranks, refs, strict=True)).values())

    def calls(self, what: str, refs: Sequence[Any]) -> list[Call]:
        """The calls of the ranks, or of the first ones, with a name each."""
        return [Call(f"{name}: {what}", ref) for name, ref in zip(self.names, refs, strict=False)]

    @property
    def names(self) -> list[str]:
        """What each rank is called."""
        count = len(self.actors)
        return [self.name if count == 1 else f"{self.name} {rank}" for rank in range(count)]

    def watched(self) -> list[Watched]:
        """The ranks, with the call that checks their health."""
        return [Watched(name, ask_alive(actor)) for name, actor in zip(self.names, self.actors, strict=True)]

    def sleeping(self) -> list[Call]:
        """Each gives the most memory of the turn that ends, as `waking` does."""
        return self.calls("sleep", [actor.sleep.remote() for actor in self.actors])

    def waking(self) -> list[Call]:
        return self.calls("wake", [actor.wake.remote() for actor in self.actors])


async def all_of(calls: Sequence[Call], seconds: float) -> list[Any]:
    """The values of calls that go on side by side. A rank that dies or is late is a `WorkerLostError`: the run can be
    resumed. Of several errors the first one that names a dead rank is raised, or else the first."""
    pending: list[Coroutine[Any, Any, Any]] = [settle(call.ref, call.what, seconds) for call in calls]
    tasks = [asyncio.create_task(call) for call in pending]
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
