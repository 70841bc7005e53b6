import copy
import shutil

import pytest
import torch

from treadle.errors import EngineError
from treadle.weights import SentWeights
from treadle.weights.disk_delta import FILE, DeltaReceiver, DeltaSender
from treadle.weights.version_folders import list_versions, name_of, read_manifest


@pytest.fixture
def weights():
    return {"a": torch.randn(40, 100), "b": torch.ones(7), "c": torch.ones(500, dtype=torch.bfloat16)}


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "w"


@pytest.fixture
def sender(weights, folder):
    sender = DeltaSender(SentWeights(weights), folder, full_every=4)
    yield sender
    sender.close()
    assert not folder.exists()


def kinds(folder) -> dict[int, str]:
    return {v: "full" if read_manifest(folder, v).base is None else "delta" for v in list_versions(folder)}


def test_deltas_between_whole_snapshots(sender, weights, folder, served_like, assert_same, change):
    served = served_like(weights)
    receiver = DeltaReceiver(served)
    seen: dict[int, str] = {}
    for version in range(1, 11):
        receiver.receive(sender.offer(version))
        assert_same(served, weights)
        seen |= kinds(folder)
        change(weights)
    assert "".join(kind[0] for kind in seen.values()) == "fdddfdddfd"
    assert kinds(folder) == {9: "full", 10: "delta"}


def test_only_what_changed_is_written(sender, weights, folder):
    sender.offer(1)
    weights["a"][0, :5] = 1.0
    sender.offer(2)
    sender.offer(3)  # nothing changed
    whole = sum(path.stat().st_size for path in (folder / name_of(1)).glob("*.safetensors"))
    assert whole > 4 * 4000
    assert (folder / name_of(2) / FILE).stat().st_size < 500
    assert (folder / name_of(3) / FILE).stat().st_size < 120


def test_a_delta_no_smaller_than_the_whole_is_a_whole_one(sender, weights, folder, served_like, change):
    sender.offer(1)
    for weight in weights.values():
        weight.view(torch.uint8).random_(0, 256)
    sender.offer(2)
    assert kinds(folder) == {2: "full"} | {1: "full"}
    change(weights)
    served = served_like(weights)
    DeltaReceiver(served).receive(sender.offer(3))
    assert kinds(folder)[3] == "delta"
    for name, weight in weights.items():  # NaNs and all
        assert torch.equal(served.tensors[name].view(torch.uint8), weight.view(torch.uint8))


def test_an_engine_that_comes_late_or_missed_some_takes_the_chain(sender, weights, served_like, assert_same, change):
    missed, late = served_like(weights), served_like(weights)
    versions: list[int] = []
    missed._set_version = versions.append
    for version in range(1, 4):
        offer = sender.offer(version)
        if version == 1:
            DeltaReceiver(missed).receive(offer)
        change(weights)
    offer = sender.offer(4)
    DeltaReceiver(missed).receive(offer)
    DeltaReceiver(late).receive(offer)
    assert_same(missed, weights)
    assert_same(late, weights)
    assert versions == [1, 4]  # never said to be at a version in between


def test_a_wrong_base_is_refused_and_nothing_changes(sender, weights, served_like, assert_same, change):
    served = served_like(weights)
    receiver = DeltaReceiver(served)
    receiver.receive(sender.offer(1))
    served.tensors["b"][2] = 9.0  # somebody wrote to the engine's weights
    before = copy.deepcopy(served.tensors)
    change(weights)
    with pytest.raises(EngineError, match=r"version 2 builds .* wait for a whole") as caught:
        receiver.receive(sender.offer(2))
    assert "\n" not in str(caught.value)
    assert (served.version, served.torn) == (1, None)
    assert_same(served, before)
    for version in (3, 4):
        change(weights)
        with pytest.raises(EngineError, match="version 2 builds on version 1"):
            receiver.receive(sender.offer(version))
    receiver.receive(sender.offer(5))  # a whole one
    assert_same(served, weights)


def test_a_chain_with_a_gap_is_refused(sender, weights, folder, served_like, change):
    for version in (1, 2, 3):
        offer = sender.offer(version)
        change(weights)
    shutil.rmtree(folder / name_of(2))
    served = served_like(weights)
    with pytest.raises(EngineError, match="version 2 is not in"):
        DeltaReceiver(served).receive(offer)
    assert (served.version, served.torn) == (None, None)
    assert not served.tensors["a"].any()


def test_a_torn_engine_starts_at_the_last_whole_snapshot(sender, weights, served_like, assert_same, change):
    served = served_like(weights)
    receiver = DeltaReceiver(served)
    receiver.receive(sender.offer(1))
    change(weights)
    offer = sender.offer(2)

    def break_off() -> None:
        with served.writing(2):
            served.tensors["a"].fill_(7.0)
            raise RuntimeError("cut")

    with pytest.raises(EngineError, match="broke off: cut"):
        break_off()
    assert served.torn is not None
    assert "broke off half-way" in served.torn
    receiver.receive(offer)
    assert served.torn is None
    assert_same(served, weights)


def test_a_repeated_version_costs_nothing_and_writes_nothing(sender, weights, folder, served_like, assert_same, change):
    served = served_like(weights)
    receiver = DeltaReceiver(served)
    for version in (1, 2):
        change(weights)
        offer = sender.offer(version)
        receiver.receive(offer)
    written = (folder / name_of(2) / FILE).stat().st_ino
    again = sender.offer(2)
    assert again == offer
    assert (folder / name_of(2) / FILE).stat().st_ino == written
    receiver.receive(again)
    assert_same(served, weights)
