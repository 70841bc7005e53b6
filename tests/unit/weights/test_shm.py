import copy
import errno
import gc
import mmap
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from treadle.errors import EngineError
from treadle.weights import SentWeights
from treadle.weights.shm import ShmReceiver, ShmSender, map_offer, remove_abandoned


@pytest.fixture
def weights():
    return {
        "a": torch.arange(3000.0).view(30, 100),
        "b": torch.ones(7, dtype=torch.bfloat16),
        "none": torch.empty(0, 4),
    }


@pytest.fixture
def sender(weights, tmp_path):
    sender = ShmSender(SentWeights(weights), tmp_path)
    yield sender
    sender.close()
    assert list(tmp_path.iterdir()) == []


def slots(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*/model.safetensors"))


def test_nobody_else_can_read_the_weights(sender, tmp_path):
    sender.offer(1)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    (folder,) = tmp_path.iterdir()
    assert modes == {folder.name: 0o700, "lock": 0o600, "0": 0o700, "model.safetensors": 0o600}


def test_a_view_is_the_file_itself_and_stays_while_newer_versions_come(sender, weights, tmp_path):
    offer = sender.offer(1)
    view = map_offer(offer)
    before = copy.deepcopy(weights)
    for version in range(2, 8):
        weights["a"].add_(1)
        newest = map_offer(sender.offer(version))
        assert torch.equal(newest["a"], weights["a"])
        del newest
        sender.deliver()
    assert torch.equal(view["a"], before["a"])
    assert torch.equal(view["b"], before["b"])
    assert len(slots(tmp_path)) == 3  # the one that is read, and two in turn
    assert torch.equal(map_offer(offer)["a"], before["a"])  # another reader may still join
    view["a"].zero_()  # a private copy of the page, not the sender's memory
    assert torch.equal(map_offer(offer)["a"], before["a"])


def test_slots_are_used_again_once_readers_let_go(sender, weights, tmp_path):
    for version in range(6):
        part = map_offer(sender.offer(version))["b"]  # one tensor of the view is enough to hold it
        sender.deliver()
        assert torch.equal(part, weights["b"])
    del part
    gc.collect()
    sender.offer(7)
    sender.deliver()
    assert len(slots(tmp_path)) <= 3
    assert len({path.stat().st_ino for path in slots(tmp_path)}) == len(slots(tmp_path))


def test_a_version_that_was_written_over_is_refused(sender, weights, served_like):
    first = sender.offer(1)
    served = served_like(weights)
    sender.offer(2)
    sender.offer(3)
    with pytest.raises(EngineError, match="does not hold version 1 whole"):
        ShmReceiver(served).receive(first)
    assert (served.version, served.torn) == (None, None)


def test_what_is_offered_is_a_file_that_safetensors_reads(sender, weights, tmp_path):
    offer = sender.offer(1)
    found = load_file(offer.where["path"])
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) and found[name].dtype == weights[name].dtype for name in found)
    assert len(list(Path(offer.where["path"]).parent.iterdir())) == 1


def test_a_view_outlives_its_sender(weights, tmp_path):
    sender = ShmSender(SentWeights(weights), tmp_path)
    view = map_offer(sender.offer(1))
    sender.close()
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(view["a"], weights["a"])


@pytest.mark.parametrize("at", [0, 30, mmap.PAGESIZE + 11, mmap.PAGESIZE + 3000 * 4 + 5])
def test_one_wrong_byte_is_found_before_anything_changes(sender, weights, tmp_path, at, served_like):
    offer = sender.offer(1)
    (path,) = slots(tmp_path)
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    served = served_like(weights)
    with pytest.raises(EngineError, match=r"does not hold version 1 whole|damaged"):
        ShmReceiver(served).receive(offer)
    assert (served.version, served.torn) == (None, None)
    assert all((t == 0).all() for t in served.tensors.values())
    ShmReceiver(served).receive(sender.offer(2))
    assert torch.equal(served.tensors["a"], weights["a"])


def test_a_file_cut_short_or_gone_is_refused(sender, tmp_path):
    offer = sender.offer(1)
    (path,) = slots(tmp_path)
    size = path.stat().st_size
    os.truncate(path, size - mmap.PAGESIZE)
    with pytest.raises(EngineError, match=r"does not hold version 1 whole|needs"):
        map_offer(offer)
    os.truncate(path, 0)
    with pytest.raises(EngineError, match="has 0 bytes"):
        map_offer(offer)
    os.truncate(path, size)
    missing = replace(offer, where={**offer.where, "path": str(tmp_path / "nothing")})
    with pytest.raises(EngineError, match="is the trainer gone"):
        map_offer(missing)


def test_the_next_start_removes_what_a_crash_left_and_nothing_else(sender, weights, tmp_path):
    program = """
import os, signal, sys, torch
from pathlib import Path
from treadle.weights import SentWeights
from treadle.weights.shm import ShmSender
sender = ShmSender(SentWeights({"a": torch.ones(9)}), Path(sys.argv[1]))
sender.offer(1)
os.kill(os.getpid(), signal.SIGKILL)
"""
    (mine,) = tmp_path.iterdir()
    done = subprocess.run([sys.executable, "-c", program, tmp_path], timeout=60, check=False)
    assert done.returncode == -9
    (tmp_path / "treadle-weights-just-made").mkdir()  # another sender's, not locked yet
    assert len(list(tmp_path.iterdir())) == 3
    other = ShmSender(SentWeights(weights), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} > {mine.name, "treadle-weights-just-made"}
    assert len(list(tmp_path.iterdir())) == 3
    other.close()
    (tmp_path / "treadle-weights-just-made").rmdir()
    assert remove_abandoned(tmp_path) == 0


def test_no_room_is_one_clear_line(sender, monkeypatch, tmp_path):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(EngineError, match=r"GiB free.*needs 0\.00 GiB.*--shm-size") as caught:
            sender.offer(1)
    assert "\n" not in str(caught.value)
    assert slots(tmp_path) == []
    sender.offer(1)


def test_more_than_the_file_system_holds_is_refused_by_it(tmp_path):
    """Weights of 2^50 bytes that take no memory: one number, seen as many."""
    sender = ShmSender(SentWeights({"a": torch.zeros(1).expand(1 << 48)}), tmp_path)
    with pytest.raises(EngineError, match="give another folder"):
        sender.offer(1)
    sender.close()
    assert list(tmp_path.iterdir()) == []
