"""A critic on workers of its own: it gives values to the policy's workers, gets returns back, and trains beside them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from treadle.models.offload import HostCopies
from treadle.run import build
from treadle.run.ray.rank_workers import RankActor, Rendezvous, Trained
from treadle.training.batch import Batch
from treadle.training.checkpoint import staged_part
from treadle.training.micro_batches import Passes
from treadle.training.ranks import lost_ranks_are_named
from treadle.training.rollout_plan import RankShare, TokenNumbers, numbers_at


class CriticActor(RankActor):
    """The critic of one rank in a process of its own."""

    def build(self, group: Rendezvous, num_rollout: int, checkpoint: str | None) -> int:
        """Join the ranks and load the critic, then the checkpoint; return which share is this rank's."""
        self._grid = self._join(group)
        self._critic = build.build_critic(self._config, self._grid, num_rollout, self._notes.warn)
        self._host = HostCopies()
        if checkpoint is not None:
            self._critic.load(self._found(checkpoint))
        self._rollout: tuple[RankShare, Batch, Passes] | None = None
        return self._grid.data.rank

    def values(self, share: RankShare) -> TokenNumbers:
        """Return the values of the share's samples, before the rollout's steps."""
        with self._lost_named("scoring a rollout"):
            passes = self._critic.plan(share.batch, share.steps)
            values = self._critic.values(share.batch, passes)
        self._rollout = share, replace(share.batch, values=values), passes
        return TokenNumbers(share.places, share.batch.lengths, values)

    def train(self, rollout_id: int, *returns: TokenNumbers) -> Trained:
        """Take the rollout's optimizer steps towards these returns, which the policy's ranks computed."""
        assert self._rollout is not None, "values come first"
        (share, batch, passes), self._rollout = self._rollout, None
        batch = replace(batch, returns=numbers_at(share.places, returns))
        with self._lost_named(f"training on rollout {rollout_id}"):
            metrics = self._critic.train(batch, passes)
        return Trained([*metrics, *self._memory(reports_current=False)], self._notes.take())

    def write(self, folder: Path, name: str) -> tuple[Path, int]:
        """Write the critic with all ranks into the save folder; return where it is and how many steps it has taken."""
        with self._lost_named("writing a checkpoint"), staged_part(folder, name) as path:
            self._critic.write(path)
        return path, self._critic.optimizer.num_steps

    def sleep(self) -> float:
        """Move weights and optimizer off the device, nothing on a CPU; return the peak memory of the turn that ends, in GiB."""
        return self._end_turn(lambda: self._host.sleep(self._critic.tensors()))

    def wake(self) -> float:
        return self._end_turn(self._host.wake)

    def _lost_named(self, doing: str) -> Any:
        return lost_ranks_are_named(doing, self._grid.world.rank, self._grid.world.size)
