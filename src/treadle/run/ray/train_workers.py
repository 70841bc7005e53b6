"""The processes that train: one for each rank of the policy, and one for each rank of a critic with workers of its own.

Ranks exchange gradients among themselves. The first rank of the policy sends the weights and makes the checkpoints, to
which all of them write. A critic with workers of its own trains beside them: it gives values to the policy's ranks and
gets returns back, rank to rank, through the object store.
"""

from __future__ import annotations

import shutil
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from treadle.chat import load_codec
from treadle.metrics import Metric
from treadle.models.load import pick_device
from treadle.models.offload import HostCopies
from treadle.run import build
from treadle.run.memory import PeakMemory
from treadle.run.ray.worker import WorkerActor, WorkerSetup
from treadle.run.resume import save_trainer, set_random_state
from treadle.training import trainer_files
from treadle.training.batch import Batch
from treadle.training.checkpoint import Checkpoint, find_checkpoint, staged_part
from treadle.training.micro_batches import Passes
from treadle.training.parallel import Grid, ParallelSpec, build_grid
from treadle.training.ranks import join_ranks, leave_ranks, lost_ranks_are_named
from treadle.training.rollout_plan import RankShare, TokenNumbers, numbers_at
from treadle.training.sharded_state import full_parameters, weight_specs
from treadle.training.trainer import Rollout
from treadle.weights import Offer, SentWeights, TransportPlan, WeightSender, open_sender


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of a group find each other: an address of the first rank, and a file or a port there."""

    rank: int
    size: int
    address: str
    at: Path | int


@dataclass(frozen=True)
class Trained:
    """What a rank returns of a rollout: metrics, and warnings to show."""

    metrics: Sequence[Metric]
    warnings: list[str]


class RankActor(WorkerActor):
    """A rank in a process of its own. Calls run one after the other, except health checks.

    `build` of a subclass joins the ranks, loads their model and sets `_moves`, which free and restore its memory.
    """

    _grid: Grid
    _moves: tuple[Callable[[], object], Callable[[], object]]
    _rendezvous_folder: Path | None = None

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

    def sleep(self) -> float:
        """Move weights and optimizer off the device, nothing on a CPU; return the turn's peak memory in GiB."""
        return self._end_turn(0)

    def wake(self) -> float:
        """Bring back what `sleep` moved; return the turn's peak memory in GiB."""
        return self._end_turn(1)

    def _end_turn(self, move: int) -> float:
        """Move memory, and return the peak of the turn before. The move itself counts for neither turn."""
        peak = self._memory.turn()
        self._moves[move]()
        self._memory.turn()
        return peak

    def _join(self, group: Rendezvous) -> None:
        spec, device = ParallelSpec.of(self._config, group.size), pick_device(self._config.model.device)
        self._memory = PeakMemory(device.type)
        if spec.num_ranks > 1:
            seconds, address = spec.timeout_seconds, group.address
            join_ranks(group.rank, group.size, at=group.at, device=device, timeout_seconds=seconds, address=address)
        self._grid = build_grid(spec, device)

    def _found(self, checkpoint: str) -> Checkpoint:
        """Return the checkpoint to start from, and set the random generators to where it was taken."""
        found = find_checkpoint(Path(checkpoint), self._warnings.warn)
        set_random_state(found.entry("random", dict))
        return found

    def _trained(self, metrics: Sequence[Metric], *, reports_memory: bool = False) -> Trained:
        """Add the peak memory of this process, and on a rank that reports it the memory in use now."""
        now, peak = self._memory.metrics()
        return Trained([*metrics, *([now, peak] if reports_memory else [peak])], self._warnings.take())

    def _ranks_named(self, doing: str) -> AbstractContextManager[None]:
        return lost_ranks_are_named(doing, self._grid.world.rank, self._grid.world.size)


class CriticActor(RankActor):
    """The critic of one rank."""

    def build(self, group: Rendezvous, num_rollout: int, checkpoint: str | None) -> int:
        """Join the ranks and load the critic, then the checkpoint; return which share is this rank's."""
        self._join(group)
        self._critic, host = (
            build.build_critic(self._config, self._grid, num_rollout, self._warnings.warn),
            HostCopies(),
        )
        self._moves = lambda: host.sleep(self._critic.tensors()), host.wake
        if checkpoint is not None:
            self._critic.load(self._found(checkpoint))
        self._rollout: tuple[RankShare, Batch, Passes] | None = None
        return self._grid.data.rank

    def values(self, share: RankShare) -> TokenNumbers:
        """Return the values of the share's samples, before the rollout's steps."""
        with self._ranks_named("scoring a rollout"):
            passes = self._critic.plan(share.batch, share.steps)
            values = self._critic.values(share.batch, passes)
        self._rollout = share, replace(share.batch, values=values), passes
        return TokenNumbers(share.places, share.batch.lengths, values)

    def train(self, rollout_id: int, *returns: TokenNumbers) -> Trained:
        """Take the rollout's optimizer steps towards these returns, which the policy's ranks computed."""
        assert self._rollout is not None, "values come first"
        (share, batch, passes), self._rollout = self._rollout, None
        batch = replace(batch, returns=numbers_at(share.places, returns))
        with self._ranks_named(f"training on rollout {rollout_id}"):
            return self._trained(self._critic.train(batch, passes))

    def write(self, folder: Path, name: str) -> tuple[Path, int]:
        """Write the critic with all ranks into the save folder; return where it is and how many steps it has taken."""
        with self._ranks_named("writing a checkpoint"), staged_part(folder, name) as path:
            self._critic.write(path)
        return path, self._critic.optimizer.num_steps


