"""Where a run writes: found, locked and tried before anything else is done."""

import json
import os
from contextlib import ExitStack

import pytest

from treadle.errors import CheckpointError, ConfigError, TreadleError
from treadle.observe.metric_lines import metric_line
from treadle.observe.progress import Progress
from treadle.observe.run_folder import RunFolder
from treadle.run.place import claim_place
from treadle.training.checkpoint import save_checkpoint


def save(folder, rollout_id):
    def write_model(path):
        path.mkdir()
        (path / "weights.bin").write_bytes(b"1")

    save_checkpoint(folder, rollout_id, write_model=write_model, optimizer={}, state={}, config={})


def ran(path, num_rollout=2, saved=True):
    """A run folder with metrics of so many rollouts, and a checkpoint after them."""
    folder = RunFolder.make(path).open()
    folder.metrics.write_bytes(b"".join(metric_line(i, {"train/loss": 0.5}) for i in range(num_rollout)))
    if saved:
        save(folder.checkpoints, num_rollout)
    return folder


@pytest.fixture
def claim(make_config, tmp_path, monkeypatch):
    """`claim(run_dir="a", load="b")`: the place of a run with these folders, relative to `tmp_path`."""
    monkeypatch.chdir(tmp_path)
    with ExitStack() as stack:
        progress = stack.enter_context(Progress("off"))
        yield lambda **folders: claim_place(make_config(**folders), "toy", progress, stack)


