"""Damaged checkpoints, bad `latest` files and folders that may not be read: what is sound is still found."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash

from tests.checkpoints import MODEL_FILE, flip, found, names, save
from treadle.errors import CheckpointError
from treadle.training.checkpoint import find_checkpoint


def write_manifest(path: Path, change: Callable[[dict], object]) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(change(manifest)))


def write_state(path: Path, text: str) -> None:
    """Write a state.json that the manifest vouches for."""
    (path / "state.json").write_text(text)
    entry = {"bytes": len(text), "xxh3_128": xxhash.xxh3_128(text.encode()).hexdigest()}
    write_manifest(path, lambda manifest: {**manifest, "state.json": entry})


def replace_by_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


DAMAGE = {
    "flipped bit in the model": (lambda p: flip(p / MODEL_FILE), f"{MODEL_FILE} does not match its checksum"),
    "flipped bit in the state": (lambda p: flip(p / "state.json"), "state.json does not match its checksum"),
    "cut optimizer": (lambda p: os.truncate(p / "optimizer.safetensors", 10), "optimizer.safetensors has 10 bytes"),
    "missing state": (lambda p: (p / "state.json").unlink(), "state.json is missing"),
    "missing model": (lambda p: shutil.rmtree(p / "model"), f"{MODEL_FILE} is missing"),
    "missing manifest": (lambda p: (p / "manifest.json").unlink(), "manifest.json is missing"),
    "cut manifest": (lambda p: os.truncate(p / "manifest.json", 30), "manifest.json is not JSON"),
    "manifest of nothing": (lambda p: write_manifest(p, lambda m: {}), "manifest.json lists no state.json"),
    "manifest without a model": (
        lambda p: write_manifest(p, lambda m: {k: v for k, v in m.items() if k != MODEL_FILE}),
        "manifest.json lists no model/",
    ),
    "manifest that is a list": (lambda p: write_manifest(p, list), "manifest.json holds no JSON object"),
    "manifest with a number for a file": (
        lambda p: write_manifest(p, lambda m: {**m, "config.json": 7}),
        "config.json has a malformed entry in manifest.json",
    ),
    "manifest nested deep": (lambda p: (p / "manifest.json").write_text("[" * 100_000), "manifest.json is not JSON"),
    "manifest is a folder": (lambda p: replace_by_folder(p / "manifest.json"), "manifest.json can't be read (Is a dir"),
    "model is a folder": (lambda p: replace_by_folder(p / MODEL_FILE), f"{MODEL_FILE} is missing"),
    "state that is a list": (lambda p: write_state(p, "[1]"), "state.json holds no JSON object"),
    "state without the rollout": (lambda p: write_state(p, '{"optimizer_steps": 1}'), "state.json has rollout_id None"),
    "state with text for the rollout": (
        lambda p: write_state(p, '{"rollout_id": "3"}'),
        "state.json has rollout_id '3'",
    ),
    "state before the first rollout": (lambda p: write_state(p, '{"rollout_id": -1}'), "state.json has rollout_id -1"),
    "empty folder": (lambda p: [shutil.rmtree(p), p.mkdir()], "manifest.json is missing"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path, damage):
    save(tmp_path, 1)
    save(tmp_path, 2)
    path = save(tmp_path, 3)
    act, fault = DAMAGE[damage]
    act(path)
    said: list[str] = []
    assert find_checkpoint(tmp_path, said.append).rollout_id == 2
    assert len(said) == 1
    assert repr(str(path)) in said[0]
    assert fault in said[0]
    with pytest.raises(CheckpointError, match=r"rollout_000003' is damaged: ") as caught:
        find_checkpoint(path, pytest.fail)
    assert fault in str(caught.value)


BAD_LATEST = (b"", b"../x", b"\xff\xfe\x00", b"rollout_", b"rollout_xyz", b"rollout_000001/../../etc", b"x" * 5000)


@pytest.mark.parametrize("content", BAD_LATEST)
def test_a_latest_that_names_no_checkpoint_hides_none(tmp_path, content):
    for rollout_id in (1, 2):
        save(tmp_path, rollout_id)
    (tmp_path / "latest").write_bytes(content)
    said: list[str] = []
    assert find_checkpoint(tmp_path, said.append).rollout_id == 2
    assert len(said) == 1
    assert "latest' names no checkpoint" in said[0]


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch], ids=["folder", "empty file"])
def test_a_latest_of_another_kind_hides_none(tmp_path, make):
    save(tmp_path, 1)
    (tmp_path / "latest").unlink()
    make(tmp_path / "latest")
    assert find_checkpoint(tmp_path, lambda _: None).rollout_id == 1


@pytest.mark.parametrize(("latest", "expected"), [("rollout_000000", 3), ("rollout_000002", 1), ("rollout_000009", 3)])
def test_a_latest_that_is_not_there_hides_none(tmp_path, latest, expected):
    """Those before it come first; where there is none, those after it are better than nothing."""
    for rollout_id in (1, 3):
        save(tmp_path, rollout_id)
    (tmp_path / "latest").write_text(latest)
    assert found(tmp_path) == expected


def test_rollouts_of_seven_digits_are_newer_than_those_of_six(tmp_path):
    for rollout_id in (999_999, 1_000_000):
        save(tmp_path, rollout_id, keep=1)
    assert found(tmp_path) == 1_000_000
    assert names(tmp_path) == ["latest", "rollout_1000000"]


def test_a_checkpoint_that_was_given_another_name_is_one_all_the_same(tmp_path):
    save(tmp_path, 3).rename(tmp_path / "best")
    assert found(tmp_path / "best") == 3


def test_a_file_that_may_not_be_read_is_damage_and_the_one_before_is_used(tmp_path, as_nobody):
    save(tmp_path, 1)
    file = save(tmp_path, 2) / MODEL_FILE
    for path in tmp_path.rglob("*.safetensors"):
        path.chmod(0o644)
    file.chmod(0)
    said: list[str] = []
    answer = as_nobody(lambda: f"{find_checkpoint(tmp_path, said.append).rollout_id} {said}")
    assert answer.startswith("1 "), answer
    assert f"{MODEL_FILE} can't be read (Permission denied)" in answer


@pytest.mark.parametrize("part", ["", "rollout_000001"])
def test_a_folder_that_may_not_be_read_is_said(tmp_path, as_nobody, part):
    save(tmp_path / "save", 1)
    (tmp_path / "save" / part).chmod(0)

    def act() -> str:
        try:
            return str(find_checkpoint(tmp_path / "save" / part, lambda _: None))
        except CheckpointError as error:
            return f"said: {error}"

    answer = as_nobody(act)
    (tmp_path / "save" / part).chmod(0o700)
    assert answer.startswith("said: "), answer
    assert re.search("can't (be )?read", answer)
    assert "Permission denied" in answer


def test_two_damaged_ones_are_both_named(tmp_path):
    for rollout_id in (1, 2, 3):
        save(tmp_path, rollout_id)
    flip(tmp_path / "rollout_000003" / "state.json")
    flip(tmp_path / "rollout_000002" / MODEL_FILE)
    said: list[str] = []
    assert find_checkpoint(tmp_path, said.append).rollout_id == 1
    assert ["rollout_000003" in said[0], "rollout_000002" in said[1], len(said)] == [True, True, 2]


def test_all_damaged_is_an_error(tmp_path):
    for rollout_id in (1, 2):
        flip(save(tmp_path, rollout_id) / MODEL_FILE)
    said: list[str] = []
    with pytest.raises(CheckpointError, match=r"no sound checkpoint in .*: all 2 are damaged"):
        find_checkpoint(tmp_path, said.append)
    assert len(said) == 2
