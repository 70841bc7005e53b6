from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from treadle.errors import ConfigError, DataError, TreadleError
from treadle.observe.metric_lines import metric_line, read_metrics
from treadle.observe.run_folder import RunFolder
from treadle.observe.samples import read_groups, rollout_ids, write_groups
from treadle.storage.atomic_file import write_atomically

NOON = datetime(2026, 11, 29, 12, 0, 5)


def fill(folder: RunFolder, num_rollout: int) -> None:
    folder.metrics.write_bytes(b"".join(metric_line(i, {"train/loss": i / 8}) for i in range(num_rollout)))
    for i in range(num_rollout):
        write_groups(folder.sample_file(i), [])


def test_the_default_folder_is_named_after_recipe_and_time(tmp_path: Path) -> None:
    first = RunFolder.make(None, "recipes/quick start.toml", root=tmp_path / "runs", now=NOON)
    assert first.path == tmp_path / "runs" / "quick-start-20261129-120005"
    second = RunFolder.make(None, "recipes/quick start.toml", root=tmp_path / "runs", now=NOON)
    assert second.path.name == "quick-start-20261129-120005-2"


def test_a_given_folder_is_made_with_its_parents(tmp_path: Path) -> None:
    folder = RunFolder.make(tmp_path / "a" / "b").open()
    assert sorted(p.name for p in folder.path.iterdir()) == ["metrics.jsonl", "samples"]
    assert folder.sample_file(12) == folder.path / "samples" / "rollout_000012.jsonl"


def test_a_folder_that_can_not_be_made_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ConfigError, match=r"can't be made .*--run-dir") as caught:
            RunFolder.make(path).open()
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="can't be made"):
        RunFolder.make(None, "x", root=tmp_path / "file")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o555)
    with pytest.raises(ConfigError, match=r"can't be written .*--run-dir"):
        RunFolder.make(tmp_path / "run").open()


def test_a_part_that_is_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "samples").write_text("a file")
    with pytest.raises(ConfigError, match=r"can't be written .*--run-dir"):
        RunFolder.make(tmp_path).open()


@pytest.mark.parametrize("part", ["metrics", "samples", "checkpoints"])
def test_a_folder_that_holds_a_run_is_refused_with_the_remedy(tmp_path: Path, part: str) -> None:
    folder = RunFolder.make(tmp_path / "run").open()
    if part == "metrics":
        folder.metrics.write_bytes(metric_line(0, {}))
    elif part == "samples":
        write_groups(folder.sample_file(0), [])
    else:
        (folder.checkpoints / "rollout_000001").mkdir(parents=True)
    with pytest.raises(ConfigError, match="already holds a run; give another --run-dir, or resume it with --load"):
        RunFolder.make(tmp_path / "run").open()


def test_a_run_that_never_got_to_write_anything_may_be_started_again(tmp_path: Path) -> None:
    RunFolder.make(tmp_path / "run").open().write_config({"a": 1})
    RunFolder.make(tmp_path / "run").open().write_config({"a": 2})
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == {"a": 2}


def test_the_config_of_something_else_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match=r"holds a config\.json that is not a run's"):
        RunFolder.make(tmp_path).open()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json"]


def test_resuming_takes_back_the_rollouts_that_are_done_anew(tmp_path: Path) -> None:
    fill(RunFolder.make(tmp_path / "run").open(), 6)
    with open(tmp_path / "run" / "metrics.jsonl", "ab") as file:
        file.write(metric_line(2, {"eval/a/accuracy": 0.5}) + metric_line(4, {"eval/a/accuracy": 0.75}))
        file.write(b'{"rollout_id": 6, "tra')  # killed while writing
    folder = RunFolder.make(tmp_path / "run").open(resumes=True).take_back(4)
    assert (folder.num_lines_cut, folder.num_sample_files_removed) == (3, 2)
    assert [row["rollout_id"] for row in read_metrics(folder.metrics)] == [0, 1, 2, 3, 2]
    assert read_metrics(folder.metrics)[3] == {"rollout_id": 3, "train/loss": 0.375}
    assert rollout_ids(folder.samples) == [0, 1, 2, 3]
    assert not list(folder.path.rglob(".*"))


def test_resuming_into_an_empty_folder_takes_nothing_back(tmp_path: Path) -> None:
    folder = RunFolder.make(tmp_path / "other").open(resumes=True).take_back(4)
    assert (folder.num_lines_cut, folder.num_sample_files_removed) == (0, 0)
    assert folder.metrics.read_bytes() == b""


def test_resuming_where_only_checkpoints_are_left_works(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "x").mkdir(parents=True)
    (tmp_path / "config.json").write_text("{}")
    assert RunFolder.make(tmp_path).open(resumes=True).take_back(1).metrics.exists()


def test_config_and_summary_are_json_whatever_they_hold(tmp_path: Path) -> None:
    folder = RunFolder.make(tmp_path / "run").open()
    folder.write_config({"path": Path("a"), "text": "größer"})
    folder.write_summary({"seconds": 1.5})
    assert json.loads(folder.config.read_text()) == {"path": "a", "text": "größer"}
    assert json.loads(folder.summary.read_text()) == {"seconds": 1.5}


def test_an_atomic_write_that_fails_leaves_the_old_file_and_no_rest(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_atomically(path, [b"old"])

    def chunks():
        yield b"new"
        raise OSError(28, "No space left on device")

    with pytest.raises(TreadleError, match=r"a\.json can't be written \(No space left on device\)"):
        write_atomically(path, chunks())
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("line", [b"[]", b"7", b'{"rollout_id": "1"}', b"[" * 100_000, b"\xff\x00", b"{"])
def test_a_line_that_is_no_metrics_is_named(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(metric_line(0, {}) + line + b"\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl:2: not a line of metrics"):
        read_metrics(tmp_path / "metrics.jsonl")


@pytest.mark.timeout(20)
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "summary.json", "rollout_000000.jsonl"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match=r"metrics\.jsonl can't be read \(a pipe or a device, not a file\)"):
        read_metrics(tmp_path / "metrics.jsonl")
    with pytest.raises(DataError, match=r"rollout_000000\.jsonl can't be read \(a pipe or a device, not a file\)"):
        read_groups(tmp_path / "rollout_000000.jsonl")
    assert RunFolder(tmp_path).finished_after is None


def test_metrics_that_can_not_be_read_are_said(tmp_path: Path, as_nobody: Callable[..., str]) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match=r"can't be read \(Is a directory\)"):
        read_metrics(tmp_path / "folder")
    (tmp_path / "metrics.jsonl").touch(mode=0o000)

    def act() -> str:
        try:
            return str(read_metrics(tmp_path / "metrics.jsonl"))
        except DataError as error:
            return str(error)

    assert "can't be read (Permission denied)" in as_nobody(act)


@pytest.mark.parametrize(
    ("text", "expected"),
    [('{"finished_after": 3}', 3), ("[3]", None), ("", None), ('{"finished_after": "3"}', None), ("[" * 100_000, None)],
)
def test_whether_a_run_is_finished(tmp_path: Path, text: str, expected: int | None) -> None:
    folder = RunFolder.make(tmp_path).open()
    assert folder.finished_after is None
    folder.summary.write_text(text)
    assert folder.finished_after == expected
    assert folder.take_back(0).finished_after is None
