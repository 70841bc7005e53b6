import copy
import json
import os
import shutil
from collections import namedtuple
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from treadle.errors import EngineError
from treadle.weights import SentWeights, WeightSpec
from treadle.weights.disk import INDEX, DiskReceiver, DiskSender, split_by_size
from treadle.weights.disk_delta import DeltaReceiver, DeltaSender
from treadle.weights.version_folders import VersionWriter, list_versions, name_of


@pytest.fixture
def weights():
    return {"a": torch.arange(3000.0).view(30, 100), "b": torch.ones(7), "c": torch.ones(40, dtype=torch.bfloat16)}


@pytest.fixture(params=[(DiskSender, DiskReceiver), (DeltaSender, DeltaReceiver)], ids=["disk", "disk-delta"])
def pair(request):
    return request.param


def test_weights_are_cut_into_shards_by_size():
    specs = {name: WeightSpec((size,), torch.uint8) for name, size in {"a": 3, "b": 4, "c": 2, "d": 99, "e": 1}.items()}
    assert split_by_size(specs, 7) == [["a", "b"], ["c"], ["d"], ["e"]]


def test_a_version_is_a_sharded_hugging_face_folder(weights, tmp_path):
    sender = DiskSender(SentWeights(weights, torch.bfloat16), tmp_path / "w", max_shard_bytes=3000)
    sender.offer(3)
    folder = tmp_path / "w" / name_of(3)
    index = json.loads((folder / INDEX).read_text())
    assert index["metadata"]["total_size"] == 2 * (3000 + 7 + 40)
    assert len(set(index["weight_map"].values())) == 2
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(folder / file)[name], weights[name].bfloat16())
    sender.close()


def test_the_same_tensor_under_two_names_is_written_twice(tmp_path, served_like, assert_same):
    weight = torch.randn(5)
    sender = DiskSender(SentWeights({"head": weight, "embedding": weight}), tmp_path / "w")
    served = served_like({"head": weight, "embedding": weight})
    DiskReceiver(served).receive(sender.offer(1))
    assert_same(served, {"head": weight, "embedding": weight})
    sender.close()


def test_old_versions_go_and_all_go_at_the_end(pair, weights, tmp_path):
    folder = tmp_path / "w"
    sender = pair[0](SentWeights(weights), folder, keep=3)
    for version in (1, 2, 5, 6, 7):
        sender.offer(version)
    assert list_versions(folder) == ([5, 6, 7] if pair[0] is DiskSender else [1, 2, 5, 6, 7])  # deltas need their base
    (folder / "notes.txt").write_text("mine")
    sender.close()
    sender.close()
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


MALFORMED = {
    "list": "[]",
    "empty": "{}",
    "files is a list": '"files": []',
    "no files": '"files": {}',
    "number": '"files": {"a": 1}',
}


@pytest.mark.parametrize("how", ["flip", "cut", "remove", "manifest", "no manifest", *MALFORMED])
def test_a_damaged_version_changes_nothing(pair, weights, tmp_path, how, served_like, assert_same, change):
    sender = pair[0](SentWeights(weights), tmp_path / "w", max_shard_bytes=3000)
    served = served_like(weights)
    receiver = pair[1](served)
    receiver.receive(sender.offer(1))
    old = copy.deepcopy(weights)
    change(weights)
    offer = sender.offer(2)
    folder = tmp_path / "w" / name_of(2)
    victim = max(folder.glob("*.safetensors"))
    match how:
        case "flip":
            data = bytearray(victim.read_bytes())
            data[-3] ^= 1
            victim.write_bytes(data)
        case "cut":
            os.truncate(victim, victim.stat().st_size - 1)
        case "remove":
            victim.unlink()
        case "manifest":
            (folder / "manifest.json").write_text('{"version": 2')
        case "list" | "empty":
            (folder / "manifest.json").write_text(MALFORMED[how])
        case "files is a list" | "no files" | "number":
            whole = json.loads((folder / "manifest.json").read_text())
            (folder / "manifest.json").write_text(json.dumps({**whole, **json.loads("{" + MALFORMED[how] + "}")}))
        case "no manifest":
            shutil.rmtree(folder)
    with pytest.raises(EngineError) as caught:
        receiver.receive(offer)
    assert "\n" not in str(caught.value)
    assert "push" in str(caught.value) or "damaged" in str(caught.value) or "cut short" in str(caught.value)
    assert served.version == 1
    assert_same(served, old)
    receiver.receive(sender.offer(2))  # written whole again
    assert_same(served, weights)
    change(weights)
    receiver.receive(sender.offer(3))
    assert_same(served, weights)
    sender.close()


def test_another_version_under_the_same_number_is_refused(pair, weights, tmp_path, served_like):
    sender = pair[0](SentWeights(weights), tmp_path / "w")
    offer = sender.offer(1)
    served = served_like(weights)
    with pytest.raises(EngineError, match="not the one that was offered"):
        pair[1](served).receive(replace(offer, where={**offer.where, "digest": "0"}))
    assert served.version is None
    sender.close()


def test_one_writer_at_a_time(pair, weights, tmp_path):
    sender = pair[0](SentWeights(weights), tmp_path / "w")
    with pytest.raises(EngineError, match=f"can't write weights: .*in use by process {os.getpid()}"):
        DiskSender(SentWeights(weights), tmp_path / "w")
    sender.close()


def test_a_folder_that_is_gone_can_be_closed(tmp_path):
    writer = VersionWriter(tmp_path / "weights")
    shutil.rmtree(tmp_path / "weights")
    writer.close()
    assert not (tmp_path / "weights").exists()


def test_what_a_crashed_writer_left_is_removed_by_the_next(pair, weights, tmp_path):
    (tmp_path / "w" / ".v00000004").mkdir(parents=True)  # half-written
    (tmp_path / "w" / "v00000009").mkdir()
    (tmp_path / "w" / "vocabulary").mkdir()  # not ours
    sender = pair[0](SentWeights(weights), tmp_path / "w")
    assert {path.name for path in (tmp_path / "w").iterdir()} == {".lock", "vocabulary"}
    sender.close()


def test_a_full_disk_is_one_clear_line_and_the_next_push_is_whole(
    pair, weights, tmp_path, monkeypatch, served_like, assert_same, change
):
    sender = pair[0](SentWeights(weights), tmp_path / "w")
    served = served_like(weights)
    receiver = pair[1](served)
    receiver.receive(sender.offer(1))
    change(weights)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: namedtuple("Usage", "total used free")(9, 9, 0))
        with pytest.raises(EngineError, match=r"0\.00 GiB free, version 2 needs") as caught:
            sender.offer(2)
    assert "\n" not in str(caught.value)
    assert list_versions(tmp_path / "w") == [1]
    receiver.receive(sender.offer(2))
    assert_same(served, weights)
    sender.close()
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(EngineError, match="give another folder"):
        pair[0](SentWeights(weights), blocked / "w")
