"""What a Ray that is started for a run leaves where others can reach it: nothing."""

import socket
from pathlib import Path

import pytest

from treadle.run.ray.connection import MAX_FOLDER_BYTES, keep_token_private, private_sessions, reach
from treadle.run.ray.train_workers import RankActor


@pytest.mark.parametrize("depth", [0, 3])
def test_sessions_are_below_a_private_folder_with_room_for_a_socket(tmp_path, monkeypatch, depth):
    base = tmp_path.joinpath(*["long-name-of-a-folder"] * depth)
    base.mkdir(parents=True, exist_ok=True)
    monkeypatch.setenv("RAY_TMPDIR", str(base))
    sessions = private_sessions()
    assert sessions.parent.stat().st_mode & 0o777 == 0o700
    assert len(str(sessions)) <= MAX_FOLDER_BYTES
    sessions.parent.rmdir()


def test_an_address_where_nothing_listens_is_not_tried_for_long():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        reach(f"127.0.0.1:{port}")
    with socket.create_server(("127.0.0.1", 0)) as server:
        reach(f"127.0.0.1:{server.getsockname()[1]}")
    reach("auto")


def mode_of(path):
    return path.stat().st_mode & 0o777


@pytest.fixture
def token(tmp_path, monkeypatch):
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / ".ray" / "auth_token"


def test_a_token_is_made_for_this_user_alone(token):
    keep_token_private(makes_one=False)
    assert not token.exists()
    keep_token_private(makes_one=True)
    written = token.read_text()
    assert len(written) == 64
    assert (mode_of(token), mode_of(token.parent)) == (0o600, 0o700)
    keep_token_private(makes_one=True)
    assert token.read_text() == written


def test_a_token_that_ray_left_open_is_closed(token):
    token.parent.mkdir()
    token.write_text("old")
    token.chmod(0o644)
    keep_token_private(makes_one=False)
    assert (token.read_text(), mode_of(token)) == ("old", 0o600)


@pytest.mark.parametrize("name", ["RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"])
def test_what_the_user_has_set_up_is_left_alone(token, monkeypatch, name):
    monkeypatch.setenv(name, "disabled")
    keep_token_private(makes_one=True)
    assert not token.exists()


def test_ranks_of_one_machine_find_each_other_in_a_private_folder():
    actor = object.__new__(RankActor)
    at = actor.rendezvous("127.0.0.1", on_one_node=True)
    assert isinstance(at, Path)
    assert (at.exists(), mode_of(at.parent)) == (False, 0o700)
    actor.close()
    assert not at.parent.exists()
