"""How an SGLang server is brought into a broadcast and given GPU handles: what it is asked, and what torch makes of it."""

import asyncio
import base64
import re
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from treadle.errors import EngineError
from treadle.weights import Offer, SentWeights, WeightSpec
from treadle.weights.base import DTYPES
from treadle.weights.cuda_ipc import pickled_handles
from treadle.weights.sglang_group import open_sglang_group


def fine(path, body):
    return 200, '{"success": true}'


def paths(asked):
    return [path for path, _ in asked]


class ServersRank:
    """A rank of a server in a broadcast: groups by torch's way as SGLang goes it, and weights cut out of flat buckets."""

    def __init__(self):
        self.group, self.weights = None, {}

    def __call__(self, path, body):
        if path == "/server_info":
            return 200, '{"tp_size": 1, "pp_size": 1, "dp_size": 1}'
        if path == "/init_weights_update_group":
            self.group = self.join(**body)
        if path == "/destroy_weights_update_group":
            self.leave()
        if path == "/update_weights_from_distributed":
            self.take(body)
        return fine(path, body)

    def join(self, master_address, master_port, rank_offset, world_size, group_name, backend):
        url, wait = f"tcp://{master_address}:{master_port}", timedelta(seconds=20)
        store, rank, size = next(dist.rendezvous(url, rank_offset, world_size, timeout=wait))
        store = dist.PrefixStore(group_name, store)
        make = dist.distributed_c10d._new_process_group_helper
        return make(size, rank, [], dist.Backend(backend), store, group_name=group_name, timeout=wait)[0]

    def take(self, body):
        assert body["load_format"] == "flattened_bucket"
        specs = [
            WeightSpec(tuple(shape), DTYPES[dtype]) for shape, dtype in zip(body["shapes"], body["dtypes"], strict=True)
        ]
        flat = torch.empty(sum(spec.num_bytes for spec in specs), dtype=torch.uint8)
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self.group.broadcast([flat], options).wait()
        for name, spec in zip(body["names"], specs, strict=True):
            self.weights[name], flat = flat[: spec.num_bytes].view(spec.dtype).view(spec.shape), flat[spec.num_bytes :]

    def leave(self):
        world = dist.distributed_c10d._world
        for known in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config):
            known.pop(self.group, None)
        self.group = None


@pytest.fixture
def rank():
    rank = ServersRank()
    yield rank
    rank.leave()


@pytest.fixture
def many_dir(tmp_path):
    """A model of two buckets, of which the second is one weight alone."""
    folder = tmp_path / "many"
    folder.mkdir()
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(1), "c": torch.zeros(50)}, folder / "model.safetensors")
    return folder


def group_sender(**tensors):
    return open_sglang_group(SentWeights(tensors), 1, bucket_bytes=64, timeout_seconds=20)


async def both_ends(engine, sender, version):
    """What each end raised."""
    ends = engine.receive(sender.offer(version)), asyncio.to_thread(sender.deliver)
    return await asyncio.gather(*ends, return_exceptions=True)


START = ["/pause_generation", "/server_info"]
WITHIN = ["/begin_weight_update", "/update_weights_from_distributed", "/update_weights_from_distributed"]
END = ["/end_weight_update", "/continue_generation"]


def test_a_server_takes_a_broadcast_in_a_group_of_its_own(told, many_dir, rank):
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(1), "c": torch.arange(50.0)}
    sender = group_sender(**tensors)

    async def use(engine):
        for version in (4, 5):
            for tensor in tensors.values():
                tensor += 1
            assert await both_ends(engine, sender, version) == [None, None]
            assert engine.version == version
            assert all(torch.equal(rank.weights[name], tensor) for name, tensor in tensors.items())
        await engine.close()

    asked = told(many_dir, rank, use)
    sender.close()
    assert paths(asked)[:-1] == [*START, "/init_weights_update_group", *WITHIN, *END, *START, *WITHIN, *END]
    updates = [body for path, body in asked if path == "/update_weights_from_distributed"]
    assert [body["names"] for body in updates[:2]] == [["a", "b"], ["c"]]
    assert [body["weight_version"] for body in updates] == [None, "4", None, "5"]
    assert [body["flush_cache"] for body in updates] == [False, True] * 2


