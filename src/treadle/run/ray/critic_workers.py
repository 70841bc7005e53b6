"""A critic on workers of its own: values to the policy's workers, returns back, and steps while the policy takes its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from treadle.run import build
from treadle.run.ray.placement import Bundle, Places
from treadle.run.ray.rank_workers import Call, Meeting, RankActor, RankGroup, Trained, all_of
from treadle.training.batch import Batch
from treadle.training.batch_plan import RankShare, TokenNumbers, numbers_at
from treadle.training.checkpoint import staged_part
from treadle.training.host_memory import HostCopies
from treadle.training.micro_batches import Passes
from treadle.training.ranks import lost_ranks_are_named


class CriticActor(RankActor):
    """The critic of one rank in a process of its own."""

    def build(self, meeting: Meeting, num_rollout: int, checkpoint: str | None) -> int:
        """Join the ranks and load the critic, then the checkpoint; which share is this rank's."""
        self._grid = self._meet(meeting)
        self._critic = build.build_critic(self._config, self._grid, num_rollout, self._notes.warn)
        self._host = HostCopies()
        if checkpoint is not None:
            self._critic.load(self._found(checkpoint))
        self._rollout: tuple[RankShare, Batch, Passes] | None = None
        return self._grid.data.rank

    def values(self, share: RankShare) -> TokenNumbers:
        """The values of the share's samples, before the rollout's steps."""
        with self._lost_named("scoring a rollout"):
            passes = self._critic.plan(share.batch, share.steps)
            values = self._critic.values(share.batch, passes)
        self._rollout = share, replace(share.batch, values=values), passes
        return TokenNumbers(share.places, share.batch.lengths, values)

    def train(self, rollout_id: int, *returns: TokenNumbers) -> Trained:
        """The rollout's optimizer steps towards these returns, found by the policy's ranks."""
        assert self._rollout is not None, "values come first"
        (share, batch, passes), self._rollout = self._rollout, None
        batch = replace(batch, returns=numbers_at(share.places, returns))
        with self._lost_named(f"training on rollout {rollout_id}"):
            metrics = self._critic.train(batch, passes)
        return Trained([*metrics, *self._memory(self._grid.device, speaks=False)], self._notes.take())

    def write(self, folder: Path, name: str) -> tuple[Path, int]:
        """Write the critic with all ranks, in the save folder: where it is, and how many steps it has taken."""
        with self._lost_named("writing a checkpoint"), staged_part(folder, name) as path:
            self._critic.write(path)
        return path, self._critic.optimizer.num_steps

    def sleep(self) -> float:
        """Move weights and optimizer off the device, nothing on a CPU; the most memory of the turn that ends, in GiB."""
        return self._turn_ends(self._grid.device, lambda: self._host.sleep(self._critic.tensors()))

    def wake(self) -> float:
        return self._turn_ends(self._grid.device, self._host.wake)

    def _lost_named(self, doing: str) -> Any:
        return lost_ranks_are_named(doing, self._grid.world.rank, self._grid.world.size)


class CriticGroup(RankGroup):
    """All ranks of the critic, as the driver uses them."""

    def _bundles(self, places: Places) -> tuple[Bundle, ...]:
        return places.critic

    def values(self, shares: Sequence[RankShare]) -> list[Any]:
        """Have every rank score its share; references to what each finds."""
        return [actor.values.remote(share) for actor, share in zip(self.actors, self.put(shares), strict=True)]

    def train(self, rollout_id: int, returns: Sequence[Any]) -> list[Call]:
        """Have every rank train towards the returns, of which there are references, once they are there."""
        refs = [actor.train.remote(rollout_id, *returns) for actor in self.actors]
        return self.calls(f"training of rollout {rollout_id}", refs)

    async def write(self, folder: Path, name: str, seconds: float) -> tuple[Path, int]:
        """Write the critic's part of a checkpoint; where it is, and how many steps the critic has taken."""
        refs = [actor.write.remote(folder, name) for actor in self.actors]
        found: list[tuple[Path, int]] = await all_of(self.calls("its part of a save", refs), seconds)
        return found[0]
