import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treadle.errors import EngineError
from treadle.weights import SentWeights, WeightSpec
from treadle.weights.sglang_group import ServerRanks, open_sglang_group, whole_buckets

DTYPES = (torch.float32, torch.bfloat16, torch.uint8)
SPECS = st.lists(st.builds(WeightSpec, st.tuples(st.integers(0, 40)), st.sampled_from(DTYPES)), max_size=12)


@given(SPECS, st.integers(1, 300))
def test_buckets_hold_each_weight_whole_without_gaps_and_aligned(listed, bucket_bytes):
    specs = {str(i): spec for i, spec in enumerate(listed)}
    seen = []
    for layout in whole_buckets(specs, bucket_bytes):
        at = 0
        for name, offset in layout.offsets.items():
            assert offset == at
            assert offset % specs[name].dtype.itemsize == 0
            at += specs[name].num_bytes
            seen.append(name)
        assert at == layout.num_bytes
        assert at <= bucket_bytes or len([n for n in layout.offsets if specs[n].num_bytes]) == 1
    assert sorted(seen) == sorted(specs)


def meet(sender, seats, version, refusals):
    """What each end has to say, the sender first; all take part at once."""
    offer = sender.offer(version)
    said: list[object] = [None] * (1 + len(seats))

    def run(i, call, *args):
        try:
            said[i] = call(*args)
        except EngineError as error:
            said[i] = str(error)

    calls = [(sender.deliver,), *((seat.enter, offer, 1, no) for seat, no in zip(seats, refusals, strict=True))]
    threads = [threading.Thread(target=run, args=(i, *call)) for i, call in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    return said


def sender_to(receivers, seconds=20.0):
    return open_sglang_group(SentWeights({"a": torch.ones(3)}), receivers, timeout_seconds=seconds)


def test_if_one_server_refuses_no_server_is_to_hear_of_the_offer_and_the_meeting_goes_on():
    sender, seats = sender_to(3), [ServerRanks() for _ in range(3)]
    said = meet(sender, seats, 1, [None, EngineError("another model"), None])
    assert said[2] == "another model"
    assert said[1] == said[3] == "another engine refused version 1; its own error says why"
    assert said[0] == "an engine refused version 1; its own error says why"
    again = sender.offer(1)
    assert again.where["number"] == 2
    sender.close()


def test_servers_get_ranks_one_after_the_other_as_many_as_each_is_divided_into():
    sender, seats, found = sender_to(6), [ServerRanks() for _ in range(3)], {}
    offer = sender.offer(1)

    def enter(seat, ranks):
        found[ranks] = seat.enter(offer, ranks)

    threads = [threading.Thread(target=enter, args=pair) for pair in zip(seats, (1, 2, 3), strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    taken = sorted(rank for ranks, j in found.items() for rank in range(j.first_rank, j.first_rank + ranks))
    assert taken == [1, 2, 3, 4, 5, 6]
    assert all(joining.is_new for joining in found.values())
    assert len({joining.group for joining in found.values()}) == 1
    sender.close()


def test_one_server_too_many_is_an_error():
    sender = sender_to(1)
    with pytest.raises(EngineError, match="rank 2 came to a broadcast for 1"):
        ServerRanks().enter(sender.offer(1), 2)
    sender.close()


def test_a_server_that_never_comes_and_a_trainer_that_is_gone_are_deadlines_not_hangs():
    sender = sender_to(2, seconds=1.0)
    began = time.monotonic()
    said = meet(sender, [ServerRanks()], 1, [None])
    assert "did not reach all 2 ranks of the engines in 1 s a step" in str(said[0])
    offer = sender.offer(1)
    sender.close()
    with pytest.raises(EngineError, match=r"timed out|refused"):
        ServerRanks().enter(offer, 1)
    assert time.monotonic() - began < 15