def test_an_update_by_broadcast_that_breaks_off_ends_group_and_session_and_the_next_one_begins_anew(
    told, many_dir, rank
):
    tensors = {"a": torch.zeros(2, 3), "b": torch.ones(1), "c": torch.arange(50.0)}
    sender = open_sglang_group(SentWeights(tensors), 1, bucket_bytes=64, timeout_seconds=3)
    refusals = ["/begin_weight_update", "/update_weights_from_distributed"]

    def answers(path, body):
        if path in refusals:  # each of them once
            refusals.remove(path)
            return 400, '{"success": false, "message": "not so"}'
        return rank(path, body)

    async def use(engine):
        found = await both_ends(engine, sender, 4)
        assert "not so" in str(found[0])
        assert "did not reach all 1 ranks" in str(found[1])
        with pytest.raises(EngineError, match=r"no whole weights: the update to version 4 broke off half-way"):
            await engine.health()
        assert await both_ends(engine, sender, 4) == [None, None]
        await engine.health()
        await engine.close()

    asked = paths(told(many_dir, answers, use))
    sender.close()
    session = ["/begin_weight_update", "/end_weight_update", "/begin_weight_update"]  # one was open
    broke = ["/update_weights_from_distributed", "/destroy_weights_update_group", "/end_weight_update"]
    begun = [*START, "/init_weights_update_group", *session, *broke]
    assert asked[: len(begun)] == begun
    again = ["/init_weights_update_group", *WITHIN, "/end_weight_update"]
    assert [path for path in asked[len(begun) :] if "update" in path] == again


@pytest.mark.parametrize(
    ("shape", "info", "message"),
    [
        ((3, 2), '{"tp_size": 1, "pp_size": 1, "dp_size": 1}', "weight 'a'.* is sent, the engine has"),
        ((2, 3), '{"tp_size": 1, "pp_size": 2, "dp_size": 1}', "runs with pp_size > 1, .*take --weight-transport shm"),
        ((2, 3), '{"tp_size": 1, "pp_size": 1, "dp_size": 2}', "runs with dp_size > 1"),
    ],
)
def test_a_broadcast_that_a_server_can_not_take_is_refused_for_all_and_it_does_not_hear_of_it(
    told, model_dir, shape, info, message
):
    sender = group_sender(a=torch.zeros(shape))

    def answers(path, body):
        return (200, info) if path == "/server_info" else fine(path, body)

    async def use(engine):
        found = await both_ends(engine, sender, 4)
        assert all(isinstance(error, EngineError) for error in found)
        assert re.search(message, str(found[0]))
        assert "refused version 4" in str(found[1])
        await engine.health()
        await engine.close()

    asked = paths(told(model_dir, answers, use))
    sender.close()
    assert not any("update_group" in path or "weight_update" in path for path in asked)


def test_gpu_handles_are_pickled_for_each_rank_and_the_gpu_is_waited_for(told, model_dir):
    handle = {"handle": [0, {"b": "AAAA"}, 96, 0, {"b": "AAAA"}, 0, {"b": "AAAA"}, True], "offset": 2}
    where = {"gpus": {"0": "GPU-x"}, "handles": {"a": handle}}
    offer = Offer("cuda_ipc", 4, {"a": WeightSpec((2, 3), torch.float32)}, where)

    def answers(path, body):
        return (200, '{"tp_size": 2, "pp_size": 1, "dp_size": 1}') if path == "/server_info" else fine(path, body)

    async def use(engine):
        await engine.receive(offer)
        assert engine.version == 4

    asked = told(model_dir, answers, use)
    own = ["/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update", "/weights_checker"]
    assert [path for path in paths(asked) if path in own] == own
    update = dict(asked)["/update_weights_from_tensor"]
    assert [base64.b64decode(text) for text in update["serialized_named_tensors"]] == [pickled_handles(offer)] * 2
    assert update["weight_version"] == "4"
