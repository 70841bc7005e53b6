"""kill -9 at random moments of a run's life: the same command with --load ends with the same bytes.

A run is killed a few times, from before it has made its folder to after its last save, then left alone. Weights, AdamW's
state, cursor, samples and metrics (but for those that measure the machine) are those of a run that was never killed.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

NUM_KILLS = int(os.environ.get("TREADLE_KILLS", "200"))
"""All kills of the long tests together."""
MOST_KILLS = 6  # of one run
RUN_SECONDS = 300.0
NUM_ROLLOUT, SAVE_INTERVAL = 5, 2
TIMED = ("seconds", "per_second", "memory")
ALGORITHMS = {
    "grpo": "--use-kl-loss --kl-loss-coef 0.01 --ref-update-interval 2 --num-steps-per-rollout 2",
    "ppo": "--advantage-estimator ppo --critic-lr 3e-3 --lambd 0.95 --num-critic-only-steps 1 --kl-coef 0.05",
    "dapo": "--group-filter zero_signal --over-sampling-batch-size 6 --eps-clip-high 0.28 --calculate-per-token-loss "
    "--overlong-buffer-len 4 --normalize-rewards-running",
}
REWARD = '''
def reward(sample):
    """Most often the same for all samples of a group, so that a filter has something to do."""
    return float("a" in sample.response)
'''


class Run:
    """One command, in a folder of its own."""

    def __init__(self, start: Callable[..., Any], flags: list[str], folder: Path):
        self.folder, self._start = folder, start
        self._words = ["train", *flags, "--run-dir", str(folder)]

    def start(self, *, again: bool = False) -> Any:
        return self._start(*self._words, *(["--load", str(self.folder)] if again else []))

    def finish(self, *, again: bool = False) -> None:
        program = self.start(again=again)
        assert program.wait(RUN_SECONDS) == 0, program.output

    def end(self) -> dict[str, Any]:
        """What the run left, without what differs from machine to machine and from folder to folder."""
        found: dict[str, Any] = {}
        for path in sorted(self.folder.rglob("*")):
            name = path.relative_to(self.folder).as_posix()
            if not path.is_file() or name.endswith("manifest.json"):
                continue
            if name.endswith("config.json") and "/model/" not in name and "/critic/" not in name:
                continue  # it names the folder
            found[name] = path.read_bytes()
        found["curve.png"] = len(found["curve.png"]) > 0
        found["summary.json"] = _steady(json.loads(found["summary.json"]))
        found["metrics.jsonl"] = [_steady(json.loads(line)) for line in found["metrics.jsonl"].splitlines()]
        return found

    @property
    def phase(self) -> str:
        """How far it is, to see that kills came everywhere."""
        latest = self.folder / "checkpoints" / "latest"
        if not latest.is_file():
            return "before the first save" if (self.folder / "samples").is_dir() else "before the first folder"
        last = latest.read_text().strip() == f"rollout_{NUM_ROLLOUT:06d}"
        return "after the last save" if last else "between saves"


def _steady(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not any(part in name for part in TIMED)}


@pytest.fixture
def make_run(start_program: Callable[..., Any], toy_flags: list[str], tmp_path: Path) -> Callable[[str, str], Run]:
    """`make_run("ppo", name)`: a run of this algorithm on the toy task, in the folder of this name."""
    reward = tmp_path / "filtered_reward.py"
    reward.write_text(REWARD)
    data = toy_flags[toy_flags.index("--prompt-data") + 1]
    common = f"""--num-rollout {NUM_ROLLOUT} --save-interval {SAVE_INTERVAL} --keep-checkpoints 2 --eval-interval 2
        --eval-prompt-data toy={data} --custom-rm-path {reward}:reward"""

    assert (
        start_program("--version").wait(RUN_SECONDS) == 0
    )  # the server has started: what follows takes its usual time

    def make(algorithm: str, name: str) -> Run:
        flags = [*toy_flags, *common.split(), *ALGORITHMS[algorithm].split()]
        return Run(start_program, flags, tmp_path / name)

    return make


def kill_at(program: Any, moment: float) -> bool:
    """kill -9 so many seconds from now; False if the program had ended before."""
    end = time.monotonic() + moment
    while program.returncode is None and (left := end - time.monotonic()) > 0:
        time.sleep(min(0.002, left))
    if program.returncode is not None:
        assert program.returncode == 0, program.output
        return False
    program.signal(signal.SIGKILL)
    return program.wait(RUN_SECONDS) == -signal.SIGKILL


def kill_many(
    make_run: Callable[[str, str], Run], algorithm: str, num_kills: int, seed: int, most: int = MOST_KILLS
) -> Counter[str]:
    """Kill runs, each at most so many times, until all kills are done; each must end as the first one, left alone."""
    rng, phases = random.Random(seed), Counter[str]()
    whole = make_run(algorithm, "whole")
    began = time.monotonic()
    whole.finish()
    life, expected = time.monotonic() - began, whole.end()
    for number in range(2 * num_kills):
        if phases.total() == num_kills:
            break
        run = make_run(algorithm, f"killed-{number}")
        for attempt in range(rng.randint(1, min(most, num_kills - phases.total()))):
            since = time.monotonic()
            if not kill_at(run.start(again=attempt > 0), rng.uniform(0, life)):
                life = min(life, time.monotonic() - since) if attempt == 0 else life  # a busy machine has calmed down
                break
            phases[run.phase] += 1
        run.finish(again=True)
        found = run.end()
        assert found.keys() == expected.keys(), f"run {number} of seed {seed}"
        different = [name for name in found if found[name] != expected[name]]
        assert not different, f"run {number} of seed {seed}: {different} differ"
        if number < 3:
            run.finish(again=True)  # finished: nothing is done
            assert run.end() == found
        shutil.rmtree(run.folder)
    return phases


def test_a_run_that_is_killed_ends_as_one_that_was_not(make_run: Callable[[str, str], Run]) -> None:
    assert kill_many(make_run, "dapo", num_kills=3, seed=5).total() == 3


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_random_kills(make_run: Callable[[str, str], Run], algorithm: str) -> None:
    num_kills = -(-NUM_KILLS // len(ALGORITHMS))
    phases = kill_many(make_run, algorithm, num_kills, seed=int(os.environ.get("TREADLE_KILL_SEED", "7")))
    print(algorithm, dict(phases))
    assert phases.total() >= num_kills, phases
    if num_kills >= 50:
        assert min(phases[name] for name in ("before the first save", "between saves", "after the last save")) > 0, (
            phases
        )
