"""A lock that dies with its process: real processes are killed, forked and started."""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from treadle.errors import ConfigError
from treadle.storage.folder_lock import FILE, FolderLock

SECONDS = 30.0
HOLD = """
import os, subprocess, sys, time
from pathlib import Path
from treadle.storage.folder_lock import FolderLock

lock = FolderLock(Path(sys.argv[1]), print)
if sys.argv[2] == "forks":
    began, begin = os.pipe()
    if os.fork() == 0:
        os.write(begin, b"1")
        time.sleep(60)
        os._exit(0)
    os.read(began, 1)  # a child that has not run yet holds what it inherited
if sys.argv[2] == "starts":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], close_fds=False)
print("held", flush=True)
time.sleep(60)
"""


def hold(folder, how="alone"):
    """A process that holds the folder, in a session of its own, and what it started."""
    command = [sys.executable, "-c", HOLD, str(folder), how, "--secret", "s"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout.readline() == "held\n"
    return process


@pytest.mark.parametrize("how", ["alone", "forks", "starts"])
def test_a_folder_is_held_as_long_as_its_process_lives(tmp_path, how):
    process = hold(tmp_path, how)
    try:
        with pytest.raises(ConfigError, match=rf"in use by process {process.pid} on .*since \d{{4}}-") as caught:
            FolderLock(tmp_path, pytest.fail)
        assert "secret" not in str(caught.value)
        process.kill()
        process.wait(SECONDS)
        FolderLock(tmp_path, pytest.fail).close()  # although what it forked or started is still there
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert not (tmp_path / FILE).exists()


def test_one_holder_in_a_process_too(tmp_path):
    lock = FolderLock(tmp_path, pytest.fail)
    with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
        FolderLock(tmp_path, pytest.fail)
    lock.close()
    lock.close()
    FolderLock(tmp_path, pytest.fail).close()


def test_never_two_at_once(tmp_path):
    """Many threads take the lock and give it back, each removing the file that the next one may have opened."""
    inside, taken, faults = [], [0], []
    end = time.monotonic() + 0.5

    def take():
        while time.monotonic() < end:
            try:
                lock = FolderLock(tmp_path, faults.append)
            except ConfigError:
                continue
            inside.append(1)
            if len(inside) > 1:
                faults.append("two at once")
            taken[0] += 1
            inside.pop()
            lock.close()

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert taken[0] > 10


@pytest.mark.parametrize("text", ["", "[]", "{}", "\x00\xff", json.dumps({"pid": "x"}), "[" * 10_000])
def test_a_holder_that_can_not_be_read_is_another_run(tmp_path, text):
    lock = FolderLock(tmp_path, pytest.fail)
    (tmp_path / FILE).write_text(text)
    with pytest.raises(ConfigError, match="in use by another run"):
        FolderLock(tmp_path, pytest.fail)
    lock.close()


def test_control_characters_of_a_holder_are_not_shown(tmp_path):
    lock = FolderLock(tmp_path, pytest.fail)
    (tmp_path / FILE).write_text(json.dumps({"pid": 1, "host": "\x1b[31m", "command": "x", "since": "y"}))
    with pytest.raises(ConfigError, match="in use by another run"):
        FolderLock(tmp_path, pytest.fail)
    lock.close()


def test_a_file_system_without_locks_is_warned_of(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    said = []
    FolderLock(tmp_path, said.append).close()
    assert len(said) == 1
    assert "file system without locks (No locks available)" in said[0]


def test_a_folder_that_can_not_be_written_is_said(tmp_path, as_nobody):
    (tmp_path / "other").mkdir(mode=0o755)

    def act():
        try:
            return str(FolderLock(tmp_path / "other", print))
        except ConfigError as error:
            return str(error)

    if os.geteuid() != 0:
        pytest.skip("only root can make a folder that somebody else can't write")
    assert "can't be written (Permission denied)" in as_nobody(act)
