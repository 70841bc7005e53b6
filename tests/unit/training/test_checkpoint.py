"""Checkpoints: whole or not at all. Real processes are killed, a real small disk is filled."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.checkpoints import MODEL_FILE, found, names, save
from treadle.errors import CheckpointError
from treadle.training.checkpoint import (
    check_same_model,
    fault_of,
    find_checkpoint,
    go_on_from,
    save_checkpoint,
    staged_part,
    try_save_folder,
)
from treadle.training.trainer_files import write_model

DEADLINE_SECONDS = 60


def test_what_is_saved_is_found(tmp_path):
    path = save(tmp_path / "deep" / "save", 12, note="é", nested={"a": [1, 2]})
    checkpoint = find_checkpoint(tmp_path / "deep" / "save", pytest.fail)
    assert checkpoint.path == path == tmp_path / "deep" / "save" / "rollout_000012"
    assert checkpoint.rollout_id == 12
    assert checkpoint.state == {"rollout_id": 12, "optimizer_steps": 24, "note": "é", "nested": {"a": [1, 2]}}
    tensors = checkpoint.optimizer_tensors()
    assert torch.equal(tensors["exp_avg.w"], torch.full((8,), 12.0))
    assert tensors["step.w"].shape == ()
    assert json.loads((path / "config.json").read_text()) == {"train": {"seed": 7}}
    assert (path / MODEL_FILE).read_bytes() == b"\x0c" * 1000
    assert names(tmp_path / "deep" / "save") == ["latest", "rollout_000012"]
    assert fault_of(path) == ""


def test_a_run_folder_a_save_folder_or_one_checkpoint(tmp_path):
    path = save(tmp_path / "checkpoints", 3)
    save(tmp_path / "checkpoints", 4)
    assert found(tmp_path) == 4
    assert found(tmp_path / "checkpoints") == 4
    assert found(path) == 3


@pytest.mark.parametrize(
    ("place", "message"),
    [("nowhere", "no such folder"), (".", "no checkpoint in"), ("file", "no such folder")],
)
def test_nothing_to_resume_from(tmp_path, place, message):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=message):
        find_checkpoint(tmp_path / place, pytest.fail)


# What is kept


def test_the_newest_are_kept(tmp_path):
    for rollout_id in (1, 2, 3, 4):
        save(tmp_path, rollout_id, keep=2)
    assert names(tmp_path) == ["latest", "rollout_000003", "rollout_000004"]


def test_all_are_kept_unless_told(tmp_path):
    for rollout_id in (1, 2, 3):
        save(tmp_path, rollout_id)
    assert names(tmp_path) == ["latest", "rollout_000001", "rollout_000002", "rollout_000003"]


def test_the_same_rollout_saved_again_takes_the_place(tmp_path):
    save(tmp_path, 5, note="first")
    save(tmp_path, 5, note="second")
    assert find_checkpoint(tmp_path, pytest.fail).state["note"] == "second"
    assert names(tmp_path) == ["latest", "rollout_000005"]


def test_after_going_back_the_new_checkpoint_is_the_newest(tmp_path):
    """Resumed from rollout 10 although 20 and 30 are there: what is saved now must not be deleted as the oldest."""
    for rollout_id in (10, 20, 30):
        save(tmp_path, rollout_id)
    save(tmp_path, 12, keep=1)
    assert found(tmp_path) == 12
    assert names(tmp_path) == ["latest", "rollout_000012", "rollout_000020", "rollout_000030"]


def test_leftovers_of_a_killed_save_are_removed(tmp_path):
    (tmp_path / ".rollout_000007.4242" / "model").mkdir(parents=True)
    (tmp_path / ".rollout_trial.4242.old").mkdir()  # of `try_save_folder`
    save(tmp_path, 8)
    assert names(tmp_path) == ["latest", "rollout_000008"]


def test_a_checkpoint_that_was_moved_aside_comes_back(tmp_path):
    """As after a kill between the two renames that replace a checkpoint of the same rollout."""
    path = save(tmp_path, 9)
    path.rename(tmp_path / ".rollout_000009.4242.old")
    (tmp_path / ".rollout_000009.4242").mkdir()
    assert found(tmp_path) == 9
    assert not path.exists(), "looking for a checkpoint changes nothing: another run may be writing there"
    save(tmp_path, 10)
    assert names(tmp_path) == ["latest", "rollout_000009", "rollout_000010"]


# Failures while saving


def test_a_mistake_in_our_own_code_is_not_dressed_up_and_leaves_nothing(tmp_path):
    save(tmp_path, 1)
    with pytest.raises(TypeError):
        save(tmp_path, 2, broken=object())
    assert names(tmp_path) == ["latest", "rollout_000001"]


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "save").write_text("")
    with pytest.raises(CheckpointError, match=r"can't save a checkpoint in .*save'.*choose another --save"):
        save(tmp_path / "save", 1)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_no_permission(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(CheckpointError, match="Permission denied"):
        save(tmp_path / "save", 1)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB; needs root."""
    where = tmp_path / "disk"
    where.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(where)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("this user can't mount a small file system")
    yield where
    subprocess.run(["umount", "-l", str(where)], check=True)