class TrainActor(RankActor):
    """The trainer of one rank."""

    def __init__(self, setup: WorkerSetup, teacher_path: str | None):
        super().__init__(setup)
        self._teacher_path = teacher_path
        self._sender: WeightSender | None = None
        self._whole: dict[str, torch.Tensor] = {}  # of a sharded model, on the first rank
        self._saves = 0
        self._rollout: Rollout | None = None  # if it is trained in parts

    def build(self, group: Rendezvous, num_rollout: int, checkpoint: str | None) -> int:
        """Join the ranks and load all models, then the checkpoint; return which share is this rank's."""
        config, path, warn = self._config, self._setup.model_path, self._warnings.warn
        self._join(group)
        model, elsewhere = build.load_on_ranks(config, path, self._grid), config.cluster.num_critic_workers > 0
        teacher = self._teacher_path
        self._trainer = build.build_trainer(config, model, num_rollout, warn, teacher, critic_elsewhere=elsewhere)
        self._moves = self._trainer.sleep, self._trainer.wake
        if self._grid.is_first:
            trainer_files.try_writing(self._trainer, load_codec(path).save)
        if checkpoint is not None:
            self._trainer.load(self._found(checkpoint))
        return self._grid.data.rank

    def train(self, share: RankShare, rollout_id: int) -> Trained:
        """Take the rollout's optimizer steps on this rank's share."""
        return self._trained(self._trainer.train_share(share, rollout_id), reports_memory=self._grid.is_first)

    # The same in parts, with a critic on ranks of its own

    def score(self, share: RankShare) -> None:
        """Score the share's samples with the models of this group."""
        self._rollout = self._trainer.score(share)

    def spread(self, *values: TokenNumbers) -> TokenNumbers:
        """Compute advantages from the critic's values; return the returns of the share's samples."""
        assert self._rollout is not None, "scores come first"
        places = self._rollout.share.places
        batch = replace(self._rollout.batch, values=numbers_at(places, values))
        self._rollout = self._trainer.spread(replace(self._rollout, batch=batch))
        returns = self._rollout.batch.returns
        assert returns is not None
        return TokenNumbers(places, batch.lengths, returns)

    def take_steps(self, rollout_id: int) -> Trained:
        """Take the rollout's optimizer steps on the scored share."""
        assert self._rollout is not None, "advantages come first"
        rollout, self._rollout = self._rollout, None
        return self._trained(self._trainer.take_steps(rollout, rollout_id), reports_memory=self._grid.is_first)

    def save(self, folder: Path, done: int, state: Mapping[str, Any], critic: Path | None) -> None:
        """Write a checkpoint with all ranks.

        Args:
            folder: the save folder.
            done: number of rollouts that were trained.
            state: what the other parts of the run need to resume.
            critic: where the critic's ranks wrote their part, which the first rank moves to its place.
        """
        trainer, world = self._trainer, self._grid.world
        self._saves += 1
        folders = _SaveFolders(f"save-{self._saves}", is_alone=world.is_alone)
        if world.rank > 0:
            for part, write in (("model", trainer_files.write_model), ("rest", trainer_files.write_rest)):
                if (path := folders.wait_for(part)) is None:
                    return  # the first rank gave up, and reports why
                write(trainer, path)
            return
        try:
            save_codec = load_codec(self._setup.model_path).save
            save_trainer(trainer, save_codec, folder, done, state, announce=folders.announce, critic=critic)
        finally:
            folders.end()
            if critic is not None:
                shutil.rmtree(critic, ignore_errors=True)  # there is none if it was moved

    # Weights

    def connect(self, plan: TransportPlan) -> None:
        """Open the sending end, on the first rank. Of a sharded model it holds a whole copy in host memory."""
        trainer = self._trainer
        if trainer.policy.is_sharded:
            specs = weight_specs(trainer.policy)
            self._whole = {name: torch.empty(spec.shape, dtype=spec.dtype) for name, spec in specs.items()}
        self._sender = open_sender(plan, SentWeights(self._whole or trainer.policy.trainable.published(trainer.model)))

    def offer(self, version: int) -> Offer | None:
        """Make the current weights ready; return the offer for the engines on the first rank. All ranks call this."""
        if self._trainer.policy.is_sharded:
            for name, weight in full_parameters(self._trainer.policy):
                if self._whole:
                    self._whole[name].copy_(weight)
        return None if self._sender is None else self._sender.offer(version)

    def deliver(self) -> None:
        """Do the sender's part, on the first rank."""
        assert self._sender is not None, "connect first"
        self._sender.deliver()

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None
        super().close()


class _SaveFolders:
    """The folders of a checkpoint's parts, which the first rank announces to the others through the ranks' store."""

    def __init__(self, name: str, *, is_alone: bool):
        self._name, self._store = name, None if is_alone else dist.distributed_c10d._get_default_store()
        self._unannounced = ["model", "rest"]

    def announce(self, part: str, path: Path | None) -> None:
        """Give the folder of this part to the other ranks, or None if it will not be written."""
        if self._store is not None:
            self._store.set(f"{self._name}-{part}", "" if path is None else str(path))
        self._unannounced.remove(part)

    def wait_for(self, part: str) -> Path | None:
        """Return the folder of this part, or None if it will not be written; waits up to the ranks' timeout."""
        assert self._store is not None
        text = self._store.get(f"{self._name}-{part}").decode()
        return Path(text) if text else None

    def end(self) -> None:
        """Release the ranks that still wait for a part."""
        for part in list(self._unannounced):
            self.announce(part, None)
