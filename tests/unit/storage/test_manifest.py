"""Folders that are complete or not there."""

import pytest

from treadle.storage.manifest import commit_folder, entries_of, fault_of_file


@pytest.fixture
def work(tmp_path):
    folder = tmp_path / ".work"
    (folder / "inner").mkdir(parents=True)
    (folder / "a").write_bytes(b"one")
    (folder / "inner" / "b").write_bytes(b"")
    (folder / "manifest.json").write_text("not an entry of itself")
    return folder


def test_every_file_but_the_manifest_has_an_entry(work):
    entries = entries_of(work)
    assert {name: entry["bytes"] for name, entry in entries.items()} == {"a": 3, "inner/b": 0}
    assert all(fault_of_file(work / name, entry) == "" for name, entry in entries.items())


def test_a_file_that_differs_is_named(work):
    entry = entries_of(work)["a"]
    (work / "a").write_bytes(b"two")
    assert fault_of_file(work / "a", entry) == "does not match its checksum"
    (work / "a").write_bytes(b"four")
    assert fault_of_file(work / "a", entry) == "has 4 bytes, expected 3"
    (work / "a").unlink()
    assert fault_of_file(work / "a", entry) == "is missing"
    assert fault_of_file(work / "a", {"bytes": "3"}) == "has a malformed entry in manifest.json"


def test_a_folder_takes_the_place_of_another(work, tmp_path):
    target, aside = tmp_path / "place", tmp_path / ".aside"
    target.mkdir()
    (target / "old").touch()
    commit_folder(work, target, aside)
    assert sorted(path.name for path in target.iterdir()) == ["a", "inner", "manifest.json"]
    assert [path.name for path in aside.iterdir()] == ["old"]
    assert not work.exists()
