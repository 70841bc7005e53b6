"""Dynamic sampling through the real loop: groups without signal are replaced, counted, and never starve a rollout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from treadle.config import load_config
from treadle.errors import ConfigError
from treadle.observe.samples import read_groups
from treadle.run.start import train

Rows = Callable[[Path], list[dict]]

HALF = '''
def reward(sample):
    """Every sample of an even row gets the same reward: half of the groups have no signal."""
    number = int(sample.columns["input"].split()[1])
    return 0.5 if number % 2 == 0 else float(len(set(sample.response)) % 3)


def keep_odd(group):
    return "even" if int(group.prompt.columns["input"].split()[1]) % 2 == 0 else None


def drop_all(group):
    return "everything"
'''


@pytest.fixture
def half_flags(toy_flags: list[str], tmp_path: Path) -> list[str]:
    (tmp_path / "half.py").write_text(HALF)
    return [*toy_flags, "--custom-rm-path", f"{tmp_path}/half.py:reward", "--num-rollout", "2"]


def test_groups_without_signal_are_replaced_by_others(half_flags, tmp_path: Path, read_rows: Rows) -> None:
    folder = tmp_path / "run"
    train(load_config(None, [*half_flags, "--group-filter", "zero_signal", "--run-dir", str(folder)]), "toy")
    for row in read_rows(folder):
        assert row["rollout/zero_signal_group_fraction"] == 0
        assert row["rollout/num_samples"] == 32
        assert row["rollout/dropped/zero_signal"] > 0
        assert row["rollout/dropped/zero_signal"] % 8 == 0  # whole groups of 8
    drawn = [g.group_id for i in (0, 1) for g in read_groups(folder / "samples" / f"rollout_{i:06d}.jsonl")]
    assert len(set(drawn)) == 8  # none is trained twice


def test_what_is_kept_beyond_the_need_is_drawn_again(half_flags, tmp_path: Path, read_rows: Rows) -> None:
    folder = tmp_path / "run"
    more = ["--group-filter", f"{tmp_path}/half.py:keep_odd", "--over-sampling-batch-size", "10"]
    train(load_config(None, [*half_flags, *more, "--run-dir", str(folder)]), "toy")
    first, second = read_rows(folder)
    # An epoch of 10 rows has 5 odd ones: 4 are kept, 1 goes back and is the first of the next draw of 10.
    assert first["rollout/dropped/even"] == 40
    assert first["rollout/dropped/surplus"] == 8
    assert second["rollout/num_samples"] == 32
    groups = [[g.group_id for g in read_groups(folder / "samples" / f"rollout_{i:06d}.jsonl")] for i in (0, 1)]
    assert len({*groups[0], *groups[1]}) == 8
    assert groups[1][0] < 10  # the one that went back, with the id it had


def test_rounds_are_bounded_and_dropped_groups_fill_the_rollout(half_flags, tmp_path: Path, read_rows: Rows) -> None:
    folder = tmp_path / "run"
    more = ["--group-filter", f"{tmp_path}/half.py:drop_all", "--max-filter-rounds", "3"]
    train(load_config(None, [*half_flags, *more, "--run-dir", str(folder)]), "toy")
    for row in read_rows(folder):
        assert row["rollout/num_samples"] == 32
        assert row["rollout/dropped/everything"] == 2 * 32  # three draws of 4 groups, one of them fills


def test_filter_mistakes_are_named(half_flags, tmp_path: Path) -> None:
    def run(*more: str) -> None:
        train(load_config(None, [*half_flags, *more, "--run-dir", str(tmp_path / "run")]), "toy")

    with pytest.raises(ConfigError, match="unknown group filter 'zero_signl'; did you mean 'zero_signal'"):
        run("--group-filter", "zero_signl")
    with pytest.raises(ConfigError, match="over_sampling_batch_size = 8 does nothing without group_filter"):
        run("--over-sampling-batch-size", "8")
    with pytest.raises(ConfigError, match="over_sampling_batch_size = 2 is less than rollout_batch_size = 4"):
        run("--group-filter", "zero_signal", "--over-sampling-batch-size", "2")
    (tmp_path / "bad.py").write_text("def f(group):\n    return 1.5\n")
    with pytest.raises(ConfigError, match="return a short word"):
        run("--group-filter", f"{tmp_path}/bad.py:f")
