"""What a vLLM server is asked, and what its replies become."""

import numpy as np
import pytest

from treadle.errors import EngineError
from treadle.rollout.engines.server_dialect import completion_of
from treadle.rollout.engines.vllm_engine.dialect import VllmDialect
from treadle.types import SamplingParams, Status

DIALECT = VllmDialect()
PLAIN = SamplingParams(5)


def reply(**changes):
    choice = {
        "index": 0,
        "token_ids": [7, 8, 0],
        "logprobs": {"content": [{"token_id": t, "logprob": -0.5 * i} for i, t in enumerate((7, 8, 0))]},
        "weight_versions": [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 3}],
        "finish_reason": "stop",
        "stop_reason": 0,
    }
    return {"choices": [{**choice, **changes}]}


def test_a_reply_becomes_a_completion():
    found = completion_of(DIALECT, reply(), 5, PLAIN, {0}, "vllm")
    assert (found.index, found.status, found.stop_reason) == (5, Status.COMPLETED, "eos")
    assert found.token_ids.tolist() == [7, 8, 0]
    assert found.logprobs.tolist() == [0.0, -0.5, -1.0]
    assert found.weight_versions.tolist() == [3, 3, 4]
    assert [a.dtype for a in (found.token_ids, found.logprobs, found.weight_versions)] == [
        np.int32,
        np.float32,
        np.int32,
    ]


@pytest.mark.parametrize(
    ("finish", "reason", "status", "said"),
    [
        ("stop", 0, Status.COMPLETED, "eos"),
        ("stop", None, Status.COMPLETED, "eos"),
        ("stop", 9, Status.COMPLETED, "stop token 9"),
        ("stop", "###", Status.COMPLETED, "stop string '###'"),
        ("length", None, Status.TRUNCATED, "length"),
        ("abort", None, Status.ABORTED, "abort"),
    ],
)
def test_endings_in_our_words(finish, reason, status, said):
    found = completion_of(DIALECT, reply(finish_reason=finish, stop_reason=reason), 0, PLAIN, {0}, "vllm")
    assert (found.status, found.stop_reason) == (status, said)


def test_an_abort_before_the_first_token_is_empty():
    nothing = reply(token_ids=[], logprobs=None, weight_versions=None, finish_reason="abort", stop_reason=None)
    found = completion_of(DIALECT, nothing, 0, PLAIN, {0}, "vllm")
    assert [len(a) for a in (found.token_ids, found.logprobs, found.weight_versions)] == [0, 0, 0]


@pytest.mark.parametrize(
    ("malformed", "message"),
    [
        ({}, "malformed reply.*choices"),
        ([], "malformed reply"),
        ({"choices": []}, "malformed reply"),
        (reply(token_ids=[7, 8]), "2 tokens with logprobs of 3"),
        (reply(token_ids=[7, 8, 9]), "logprobs of 3 or of other ones"),
        (reply(logprobs=None), "3 tokens with logprobs of 0"),
        (reply(weight_versions=[{"version": "3", "start": 0, "end": 2}]), "do not cover 3 tokens"),
        (reply(weight_versions=[{"version": "default", "start": 0, "end": 3}]), "malformed reply.*default"),
        (reply(finish_reason="error"), "ended a sample with 'error'"),
    ],
)
def test_malformed_replies_are_refused(malformed, message):
    with pytest.raises(EngineError, match=message):
        completion_of(DIALECT, malformed, 0, PLAIN, {0}, "vllm")


def test_logprobs_must_be_numbers():
    bad = reply()
    bad["choices"][0]["logprobs"]["content"][1]["logprob"] = float("nan")
    with pytest.raises(EngineError, match="no numbers"):
        completion_of(DIALECT, bad, 0, PLAIN, {0}, "vllm")


def test_what_ends_a_sample_is_said_in_full():
    sampling = SamplingParams(5, temperature=0.5, stop_token_ids=(9,), stop=("x",), seed=3)
    params = VllmDialect(seeded=False).request_of([1, 2], sampling, 0, {0, 4}, "name")["sampling_params"]
    assert (params["stop_token_ids"], params["ignore_eos"], params["detokenize"]) == ([0, 4, 9], True, True)
    assert "seed" not in params
    ignoring = SamplingParams(5, stop_token_ids=(9,), ignore_eos=True, seed=3)
    assert VllmDialect(seeded=False).request_of([1], ignoring, 0, {0}, "name")["sampling_params"]["stop_token_ids"] == [
        9
    ]
    seeds = [
        VllmDialect(seeded=True).request_of([1], ignoring, i, {0}, "name")["sampling_params"]["seed"] for i in range(3)
    ]
    assert len(set(seeds)) == 3
    assert all(0 <= seed < 2**63 for seed in seeds)
