"""The stream of prompts of a run: epochs, mixing, put-back, and a cursor that resumes it exactly."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from treadle.data.dataset import PromptDataset
from treadle.errors import CheckpointError, ConfigError, DataError
from treadle.types import Prompt


class PromptSource:
    """An endless stream of prompts drawn from one or more data sets.

    The order of a data set in an epoch is a function of the seed and the epoch alone. With several data sets, the next
    draw comes from the one furthest behind its share, so none is ever a whole draw ahead of its share. Without
    weights the shares are the sizes, and an epoch draws every prompt of every data set once.
    """

    def __init__(self, datasets: Sequence[PromptDataset], weights: Sequence[float] | None, shuffle: bool, seed: int):
        if not datasets:
            raise ConfigError("no prompt_data; give --prompt-data a file, a data set or reasoning_gym:task")
        names = [dataset.name for dataset in datasets]
        assert len(set(names)) == len(names), f"data sets need different names: {names}"
        self._datasets = tuple(datasets)
        self._by_name = {dataset.name: dataset for dataset in datasets}
        self._shares = _integer_shares(self._datasets, weights)
        self._shuffle = shuffle
        self._seed = seed
        self._drawn = [0] * len(datasets)  # draws from each data set, put-back prompts not counted again
        self._put_back: deque[tuple[str, int, int]] = deque()  # (data_name, row, group_id)
        self._orders: dict[int, tuple[int, np.ndarray]] = {}  # data set → (epoch, order of that epoch)

    def __len__(self) -> int:
        """Prompts in an epoch."""
        return sum(len(dataset) for dataset in self._datasets)

    @property
    def num_dropped(self) -> int:
        """Rows left out because their prompt is too long."""
        return sum(dataset.num_dropped for dataset in self._datasets)

    @property
    def num_draws(self) -> int:
        """Prompts drawn so far, a prompt that was put back and drawn again counted once; the next group id."""
        return sum(self._drawn)

    @property
    def epoch(self) -> float:
        """Passes over the data so far; prompts that were put back don't count until they are drawn again."""
        return (self.num_draws - len(self._put_back)) / len(self)

    def next_prompts(self, count: int) -> list[Prompt]:
        """Return exactly `count` prompts: those that were put back first, then new draws."""
        return [self._next() for _ in range(count)]

    def put_back(self, prompts: Iterable[Prompt]) -> None:
        """Have prompts drawn again before any new one, in this order and with the group ids they have."""
        for prompt in prompts:
            assert prompt.data_name in self._by_name, f"prompt of {prompt.data_name!r} is not of this source"
            assert prompt.group_id < self.num_draws, f"group {prompt.group_id} was never drawn"
            self._put_back.append((prompt.data_name, prompt.row, prompt.group_id))

    def state(self) -> dict[str, Any]:
        """Return the position of the stream, in JSON values."""
        return {
            "seed": self._seed,
            "shuffle": self._shuffle,
            "draws": self.num_draws,
            "data": [
                {
                    "name": dataset.name,
                    "size": len(dataset),
                    "share": share,
                    "epoch": drawn // len(dataset),
                    "offset": drawn % len(dataset),
                }
                for dataset, share, drawn in zip(self._datasets, self._shares, self._drawn, strict=True)
            ],
            "put_back": [list(entry) for entry in self._put_back],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from the position that `state` returned.

        Raises `DataError` if the state is of other data, another order or other shares, and `CheckpointError` if it is
        damaged. The source is unchanged then.
        """
        try:
            self._check_same_data(state)
            drawn = [int(row["epoch"]) * int(row["size"]) + int(row["offset"]) for row in state["data"]]
            put_back = [(str(name), int(row), int(group_id)) for name, row, group_id in state["put_back"]]
            draws = int(state["draws"])
        except DataError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the saved state of the prompts is damaged ({error!r}); load another checkpoint"
            ) from error
        if sum(drawn) != draws:
            raise CheckpointError(
                f"the saved state of the prompts is damaged: {draws} draws, but {sum(drawn)} by data set; load another "
                "checkpoint"
            )
        for name, row, _ in put_back:
            if name not in self._by_name or not 0 <= row < self._by_name[name].num_rows:
                raise DataError(
                    f"the saved run put row {row} of {name!r} back, which does not exist here; give the same data"
                )
        self._drawn, self._put_back = drawn, deque(put_back)

    def _check_same_data(self, state: Mapping[str, Any]) -> None:
        def shown(data: Iterable[tuple[str, int]]) -> str:
            return ", ".join(f"{name} with {size} prompts" for name, size in data)

        saved = [(row["name"], row["size"]) for row in state["data"]]
        here = [(dataset.name, len(dataset)) for dataset in self._datasets]
        if saved != here:
            raise DataError(
                f"the saved run drew from {shown(saved)}; this one has {shown(here)}: "
                "give the same prompt_data and rollout_max_prompt_len, or start a new run"
            )
        shares = [row["share"] for row in state["data"]]
        for name, old, new in (
            ("rollout_seed", state["seed"], self._seed),
            ("rollout_shuffle", state["shuffle"], self._shuffle),
            ("shares of the data sets (prompt_data_weights)", shares, self._shares),
        ):
            if old != new:
                raise DataError(
                    f"the saved run had {name} {old}, this one has {new}: prompts would repeat or be missed; "
                    "give the same, or start a new run"
                )

    def _next(self) -> Prompt:
        if self._put_back:
            name, row, group_id = self._put_back[0]
            prompt = self._by_name[name].prompt(row, group_id)
            self._put_back.popleft()
            return prompt
        draws, total = self.num_draws, sum(self._shares)
        behind = [share * (draws + 1) - drawn * total for share, drawn in zip(self._shares, self._drawn, strict=True)]
        index = behind.index(max(behind))
        dataset = self._datasets[index]
        epoch, offset = divmod(self._drawn[index], len(dataset))
        prompt = dataset.prompt(dataset.row_at(self._position(index, epoch, offset)), draws)
        self._drawn[index] += 1
        return prompt

    def _position(self, index: int, epoch: int, offset: int) -> int:
        if not self._shuffle:
            return offset
        if self._orders.get(index, (-1,))[0] != epoch:
            self._orders[index] = (epoch, epoch_order(len(self._datasets[index]), self._seed, epoch))
        return int(self._orders[index][1][offset])


def epoch_order(size: int, seed: int, epoch: int) -> np.ndarray:
    """Return the shuffled order of an epoch, int64 [size]; it depends on the arguments only, not on numpy's version."""
    # RandomState's streams are frozen for good; those of the newer Generator may change between versions.
    state = np.random.RandomState(np.random.MT19937(np.random.SeedSequence((seed, epoch))))
    return state.permutation(size).astype(np.int64)


def _integer_shares(datasets: Sequence[PromptDataset], weights: Sequence[float] | None) -> list[int]:
    """Return the share of each data set in integers, so that mixing has no rounding."""
    if not weights:
        return [len(dataset) for dataset in datasets]
    if len(weights) != len(datasets):
        raise ConfigError(
            f"prompt_data_weights has {len(weights)} weights for {len(datasets)} sources; give one for each"
        )
    for weight in weights:
        if not (math.isfinite(weight) and weight > 0):
            raise ConfigError(f"prompt_data_weights holds {weight}; a weight is above 0 (leave a source out instead)")
    fractions = [Fraction(str(weight)) for weight in weights]  # by its decimal text: 0.1 is a tenth
    common = math.lcm(*(fraction.denominator for fraction in fractions))
    shares = [int(fraction * common) for fraction in fractions]
    divisor = math.gcd(*shares)
    return [share // divisor for share in shares]