def contents(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_a_new_run_gets_a_folder_and_leaves_nothing_if_it_does_not_begin(make_config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folders in ({}, {"run_dir": "deep/run"}, {"run_dir": "run", "save": "saves"}):
        with ExitStack() as stack, Progress("off") as progress:
            place = claim_place(make_config(**folders), "toy", progress, stack)
            assert place.folder.is_run
            assert (place.checkpoint, place.resumes, place.held_run) == (None, False, False)
        assert not place.folder.path.exists()


def test_a_folder_that_two_runs_make_at_once_stays_the_ones_that_has_it(claim, make_config, tmp_path, monkeypatch):
    first = claim(run_dir="run")
    monkeypatch.setattr("os.path.lexists", lambda _: False)  # the second one looked before the first one made it
    with ExitStack() as stack, Progress("off") as progress, pytest.raises(ConfigError, match="in use by"):
        claim_place(make_config(run_dir="run"), "toy", progress, stack)
    assert first.folder.is_run
    assert first.folder.samples.is_dir()


def test_what_was_there_before_stays_if_the_run_does_not_begin(make_config, tmp_path):
    folder = ran(tmp_path / "run", saved=False)
    before = folder.metrics.read_bytes()
    for folders in ({}, {"load": str(tmp_path / "run")}):
        with ExitStack() as stack, Progress("off") as progress:
            if folders:
                claim_place(make_config(run_dir=str(folder.path), **folders), "toy", progress, stack)
            else:
                with pytest.raises(ConfigError, match="already holds a run"):
                    claim_place(make_config(run_dir=str(folder.path)), "toy", progress, stack)
        assert folder.metrics.read_bytes() == before


def test_two_runs_can_not_have_one_folder_whatever_names_it(claim, tmp_path):
    ran(tmp_path / "run")
    claim(run_dir="run", load="run")
    before = contents(tmp_path / "run")
    for folders in (
        {"run_dir": "run"},
        {"load": "run"},
        {"run_dir": "run", "load": "run"},
        {"run_dir": "other", "save": "run"},
        {"run_dir": "other", "save": "run/checkpoints"},
        {"run_dir": "run/../run"},
    ):
        with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
            claim(**folders)
    assert contents(tmp_path / "run") == before


def test_a_save_folder_is_held_too_and_may_be_read(claim, tmp_path):
    save(tmp_path / "saves", 2)
    claim(run_dir="one", save="saves", load="saves")
    with pytest.raises(ConfigError, match=f"saves is in use by process {os.getpid()}"):
        claim(run_dir="two", save="saves", load="saves")
    with pytest.raises(ConfigError, match="in use by"):
        claim(run_dir="saves")
    assert claim(run_dir="three", load="saves").checkpoint.rollout_id == 2, "to read what a live run saved is no harm"


def test_checkpoints_of_another_run_are_not_mixed_with_new_ones(claim, tmp_path):
    save(tmp_path / "saves", 2)
    with pytest.raises(ConfigError, match="--save saves already holds checkpoints; give another --save, or go on"):
        claim(run_dir="run", save="saves")


@pytest.mark.parametrize("load", ["run", "run/checkpoints", "./run", "saves"])
def test_a_run_that_has_not_saved_yet_starts_from_the_beginning(claim, tmp_path, load, capfd):
    ran(tmp_path / "run", saved=False)
    place = claim(run_dir="run", load=load, save="saves" if load == "saves" else None)
    assert (place.checkpoint, place.resumes, place.held_run) == (None, True, True)
    assert (
        f"{load.removeprefix('./')} holds no checkpoint yet: the run starts from the beginning"
        in capfd.readouterr().err
    )


def test_a_run_that_was_killed_before_it_made_its_folder_starts_from_the_beginning(claim):
    place = claim(run_dir="run", load="run")
    assert (place.checkpoint, place.resumes, place.held_run) == (None, True, False)


def test_a_run_folder_stands_for_the_save_folder_it_writes_to(claim, tmp_path):
    ran(tmp_path / "run", saved=False)
    save(tmp_path / "saves", 1)
    assert claim(run_dir="run", load="run", save="saves").checkpoint.rollout_id == 1


def test_no_run_and_no_checkpoint_is_a_mistake(claim, tmp_path):
    (tmp_path / "empty").mkdir()
    for folders in ({"load": "nowhere"}, {"load": "empty"}, {"load": "empty", "run_dir": "run"}):
        with pytest.raises(CheckpointError, match="no checkpoint"):
            claim(**folders)


def test_a_folder_for_saved_rollouts_is_tried(claim, tmp_path):
    (tmp_path / "file").write_text("mine")
    for folder in ("file", "file/saved", "/proc/saved"):
        with pytest.raises(TreadleError, match="can't be written"):
            claim(run_dir=f"run-{folder.replace('/', '-')}", debug_rollout_only=True, save_debug_rollout_data=folder)


def test_damaged_checkpoints_are_not_started_over(claim, tmp_path):
    folder = ran(tmp_path / "run")
    (folder.checkpoints / "rollout_000002" / "state.json").unlink()
    with pytest.raises(CheckpointError, match="no sound checkpoint"):
        claim(run_dir="run", load="run")


def test_folders_that_may_not_be_used_are_said_in_one_line(make_config, tmp_path, as_nobody, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if os.geteuid() != 0:
        pytest.skip("only root can make folders that somebody else can't use")
    (tmp_path / "own").mkdir()
    (tmp_path / "own").chmod(0o777)
    ran(tmp_path / "hidden").path.chmod(0o700)
    ran(tmp_path / "locked")
    cases = (
        {"run_dir": "locked/new"},
        {"run_dir": "locked", "load": "locked"},
        {"run_dir": "hidden"},
        {"run_dir": "hidden", "load": "hidden"},
        {"load": "hidden"},
        {"run_dir": "own/run", "load": "hidden/checkpoints"},
        {"run_dir": "own/run", "save": "locked"},
        {"run_dir": "own/run", "save": "hidden/saves"},
    )

    def act():
        said = []
        for folders in cases:
            try:
                with ExitStack() as stack, Progress("off") as progress:
                    claim_place(make_config(**folders), "toy", progress, stack)
                said.append("nothing was said")
            except TreadleError as error:
                said.append(str(error))
        return json.dumps(said)

    answers = json.loads(as_nobody(act))
    assert len(answers) == len(cases)
    for answer in answers:
        assert "Permission denied" in answer
        assert "\n" not in answer