@pytest.mark.parametrize("kept_free", [0, 40_000, 700_000])
def test_a_full_disk(small_disk, kept_free):
    """The disk runs full in the model, in the optimizer, or at the first byte."""
    folder = small_disk / "save"
    save(folder, 1)
    room = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
    (small_disk / "ballast").write_bytes(b"0" * (room - kept_free))

    def write_model(where: Path) -> None:
        where.mkdir()
        (where / "weights.bin").write_bytes(b"1" * 30_000)

    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(
            folder,
            2,
            write_model=write_model,
            optimizer={"exp_avg.w": torch.zeros(250_000)},
            state={},
            config={},
        )
    message = str(caught.value)
    assert "No space left on device" in message
    assert repr(str(folder)) in message
    assert "earlier checkpoints are untouched" in message
    assert "\n" not in message
    assert names(folder) == ["latest", "rollout_000001"]
    assert found(folder) == 1
    (small_disk / "ballast").unlink()
    save(folder, 2)
    assert found(folder) == 2


def test_a_full_disk_under_a_real_model(small_disk, make_trainer):
    """transformers' own writer runs out of space."""
    trainer = make_trainer()
    folder = small_disk / "save"
    save(folder, 1)
    room = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
    (small_disk / "ballast").write_bytes(b"0" * (room - 30_000))
    with pytest.raises(CheckpointError, match="No space left on device"):
        save_checkpoint(folder, 2, write_model=partial(write_model, trainer), optimizer={}, state={}, config={})
    assert names(folder) == ["latest", "rollout_000001"]


CHILD = textwrap.dedent(
    """
    import sys, time
    from pathlib import Path
    import torch
    from treadle.training.checkpoint import save_checkpoint

    folder, first, stop_in_model = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "stop"

    def write_model(where):
        where.mkdir()
        with (where / "weights.bin").open("wb") as file:
            for _ in range(40):
                file.write(b"1" * 50_000)
            file.flush()
            if stop_in_model:
                print("half", flush=True)
                time.sleep(600)

    for rollout_id in range(first, first + 100_000):
        save_checkpoint(
            folder, rollout_id, write_model=write_model, optimizer={"w": torch.zeros(100_000)},
            state={}, config={}, keep=3,
        )
        print(rollout_id, flush=True)
    """
)


def start_child(folder: Path, first: int, mode: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD, str(folder), str(first), mode]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def kill(child: subprocess.Popen[str]) -> None:
    child.send_signal(signal.SIGKILL)
    assert child.wait(DEADLINE_SECONDS) == -signal.SIGKILL
    assert child.stdout is not None
    child.stdout.close()


def test_killed_in_the_middle_of_a_save(tmp_path):
    save(tmp_path, 1)
    child = start_child(tmp_path, 2, "stop")
    assert child.stdout is not None
    assert child.stdout.readline() == "half\n"
    kill(child)
    assert f".rollout_000002.{child.pid}" in names(tmp_path)
    assert found(tmp_path) == 1
    save(tmp_path, 2)
    assert names(tmp_path) == ["latest", "rollout_000001", "rollout_000002"]


