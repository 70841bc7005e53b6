"""16 × 8 = 128 × 1, and what does not add up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.config import Config, batch_arithmetic, run_length
from treadle.errors import ConfigError


def config(**values) -> Config:
    sections = {"rollout_batch_size": "rollout", "n_samples_per_prompt": "rollout"}
    nested: dict[str, dict] = {}
    for name, value in values.items():
        nested.setdefault(sections.get(name, "train"), {})[name] = value
    return Config.model_validate(nested)


@pytest.mark.parametrize(
    ("given_values", "line"),
    [
        ({}, "16 × 8 = 128 × 1"),
        ({"global_batch_size": 32}, "16 × 8 = 32 × 4"),
        ({"num_steps_per_rollout": 2}, "16 × 8 = 64 × 2"),
        ({"global_batch_size": 64, "num_steps_per_rollout": 2}, "16 × 8 = 64 × 2"),
        ({"rollout_batch_size": 3, "n_samples_per_prompt": 5, "num_steps_per_rollout": 5}, "3 × 5 = 3 × 5"),
    ],
)
def test_fills_in_what_is_missing(given_values, line):
    assert str(batch_arithmetic(config(**given_values))) == line


@pytest.mark.parametrize(
    ("given_values", "parts"),
    [
        ({"global_batch_size": 64, "num_steps_per_rollout": 3}, ["16 × 8 = 128", "64 × 3 = 192"]),
        ({"global_batch_size": 100}, ["16 × 8 = 128", "global_batch_size = 100", "64 or 128"]),
        ({"global_batch_size": 256}, ["global_batch_size = 256", "128 fit"]),
        ({"num_steps_per_rollout": 3}, ["16 × 8 = 128", "num_steps_per_rollout = 3", "2 or 4"]),
    ],
)
def test_contradictions_name_the_numbers(given_values, parts):
    with pytest.raises(ConfigError) as caught:
        batch_arithmetic(config(**given_values))
    for part in parts:
        assert part in str(caught.value)


@given(*[st.integers(1, 40)] * 2, st.one_of(st.none(), st.integers(1, 60)), st.one_of(st.none(), st.integers(1, 60)))
def test_accepted_exactly_when_both_products_agree(prompts, n, batch, steps):
    possible = [(b, s) for s in range(1, prompts * n + 1) if prompts * n % s == 0 for b in [prompts * n // s]]
    fitting = [(b, s) for b, s in possible if batch in (None, b) and steps in (None, s)]
    if batch is None and steps is None:
        fitting = [(prompts * n, 1)]
    made = config(
        rollout_batch_size=prompts, n_samples_per_prompt=n, global_batch_size=batch, num_steps_per_rollout=steps
    )
    if not fitting:
        with pytest.raises(ConfigError):
            batch_arithmetic(made)
        return
    ((expected_batch, expected_steps),) = fitting
    result = batch_arithmetic(made)
    assert (result.global_batch_size, result.num_steps_per_rollout) == (expected_batch, expected_steps)


def test_run_of_rollouts():
    length = run_length(config(num_rollout=10, num_steps_per_rollout=2), dataset_size=64)
    assert (length.num_rollout, length.optimizer_steps, length.samples, length.prompts) == (10, 20, 1280, 160)
    assert length.epochs == 2.5
    assert length.leftover_prompts == 0


def test_run_of_epochs_counts_the_remainder():
    length = run_length(config(num_epoch=3), dataset_size=100)
    assert length.num_rollout == run_length(config(num_epoch=3), 100).num_rollout == 18  # 100 // 16 × 3
    assert length.leftover_prompts == 12  # 300 - 18 × 16
    assert length.epochs == 2.88


def test_data_of_unknown_size():
    assert run_length(config(num_rollout=7), None).num_rollout == 7
    assert run_length(config(num_rollout=7), None).epochs is None
    with pytest.raises(ConfigError, match="num_epoch = 1 needs a data set"):
        run_length(config(num_epoch=1), None)


@pytest.mark.parametrize(
    ("given_values", "size", "match"),
    [
        ({}, 100, "num_rollout .* or num_epoch"),
        ({"num_rollout": 3, "num_epoch": 2}, 100, "num_rollout = 3 and num_epoch = 2"),
        ({"num_epoch": 2}, 15, "15 prompts, less than one rollout .*16"),
    ],
)
def test_length_must_be_given_once_and_fit(given_values, size, match):
    with pytest.raises(ConfigError, match=match):
        run_length(config(**given_values), size)


def test_a_huge_batch_that_does_not_divide_is_refused_at_once(make_config):
    sizes = {"rollout_batch_size": 2**61 - 1, "n_samples_per_prompt": 1}
    with pytest.raises(ConfigError, match="is not a multiple"):
        batch_arithmetic(make_config(**sizes, global_batch_size=2**60))
    with pytest.raises(ConfigError, match="equal steps"):
        batch_arithmetic(make_config(**sizes, num_steps_per_rollout=2**60))
