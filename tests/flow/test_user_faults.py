"""Whole runs whose reward, filter, advantage or environment goes wrong: none ends as if it were done."""

from __future__ import annotations

import signal
import sys
import time
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


SLOW = """
import asyncio, subprocess, time

subprocess.run("setsid sleep 300 & setsid sh -c 'sleep 300; true' &", shell=True)


async def reply(prompt, turns):
    return [{"role": "user", "content": "go on"}]


async def waits(sample):
    await asyncio.sleep(300)


def sleeps(sample):
    time.sleep(300)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a subreaper is Linux's")
def test_nothing_that_users_code_started_outlives_a_run(
    toy_flags: list[str], tmp_path: Path, start_program: Callable
) -> None:
    """The environment's and both rewards' processes, and what they have put into sessions of their own."""
    import psutil

    def below() -> list[psutil.Process]:
        return psutil.Process(program.pid).children(recursive=True)

    (tmp_path / "slow.py").write_text(SLOW)
    names = [f"{tmp_path}/slow.py:{name}" for name in ("reply", "waits", "sleeps")]
    flags = ["--custom-env-path", names[0], "--rm-type", names[1], "--custom-rm-path", names[2]]
    program = start_program("train", *toy_flags, *flags, "--num-rollout", "1", "--run-dir", str(tmp_path / "run"))
    deadline = time.monotonic() + 60
    while sum("sleep" in process.name() for process in below()) < 6:  # two for each of three workers
        assert time.monotonic() < deadline, program.output
        time.sleep(0.05)
    found = below()
    program.signal(signal.SIGKILL)
    program.wait(60)
    _, alive = psutil.wait_procs(found, timeout=20)
    assert not alive


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
