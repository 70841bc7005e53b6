import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from treadle.errors import EngineError
from treadle.weights import SentWeights
from treadle.weights.broadcast import BroadcastReceiver, open_broadcast


def push(sender, receivers, version) -> list[str | None]:
    """What each rank has to say, the sender first; all take part at once."""
    said: list[str | None] = [None] * (1 + len(receivers))
    offer = sender.offer(version)

    def run(rank, call, *args):
        try:
            call(*args)
        except EngineError as error:
            said[rank] = str(error)

    calls = [(sender.deliver,), *((receiver.receive, offer) for receiver in receivers)]
    threads = [threading.Thread(target=run, args=(rank, *call)) for rank, call in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    return said


@pytest.fixture
def weights():
    return {"a": torch.randn(300, 10), "b": torch.ones(7, dtype=torch.bfloat16), "c": torch.tensor([1, 2, 3])}


def test_all_engines_get_the_same_in_one_group(weights, served_like):
    sender = open_broadcast(SentWeights(weights), 2, bucket_bytes=1000, timeout_seconds=20.0)
    receivers = [BroadcastReceiver(served_like(weights)) for _ in range(2)]
    for version in (1, 2):
        weights["a"].add_(1)
        assert push(sender, receivers, version) == [None] * 3
        for receiver in receivers:
            assert receiver.served.version == version
            assert all(torch.equal(receiver.served.tensors[name], weight) for name, weight in weights.items())
    sender.close()


def test_if_one_engine_refuses_none_is_changed_and_the_group_goes_on(weights, served_like):
    sender = open_broadcast(SentWeights(weights), 2, timeout_seconds=20.0, bucket_bytes=4096)
    receivers = [BroadcastReceiver(served_like(weights)) for _ in range(2)]
    receivers[1].served.version = 5
    said = push(sender, receivers, 4)
    assert said[2] == "version 4 is offered, the engine already has 5; restart it"
    assert said[0] == said[1]
    assert said[0] is not None
    assert "of 2 refused version 4; its own error says why" in said[0]
    assert [r.served.torn for r in receivers] == [None, None]
    assert not receivers[0].served.tensors["a"].any()
    began = time.monotonic()
    assert push(sender, receivers, 5) == [None] * 3
    assert time.monotonic() - began < 10
    assert torch.equal(receivers[0].served.tensors["a"], weights["a"])
    sender.close()


class Lost(dict[str, torch.Tensor]):
    """Weights of which the last can't be read."""

    def __getitem__(self, name):
        if name == "c":
            raise RuntimeError("the trainer lost its weights")
        return super().__getitem__(name)


def test_a_sender_that_breaks_off_lets_the_engine_go_at_once(weights, served_like):
    sender = open_broadcast(SentWeights(Lost(weights)), 1, bucket_bytes=1000, timeout_seconds=20.0)
    receiver = BroadcastReceiver(served_like(weights))
    offer, began = sender.offer(1), time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(receiver.receive, offer)
        with pytest.raises(
            EngineError, match="the trainer lost its weights"
        ) as held:  # and its frames, which know the group
            sender.deliver()
        with pytest.raises(EngineError):
            receiving.result(30)
    assert time.monotonic() - began < 10
    assert receiver.served.torn is not None
    assert held.value is not None


def test_an_engine_that_never_comes_is_a_deadline_not_a_hang(weights, served_like):
    sender = open_broadcast(SentWeights(weights), 2, timeout_seconds=1.0, bucket_bytes=4096)
    receiver = BroadcastReceiver(served_like(weights))
    began = time.monotonic()
    said = push(sender, [receiver], 1)
    assert time.monotonic() - began < 15
    assert said[0] is not None
    assert "version 1 did not reach all 2 ranks of the engines in 1 s" in said[0]
    assert said[1] is not None
    assert (receiver.served.version, receiver.served.torn) == (None, None)
    both = [receiver, BroadcastReceiver(served_like(weights))]
    assert push(sender, both, 1) == [None] * 3  # a new group
    sender.close()


def test_bytes_that_differ_after_all_are_noticed(weights, monkeypatch, served_like):
    """One engine's copy is changed on the way, as broken memory would."""
    sender = open_broadcast(SentWeights(weights), 1, timeout_seconds=20.0, bucket_bytes=4096)
    receiver = BroadcastReceiver(served_like(weights))
    assert push(sender, [receiver], 1) == [None, None]
    group = receiver._intake._ranks._group
    assert group is not None
    honest = group.broadcast

    def broken(buffer):
        honest(buffer)
        buffer[5] ^= 1

    with monkeypatch.context() as patch:
        patch.setattr(group, "broadcast", broken)
        said = push(sender, [receiver], 2)
    assert all("other bytes of version 2" in (line or "") for line in said)
    assert receiver.served.torn is not None
    assert push(sender, [receiver], 2) == [None, None]
    assert receiver.served.torn is None
    sender.close()


def test_an_unknown_backend_is_refused(weights, served_like):
    sender = open_broadcast(SentWeights(weights), 1, backend="pigeon", device=torch.device("cpu"), timeout_seconds=5.0)
    said = push(sender, [BroadcastReceiver(served_like(weights))], 1)
    assert said[0] is not None
    assert "gloo and nccl, not 'pigeon'" in said[0]
    assert said[1] is not None
    sender.close()


def test_an_engine_that_was_started_anew_takes_the_place_of_the_old_one(weights, served_like):
    sender = open_broadcast(SentWeights(weights), 2, timeout_seconds=20.0, bucket_bytes=4096)
    receivers = [BroadcastReceiver(served_like(weights)) for _ in range(2)]
    assert push(sender, receivers, 1) == [None] * 3
    for version in (2, 3):
        receivers[version % 2].close()
        receivers[version % 2] = BroadcastReceiver(served_like(weights))
        weights["a"].add_(1)
        assert push(sender, receivers, version) == [None] * 3
        assert all(torch.equal(r.served.tensors["a"], weights["a"]) for r in receivers)
    sender.close()


def test_an_engine_may_receive_from_several_senders_in_turn(weights, served_like):
    senders = [open_broadcast(SentWeights(weights), 1, timeout_seconds=20.0, bucket_bytes=4096) for _ in range(2)]
    receiver = BroadcastReceiver(served_like(weights))
    for version in range(1, 5):
        weights["a"].add_(1)
        assert push(senders[version % 2], [receiver], version) == [None] * 2
        assert torch.equal(receiver.served.tensors["a"], weights["a"])
    for sender in senders:
        sender.close()


def test_on_one_machine_it_meets_where_no_other_machine_reaches(weights):
    sender = open_broadcast(SentWeights(weights), 1)
    where = sender.offer(1).where
    assert where["host"] == "127.0.0.1"
    with socket.create_connection(("127.0.0.1", where["port"]), 2):
        pass
    port = f"{where['port']:04X}"
    listening = [
        line.split()[1]
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        if Path(table).exists()
        for line in Path(table).read_text().splitlines()
        if line.split()[3] == "0A"
    ]
    assert {address for address in listening if address.endswith(f":{port}")} <= {f"0100007F:{port}"}
    sender.close()