@pytest.mark.slow
def test_killed_at_any_moment(tmp_path):
    """A process that saves all the time is killed at four moments; the last save it reported is there each time."""
    first = 1
    for wait in (0.0, 0.013, 0.04, 0.11):
        child = start_child(tmp_path, first, "on")
        assert child.stdout is not None
        done = int(child.stdout.readline())
        assert done == first
        time.sleep(wait)
        child.send_signal(signal.SIGKILL)
        rest = child.stdout.read().split()
        kill(child)
        done = int(rest[-1]) if rest else done
        checkpoint = find_checkpoint(tmp_path, pytest.fail)
        assert checkpoint.rollout_id in (done, done + 1)
        assert fault_of(checkpoint.path) == ""
        first = checkpoint.rollout_id


# Another model


def test_another_model_is_refused_by_the_weight_that_differs(tmp_path):
    checkpoint = find_checkpoint(save(tmp_path, 1), pytest.fail)
    own = {"a": torch.zeros(2, 3), "b": torch.zeros(4)}
    check_same_model(checkpoint, {"a": torch.ones(2, 3), "b": torch.ones(4)}, own)
    cases = [
        ({"a": torch.zeros(2, 3)}, "it has no weight 'b'"),
        ({**own, "b": torch.zeros(5)}, r"'b' has shape \(5,\), this run's \(4,\)"),
        ({**own, "c": torch.zeros(1)}, "it has a weight 'c' that this run's has not"),
    ]
    for tensors, message in cases:
        with pytest.raises(CheckpointError, match=f"rollout_000001' is of another model.*{message}.*--hf-checkpoint"):
            check_same_model(checkpoint, tensors, own)


def test_a_staged_part_is_no_checkpoint_and_the_next_one_removes_it(tmp_path):
    for name in ("1_a", "2_b"):
        with staged_part(tmp_path / "save", name) as path:
            path.mkdir()
    assert [path.name for path in (tmp_path / "save").iterdir()] == [".part_2_b"]
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        find_checkpoint(tmp_path / "save", pytest.fail)


def test_a_part_that_can_not_be_written_says_so(tmp_path):
    with pytest.raises(CheckpointError, match="can't save a checkpoint"), staged_part(tmp_path, "1") as path:
        (path / "file").write_text("there is no folder")
    with pytest.raises(KeyError), staged_part(tmp_path, "1"):
        {}["a mistake of ours"]


def test_an_entry_of_the_state_has_the_type_that_is_asked_for(tmp_path):
    checkpoint = find_checkpoint(save(tmp_path, 1, flag=True, random=[]), pytest.fail)
    assert checkpoint.entry("optimizer_steps", int) == 2
    for name, kind in (("flag", int), ("random", dict), ("nothing", int)):
        with pytest.raises(CheckpointError, match=rf"state\.json has {name} .*, which is no {kind.__name__}"):
            checkpoint.entry(name, kind)


def test_what_saving_needs_is_tried_without_a_trace(tmp_path):
    try_save_folder(tmp_path / "deep" / "saves")
    assert names(tmp_path / "deep" / "saves") == []
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "file" / "saves", Path("/proc/saves")):
        with pytest.raises(CheckpointError, match="can't save a checkpoint in"):
            try_save_folder(folder)


def test_to_go_on_from_an_earlier_checkpoint_moves_latest(tmp_path):
    for rollout_id in (1, 2, 3):
        save(tmp_path, rollout_id)
    go_on_from(find_checkpoint(tmp_path / "rollout_000002", pytest.fail), tmp_path / "elsewhere")
    assert found(tmp_path) == 3
    go_on_from(find_checkpoint(tmp_path / "rollout_000002", pytest.fail), tmp_path)
    assert found(tmp_path) == 2
    (tmp_path / "rollout_000002").rename(tmp_path / ".rollout_000002.7.old")
    go_on_from(find_checkpoint(tmp_path, pytest.fail), tmp_path)
    assert names(tmp_path) == ["latest", "rollout_000001", "rollout_000002", "rollout_000003"]
