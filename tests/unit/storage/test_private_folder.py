"""Folders that no other user can put a file into."""

import os
from pathlib import Path

import pytest

from treadle.storage.private_folder import (
    UnsafeFolderError,
    compile_cache,
    compile_variables,
    private_cache,
    private_folder,
)

OTHER_USER = 54321
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_it_is_made_for_this_user_alone_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        folder = private_folder(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert folder == tmp_path / "a" / "b"
    assert (mode_of(folder), mode_of(folder.parent)) == (0o700, 0o700)
    (folder / "kept").touch()
    assert private_folder(folder) == folder
    assert (folder / "kept").exists()


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_one_that_others_can_write_to_is_refused(tmp_path, mode):
    (tmp_path / "a").mkdir()
    (tmp_path / "a").chmod(mode)
    with pytest.raises(UnsafeFolderError, match="can be written by other users"):
        private_folder(tmp_path / "a")


def test_a_link_and_a_file_are_refused(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").touch()
    for name in ("link", "file"):
        with pytest.raises(UnsafeFolderError, match="is no folder"):
            private_folder(tmp_path / name)
    assert private_folder(tmp_path / "link" / "below") == tmp_path / "real" / "below"  # links above are followed


@AS_ROOT
def test_one_that_another_user_made_first_is_refused(tmp_path):
    (tmp_path / "a").mkdir(mode=0o700)
    os.chown(tmp_path / "a", OTHER_USER, OTHER_USER)
    with pytest.raises(UnsafeFolderError, match="belongs to another user"):
        private_folder(tmp_path / "a")
    with pytest.raises(UnsafeFolderError, match="can be replaced by other users"):
        private_folder(tmp_path / "a" / "below")


def test_one_below_a_folder_of_everybody_needs_the_sticky_bit(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(UnsafeFolderError, match="can be replaced by other users"):
        private_folder(shared / "mine")
    shared.chmod(0o1777)
    assert mode_of(private_folder(shared / "mine")) == 0o700


def test_a_cache_that_is_not_safe_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path))
    assert private_cache("kernels") == tmp_path / "kernels"
    (tmp_path / "kernels").chmod(0o777)
    with pytest.warns(UserWarning, match="compiled code is not kept: .*set TREADLE_CACHE"):
        assert private_cache("kernels") is None
    monkeypatch.setenv("TREADLE_CACHE", "/proc/nothing")
    assert private_cache("kernels") is None


def test_torch_in_another_program_keeps_its_code_private(tmp_path, monkeypatch):
    monkeypatch.setattr("getpass.getuser", lambda: "somebody")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    expected = {"TORCHINDUCTOR_CACHE_DIR": str(compile_cache())}
    assert compile_variables() == expected
    shared = tmp_path / "torchinductor_somebody"
    assert mode_of(shared) == 0o700  # made, so that nobody else can
    shared.chmod(0o777)
    assert compile_variables() == {**expected, "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}
