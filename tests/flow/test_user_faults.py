"""Whole runs whose reward, filter, advantage or environment goes wrong: none ends as if it were done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from treadle.config import load_config
from treadle.errors import FailedSamplesError
from treadle.observe.samples import read_groups
from treadle.run.start import evaluate, train
from treadle.training.checkpoint import find_checkpoint
from treadle.types import Status

FAILS_LATER = '''
from pathlib import Path

def reward(sample):
    """Fails once the first rollout was recorded."""
    if Path(__file__).with_name("run").joinpath("metrics.jsonl").read_text():
        raise ConnectionError("the judge is down")
    return float(len(sample.response))
'''
ENDS = "import os, sys\n{line}\ndef f(*args):\n    return None\n"


def test_a_reward_that_fails_ends_the_run_and_what_was_trained_is_kept(toy_flags: list[str], tmp_path: Path) -> None:
    (tmp_path / "later.py").write_text(FAILS_LATER)
    run = tmp_path / "run"
    flags = [*toy_flags, "--custom-rm-path", f"{tmp_path}/later.py:reward", "--num-rollout", "3", "--run-dir", str(run)]
    words = r"rollout 1: 32 of 32 samples failed, .*; first: reward reward: raised ConnectionError: the judge is down"
    with pytest.raises(FailedSamplesError, match=words):
        train(load_config(None, flags), "toy")
    (group, *_) = read_groups(run / "samples" / "rollout_000001.jsonl")
    assert all(sample.status is Status.FAILED for sample in group.samples)
    assert find_checkpoint(run, print).rollout_id == 1
    assert (run / "summary.json").is_file()


def test_an_evaluation_of_failed_samples_is_an_error(toy_flags: list[str], tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("def reward(sample):\n    raise ValueError('no')\n")
    data = toy_flags[toy_flags.index("--prompt-data") + 1]
    flags = [*toy_flags, "--custom-rm-path", f"{tmp_path}/fails.py:reward", "--eval-prompt-data", f"toy={data}"]
    with pytest.raises(FailedSamplesError, match="evaluation of toy: 10 of 10 samples failed"):
        evaluate(load_config(None, [*flags, "--run-dir", str(tmp_path / "run")]), "toy")


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        ("--custom-rm-path", "os._exit(0)"),
        ("--custom-env-path", "os._exit(0)"),
        ("--group-filter", "sys.exit(0)"),
        ("--custom-loss-path", "os._exit(0)"),
    ],
)
def test_a_module_that_ends_the_process_ends_the_run_with_an_error(
    toy_flags: list[str], tmp_path: Path, start_program: Callable, flag: str, line: str
) -> None:
    (tmp_path / "ends.py").write_text(ENDS.format(line=line))
    words = [*toy_flags, "--num-rollout", "1", "--run-dir", str(tmp_path / "run"), flag, f"{tmp_path}/ends.py:f"]
    program = start_program("train", *words)
    assert program.wait(60) == 2
    (fault,) = program.output.strip().splitlines()
    assert fault.startswith("treadle: error: ")
    assert "ends.py can't be imported: it " in fault
