"""The client of an SGLang server without one: what it asks, what it makes of replies, and updates that break off."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.server_checks import check_broken_update
from treadle.errors import EngineError, EngineLostError
from treadle.rollout.engines.server_dialect import completion_of
from treadle.rollout.engines.server_engine import ServerEngine, ServerSettings
from treadle.rollout.engines.sglang_engine.dialect import SglangDialect
from treadle.types import SamplingParams, Status
from treadle.weights import SentWeights
from treadle.weights.shm import ShmSender

SECONDS = 30.0
PLAIN = SamplingParams(5)
DIALECT = SglangDialect(Path("folder"), torch.float32, tied=True)


def reply(finish=None, **about):
    meta = {
        "output_token_logprobs": [[-0.5 * i, t, None] for i, t in enumerate((7, 8, 0))],
        "weight_versions": [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 3}],
        "finish_reason": finish or {"type": "stop", "matched": 0},
    }
    return {"text": "", "output_ids": [7, 8, 0], "meta_info": {**meta, **about}}


# What is asked, what is answered


def test_a_reply_becomes_a_completion():
    found = completion_of(DIALECT, reply(), 5, PLAIN, {0}, "sglang")
    assert (found.index, found.status, found.stop_reason) == (5, Status.COMPLETED, "eos")
    assert found.token_ids.tolist() == [7, 8, 0]
    assert found.logprobs.tolist() == [0.0, -0.5, -1.0]
    assert found.weight_versions.tolist() == [3, 3, 4]
    arrays = found.token_ids, found.logprobs, found.weight_versions
    assert [array.dtype for array in arrays] == [np.int32, np.float32, np.int32]


@pytest.mark.parametrize(
    ("finish", "status", "said"),
    [
        ({"type": "stop", "matched": 0}, Status.COMPLETED, "eos"),
        ({"type": "stop", "matched": 9}, Status.COMPLETED, "stop token 9"),
        ({"type": "stop", "matched": "###"}, Status.COMPLETED, "stop string '###'"),
        ({"type": "length", "length": 3}, Status.TRUNCATED, "length"),
        ({"type": "abort", "message": "Aborted", "status_code": None}, Status.ABORTED, "abort"),
        ({"type": "abort", "message": "Abort in waiting queue"}, Status.ABORTED, "abort"),
    ],
)
def test_endings_in_our_words(finish, status, said):
    found = completion_of(DIALECT, reply(finish), 0, PLAIN, {0}, "sglang")
    assert (found.status, found.stop_reason) == (status, said)


def test_an_abort_before_the_first_token_is_empty():
    nothing = {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort", "message": "Abort in waiting queue"}}}
    found = completion_of(DIALECT, nothing, 0, SamplingParams(5, top_k=3), {0}, "sglang")
    assert [len(a) for a in (found.token_ids, found.logprobs, found.weight_versions)] == [0, 0, 0]


@pytest.mark.parametrize(
    ("malformed", "message"),
    [
        ({}, "malformed reply.*meta_info"),
        ([], "malformed reply"),
        ({**reply(), "output_ids": [7, 8]}, "do not cover|2 tokens with logprobs of 3"),
        ({**reply(), "output_ids": [7, 8, 9]}, "logprobs of 3 or of other ones"),
        (reply(output_token_logprobs=None), "3 tokens with logprobs of 0"),
        (reply(output_token_logprobs=[[-0.1]] * 3), "malformed reply"),
        (reply(output_token_logprobs=[[float("nan"), t, None] for t in (7, 8, 0)]), "no numbers"),
        (reply(weight_versions=[{"version": "3", "start": 0, "end": 2}]), "do not cover 3 tokens"),
        (reply(weight_versions=[{"version": "default", "start": 0, "end": 3}]), "malformed reply.*default"),
        (reply({"type": "abort", "message": "support too large"}), "ended a sample with 'abort': support too large"),
        (reply({"type": "error"}), "ended a sample with 'error'"),
    ],
)
def test_malformed_replies_are_refused(malformed, message):
    with pytest.raises(EngineError, match=message):
        completion_of(DIALECT, malformed, 0, PLAIN, {0}, "sglang")


def test_what_ends_a_sample_is_said_in_full():
    sampling = SamplingParams(5, temperature=0.5, stop_token_ids=(9,), stop=("x",), seed=3)
    body = DIALECT.request_of([1, 2], sampling, 0, {0, 4}, "name")
    params = body["sampling_params"]
    assert (body["input_ids"], body["rid"], body["return_logprob"]) == ([1, 2], "name", True)
    assert (params["stop_token_ids"], params["ignore_eos"], params["stop"]) == ([0, 4, 9], False, ["x"])
    seeds = [DIALECT.request_of([1], sampling, i, {0}, "n")["sampling_params"]["sampling_seed"] for i in range(3)]
    assert len(set(seeds)) == 3
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert (
        "sampling_seed" not in DIALECT.request_of([1], SamplingParams(5, temperature=0), 0, {0}, "n")["sampling_params"]
    )


def test_stop_tokens_that_the_server_ignores_with_the_eos_are_found_in_the_reply():
    sampling = SamplingParams(5, stop_token_ids=(8, 0), ignore_eos=True)
    assert DIALECT.request_of([1], sampling, 0, {0}, "n")["sampling_params"]["ignore_eos"] is True
    found = completion_of(DIALECT, reply({"type": "length", "length": 3}), 0, sampling, {0}, "sglang")
    assert (found.status, found.stop_reason) == (Status.COMPLETED, "stop token 8")
    assert [array.tolist() for array in (found.token_ids, found.logprobs, found.weight_versions)] == [
        [7, 8],
        [0.0, -0.5],
        [3, 3],
    ]
    none = completion_of(DIALECT, reply({"type": "length"}), 0, SamplingParams(5, ignore_eos=True), {0}, "sglang")
    assert (none.status, len(none.token_ids)) == (Status.TRUNCATED, 3)


@pytest.mark.parametrize("cut", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_of_a_cut_distribution_its_own_logprobs_are_taken(cut):
    sampling = SamplingParams(5, **cut)
    assert DIALECT.request_of([1], sampling, 0, {0}, "n")["return_sampling_mask"] is True
    found = completion_of(DIALECT, reply(output_token_sampling_logprobs=[-0.25, 0, -2]), 0, sampling, {0}, "sglang")
    assert found.logprobs.tolist() == [-0.25, 0.0, -2.0]
    with pytest.raises(EngineError, match=r"malformed reply.*output_token_sampling_logprobs"):
        completion_of(DIALECT, reply(), 0, sampling, {0}, "sglang")
    with pytest.raises(EngineError, match="3 tokens with logprobs of 2"):
        completion_of(DIALECT, reply(output_token_sampling_logprobs=[0, 0]), 0, sampling, {0}, "sglang")


# Updates


@pytest.fixture
def sender(tmp_path):
    weights = SentWeights({"a": torch.arange(6.0).view(2, 3)})
    sender = ShmSender(weights, tmp_path)
    yield sender
    sender.close()


def fine(path, body):
    return 200, '{"success": true}'


def paths(asked):
    return [path for path, _ in asked]


def test_an_update_is_a_folder_of_safetensors_between_pause_and_resume(told, model_dir, sender):
    seen = []

    def answers(path, body):
        if path == "/update_weights_from_disk":
            (file,) = Path(body["model_path"]).iterdir()
            seen.append((load_file(file), body["weight_version"], body["flush_cache"]))
        return fine(path, body)

    async def use(engine):
        await engine.receive(sender.offer(4))
        assert engine.version == 4

    asked = told(model_dir, answers, use)
    assert paths(asked) == ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]
    assert asked[0][1] == {"mode": "retract"}
    ((weights, version, flushed),) = seen
    assert (weights.keys(), version, flushed) == ({"a"}, "4", True)
    assert torch.equal(weights["a"], torch.arange(6.0).view(2, 3))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"a": torch.zeros(3, 2)}, "weight 'a': .* is sent, the engine has"),
        ({"a": torch.zeros(2, 3, dtype=torch.bfloat16)}, "weight 'a': .*bfloat16.* is sent, the engine has"),
        ({"a": torch.zeros(2, 3), "b": torch.zeros(1)}, "weight 'b' is sent, but the engine has no such weight"),
        ({}, "the engine's weight 'a' is not sent"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_server_hears_of_it(told, model_dir, tmp_path, weights, message):
    sender = ShmSender(SentWeights(weights), tmp_path)

    async def use(engine):
        await engine.set_version(3)
        with pytest.raises(EngineError, match=message):
            await engine.receive(sender.offer(4))
        assert engine.version == 3
        await engine.health()

    asked = told(model_dir, fine, use)
    sender.close()
    assert paths(asked) == ["/update_weight_version", "/pause_generation", "/continue_generation", "/server_info"]


def test_a_damaged_file_is_refused_before_the_server_hears_of_it(told, model_dir, sender):
    offer = sender.offer(4)
    with Path(offer.where["path"]).open("r+b") as file:
        file.seek(-3, 2)
        file.write(b"x")

    async def use(engine):
        with pytest.raises(EngineError, match="damaged"):
            await engine.receive(offer)
        await engine.health()

    assert "/update_weights_from_disk" not in paths(told(model_dir, fine, use))


def test_while_the_server_reads_the_file_nobody_writes_over_it(told, model_dir, sender):
    read = []

    def answers(path, body):
        if path == "/update_weights_from_disk":
            for version in (5, 6, 7):  # other versions come, as another engine might want them
                sender.offer(version)
            read.append(load_file(Path(body["model_path"]) / "model.safetensors")["a"])
        return fine(path, body)

    async def use(engine):
        offer = sender.offer(4)
        await engine.receive(offer)

    told(model_dir, answers, use)
    assert torch.equal(read[0], torch.arange(6.0).view(2, 3))


def test_after_an_update_that_broke_off_nothing_is_generated_until_a_whole_one(told, model_dir, sender):
    updates = []

    def answers(path, body):
        if path == "/update_weights_from_disk":
            updates.append(body)
            if len(updates) == 1:
                return 400, '{"success": false, "message": "out of memory"}'
        return fine(path, body)

    def use(engine):
        return check_broken_update(engine, lambda: sender.offer(4), r"\(400\).*out of memory")

    asked = paths(told(model_dir, answers, use))
    assert asked.count("/continue_generation") == 1
    assert asked.index("/continue_generation") > len(asked) - 3


# State


def test_what_is_asked_while_the_server_is_stopped_waits_here_and_can_be_aborted(told, model_dir):
    async def use(engine):
        async def one():
            return [c async for c in engine.generate([1, 2], SamplingParams(4), 1)]

        await engine.pause()
        waiting = asyncio.create_task(one())
        await asyncio.sleep(0.05)
        await engine.abort()
        (cut,) = await waiting
        assert (cut.status, len(cut.token_ids)) == (Status.ABORTED, 0)
        later = asyncio.create_task(one())
        await asyncio.sleep(0.05)
        assert not later.done()
        await engine.resume()
        (whole,) = await later
        assert whole.token_ids.tolist() == [7, 8, 0]

    def answers(path, body):
        return (200, json.dumps(reply())) if path == "/generate" else fine(path, body)

    asked = paths(told(model_dir, answers, use))
    assert asked == ["/pause_generation", "/continue_generation", "/generate"]


def test_a_caller_that_leaves_is_said_to_have_left(told, model_dir):
    async def use(engine):
        async def one():
            return [c async for c in engine.generate([1, 2], SamplingParams(4), 1)]

        task = asyncio.create_task(one())
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.2)

    (generate, *others) = told(model_dir, lambda path, body: None if path == "/generate" else fine(path, body), use)
    assert others == [("/abort_request", {"rid": generate[1]["rid"]})]


def test_nobody_there_is_lost(model_dir):
    dialect = SglangDialect(model_dir, torch.float32, tied=True)

    async def main():
        engine = ServerEngine("127.0.0.1:9", "engine 7", ServerSettings(dialect, {0}, 64))
        with pytest.raises(EngineLostError, match="engine 7 is gone"):
            await engine.health()

    asyncio.run(main())
