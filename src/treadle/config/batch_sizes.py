"""The batch arithmetic: prompts, samples, optimizer steps and rollouts, worked out from what the recipe gives.

rollout_batch_size × n_samples_per_prompt = global_batch_size × num_steps_per_rollout
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from treadle.errors import ConfigError

if TYPE_CHECKING:
    from treadle.config.sections import Config

_MOST_TRIED = 100_000
"""Numbers tried on each side of a number that should be a divisor."""


@dataclass(frozen=True, slots=True)
class BatchArithmetic:
    """The four numbers of a rollout; both products are the same."""

    rollout_batch_size: int
    n_samples_per_prompt: int
    global_batch_size: int
    num_steps_per_rollout: int

    def __post_init__(self) -> None:
        assert self.samples_per_rollout == self.global_batch_size * self.num_steps_per_rollout, str(self)

    @property
    def samples_per_rollout(self) -> int:
        return self.rollout_batch_size * self.n_samples_per_prompt

    def __str__(self) -> str:
        """`16 × 8 = 128 × 1`."""
        made = f"{self.rollout_batch_size} × {self.n_samples_per_prompt}"
        return f"{made} = {self.global_batch_size} × {self.num_steps_per_rollout}"


@dataclass(frozen=True, slots=True)
class RunLength:
    """How long a run is; `leftover_prompts` fill no rollout and are not drawn (with num_epoch only)."""

    num_rollout: int
    optimizer_steps: int
    samples: int
    prompts: int
    leftover_prompts: int = 0
    dataset_size: int | None = None

    @property
    def epochs(self) -> float | None:
        """Passes over the data; None if its size is not known."""
        return self.prompts / self.dataset_size if self.dataset_size else None


def batch_arithmetic(config: Config) -> BatchArithmetic:
    """Return the batch arithmetic of a configuration; raises `ConfigError` with the numbers if they don't agree.

    With neither global_batch_size nor num_steps_per_rollout, a rollout is one optimizer step.

        >>> from treadle.config import Config
        >>> print(batch_arithmetic(Config()))
        16 × 8 = 128 × 1
    """
    prompts, n = config.rollout.rollout_batch_size, config.rollout.n_samples_per_prompt
    batch, steps = config.train.global_batch_size, config.train.num_steps_per_rollout
    samples = prompts * n
    product = f"rollout_batch_size × n_samples_per_prompt = {prompts} × {n} = {samples}"
    if batch is not None and steps is not None and batch * steps != samples:
        raise ConfigError(
            f"{product}, but global_batch_size × num_steps_per_rollout = {batch} × {steps} = {batch * steps}; "
            "make them equal, or give only one of the last two"
        )
    divisor, text = steps or 1, f"can't be split into num_steps_per_rollout = {steps} equal steps"
    if steps is None and batch is not None:
        divisor, text = batch, f"is not a multiple of global_batch_size = {batch}"
    if samples % divisor:
        raise ConfigError(f"{product} {text}; {_nearest_divisors(samples, divisor)} fit")
    steps = samples // batch if batch else divisor
    return BatchArithmetic(prompts, n, samples // steps, steps)


def known_arithmetic(config: Config) -> BatchArithmetic | None:
    """Return the batch arithmetic, or None if its numbers don't agree, which a rule reports."""
    try:
        return batch_arithmetic(config)
    except ConfigError:
        return None


def _nearest_divisors(number: int, wanted: int) -> str:
    """Return the divisors of `number` on both sides of `wanted`.

    >>> _nearest_divisors(128, 100)
    '64 or 128'
    """
    start = min(wanted, number)
    below = range(start, max(start - _MOST_TRIED, 0), -1)
    above = range(wanted, min(wanted + _MOST_TRIED, number) + 1)
    found = [next((d for d in tried if number % d == 0), None) for tried in (below, above)]
    return " or ".join(str(d) for d in found if d is not None) or "1"


def check_length(config: Config) -> None:
    """Raise `ConfigError` unless exactly one of num_rollout and num_epoch is given."""
    rollouts, epochs = config.train.num_rollout, config.train.num_epoch
    if rollouts is None and epochs is None:
        raise ConfigError(
            "how long to train is not given: set num_rollout (rollouts) or num_epoch (passes over the data)"
        )
    if rollouts is not None and epochs is not None:
        raise ConfigError(
            f"num_rollout = {rollouts} and num_epoch = {epochs} are both given; keep one (None unsets the other)"
        )


def run_length(config: Config, dataset_size: int | None) -> RunLength:
    """Count the rollouts, optimizer steps and samples of the whole run.

    With num_epoch the rollouts are `dataset_size // rollout_batch_size × num_epoch`. The remainder of each pass is
    carried into the next one, and what is left at the very end is not drawn (`leftover_prompts`). Raises
    `ConfigError` if neither or both of num_rollout and num_epoch are given, or the data does not fill one rollout.
    """
    check_length(config)
    rollouts, epochs, leftover = config.train.num_rollout, config.train.num_epoch, 0
    arithmetic = batch_arithmetic(config)
    prompts = arithmetic.rollout_batch_size
    if rollouts is None:
        assert epochs is not None
        if dataset_size is None:
            raise ConfigError(f"num_epoch = {epochs} needs a data set whose size is known; give num_rollout instead")
        if dataset_size < prompts:
            raise ConfigError(
                f"the data has {dataset_size} prompts, less than one rollout (rollout_batch_size = {prompts}); "
                "lower rollout_batch_size, or give num_rollout instead of num_epoch"
            )
        rollouts, leftover = dataset_size // prompts * epochs, dataset_size % prompts * epochs
    steps, samples = rollouts * arithmetic.num_steps_per_rollout, rollouts * arithmetic.samples_per_rollout
    return RunLength(rollouts, steps, samples, rollouts * prompts, leftover, dataset_size)
