"""Ranks as workers: what the processes of the policy and of a critic of its own have in common, and groups of them."""

from __future__ import annotations

import shutil
import socket
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from treadle.metrics import Metric
from treadle.models.load import pick_device
from treadle.run.memory import PeakMemory
from treadle.run.ray.calls import Call, all_in_time
from treadle.run.ray.placement import Bundle, Places, worker_options
from treadle.run.ray.worker import HEALTH_CHECKS, BusyWorker, Note, WorkerActor, WorkerSetup
from treadle.run.resume import set_random_state
from treadle.training.checkpoint import Checkpoint, find_checkpoint
from treadle.training.parallel import Grid, ParallelSpec, build_grid
from treadle.training.ranks import join_ranks, leave_ranks
from treadle.training.rollout_plan import RankShare

Given = ParamSpec("Given")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of a group find each other: an address of the first one, as the others reach it, and a file or a
    port there."""

    rank: int
    size: int
    address: str
    at: Path | int


@dataclass(frozen=True)
class Trained:
    """What a rank returns of a rollout: metrics, and notes to show."""

    metrics: Sequence[Metric]
    notes: list[Note]


class RankActor(WorkerActor):
    """A rank in a process of its own. Calls run one after the other, except health checks."""

    def __init__(self, setup: WorkerSetup):
        super().__init__(setup)
        self._rendezvous_folder: Path | None = None

    def rendezvous(self, address: str, *, on_one_node: bool) -> Path | int:
        """Return where the ranks can find each other.

        On one node that is a file in a new folder of this user alone; else a port that nobody listens on.
        """
        if on_one_node:
            self._rendezvous_folder = Path(tempfile.mkdtemp(prefix="treadle-ranks-"))
            return self._rendezvous_folder / "store"
        with socket.socket() as probe:
            probe.bind((address, 0))
            return int(probe.getsockname()[1])

    def close(self) -> None:
        leave_ranks()
        if self._rendezvous_folder is not None:
            shutil.rmtree(self._rendezvous_folder, ignore_errors=True)

    def _join(self, group: Rendezvous) -> Grid:
        spec = ParallelSpec.of(self._config, group.size)
        device = pick_device(self._config.model.device)
        self._peak_memory = PeakMemory(device.type)
        if spec.num_ranks > 1:
            seconds = spec.timeout_seconds
            join_ranks(
                group.rank, group.size, at=group.at, device=device, timeout_seconds=seconds, address=group.address
            )
        return build_grid(spec, device)

    def _found(self, checkpoint: str) -> Checkpoint:
        """Return the checkpoint to start from, and set the random generators to where it was taken."""
        found = find_checkpoint(Path(checkpoint), self._notes.warn)
        set_random_state(found.entry("random", dict))
        return found

    def _end_turn(self, move: Callable[[], object]) -> float:
        """Have `move` free memory for others or take it back, and return the peak memory of the turn before, in GiB.

        The move itself counts for neither turn.
        """
        peak = self._peak_memory.turn()
        move()
        self._peak_memory.turn()
        return peak

    def _memory(self, *, reports_current: bool) -> list[Metric]:
        """Return the peak memory of this process, and on the rank that reports it what it is now."""
        now, peak = self._peak_memory.metrics()
        return [now, peak] if reports_current else [peak]


Rank = TypeVar("Rank", bound=RankActor)


class RankGroup(Generic[Rank]):
    """All ranks of one model, as the driver calls them."""

    def __init__(
        self, kind: type[Rank], name: str, setup: WorkerSetup, places: Places, bundles: Sequence[Bundle], *args: Any
    ):
        import ray

        self.spec = ParallelSpec.of(setup.config, len(bundles))
        self._config, self._bundles = setup.config, bundles
        self._data_ranks: list[int] = []  # which share of the samples each rank has
        shares = setup.config.cluster.colocate
        remote: Any = ray.remote  # its types know no concurrency groups
        actor = remote(concurrency_groups=HEALTH_CHECKS)(kind)
        self.workers: list[BusyWorker[Rank]] = []
        for rank, bundle in enumerate(bundles):
            handle = actor.options(**worker_options(setup.config, places, bundle, shares=shares)).remote(setup, *args)
            self.workers.append(BusyWorker(name if len(bundles) == 1 else f"{name} {rank}", handle))

    async def build(
        self,
        method: Callable[[Rank, Rendezvous, int, str | None], int],
        num_rollout: int,
        checkpoint: Checkpoint | None,
    ) -> None:
        """Have all ranks join, load their models with this method and go to where the checkpoint was taken."""
        seconds = self._config.cluster.worker_start_timeout_seconds
        address = self._bundles[0].node_ip
        on_one_node = len({bundle.node_ip for bundle in self._bundles}) == 1
        at = (
            await self.workers[0].call("start", RankActor.rendezvous, address, on_one_node=on_one_node).in_time(seconds)
        )
        path, size = None if checkpoint is None else str(checkpoint.path), len(self.workers)
        calls = [
            worker.call("loading the models", method, Rendezvous(rank, size, address, at), num_rollout, path)
            for rank, worker in enumerate(self.workers)
        ]
        self._data_ranks = await all_in_time(calls, seconds)

    def call(
        self,
        what: str,
        method: Callable[Concatenate[Rank, Given], Result],
        *args: Given.args,
        **kwargs: Given.kwargs,
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
