"""The client of a vLLM server without one: what it asks, what it makes of replies, and servers that never serve."""

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from treadle.errors import DeadlineError, EngineError, EngineLostError
from treadle.rollout.engines.server_engine import ServerLimits
from treadle.rollout.engines.server_start import Client, ServerLaunch
from treadle.rollout.engines.vllm_engine import VllmDialect, start_vllm
from treadle.rollout.engines.vllm_engine.launch import arguments_of, plugin_folder, variables_of
from treadle.rollout.engines.vllm_engine.replies import completion_of, request_of
from treadle.types import SamplingParams, Status
from treadle.weights import Offer, WeightSpec

SECONDS = 30.0


def client(length: int, **limits: float) -> Client:
    return Client(VllmDialect(), {0}, ServerLimits(length, **limits))


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


# What is asked, what is answered


def test_a_reply_becomes_a_completion():
    found = completion_of(reply(), 5, {0}, "vllm")
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
    found = completion_of(reply(finish_reason=finish, stop_reason=reason), 0, {0}, "vllm")
    assert (found.status, found.stop_reason) == (status, said)


def test_an_abort_before_the_first_token_is_empty():
    nothing = reply(token_ids=[], logprobs=None, weight_versions=None, finish_reason="abort", stop_reason=None)
    found = completion_of(nothing, 0, {0}, "vllm")
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
        completion_of(malformed, 0, {0}, "vllm")


def test_logprobs_must_be_numbers():
    bad = reply()
    bad["choices"][0]["logprobs"]["content"][1]["logprob"] = float("nan")
    with pytest.raises(EngineError, match="no numbers"):
        completion_of(bad, 0, {0}, "vllm")


def test_what_ends_a_sample_is_said_in_full():
    sampling = SamplingParams(5, temperature=0.5, stop_token_ids=(9,), stop=("x",), seed=3)
    params = request_of([1, 2], sampling, 0, {0, 4}, seeded=False)["sampling_params"]
    assert (params["stop_token_ids"], params["ignore_eos"], params["detokenize"]) == ([0, 4, 9], True, True)
    assert "seed" not in params
    ignoring = SamplingParams(5, stop_token_ids=(9,), ignore_eos=True, seed=3)
    assert request_of([1], ignoring, 0, {0}, seeded=False)["sampling_params"]["stop_token_ids"] == [9]
    seeds = [request_of([1], ignoring, i, {0}, seeded=True)["sampling_params"]["seed"] for i in range(3)]
    assert len(set(seeds)) == 3
    assert all(0 <= seed < 2**63 for seed in seeds)


# Servers that do not serve


@pytest.fixture
def launch(tmp_path):
    """`launch(body, seconds=10)`: a server whose "interpreter" answers the probe, then runs `body` instead of vLLM."""

    def make(body: str, seconds: float = 10.0) -> ServerLaunch:
        python = tmp_path / "python"
        answer = json.dumps({"vllm": "0", "xxhash": True, "tag": "x"})
        python.write_text(f"#!/bin/sh\nif [ \"$1\" = -c ]; then echo '{answer}'; exit 0; fi\n{body}\n")
        python.chmod(0o700)
        return ServerLaunch(str(python), "model", "float32", "cpu", tmp_path / "logs" / "server.log", seconds)

    return make


def start(launch: ServerLaunch):
    return asyncio.run(asyncio.wait_for(start_vllm(launch, client(256)), SECONDS))


def test_a_server_that_ends_at_its_start_is_quoted(launch):
    with pytest.raises(EngineError, match=r"did not start: .*no such model \| the server ended with exit code 3"):
        start(launch("echo 'ValueError: no such model'; exit 3"))


def test_a_server_that_never_serves_runs_into_the_deadline_and_is_ended(launch, tmp_path):
    body = f"echo loading; echo $$ > {tmp_path / 'pid'}; sleep 600 & wait"
    with pytest.raises(DeadlineError, match=r"did not serve within 0\.5 s.*engine-start-timeout.*ends with: loading"):
        start(launch(body, seconds=0.5))
    server = int((tmp_path / "pid").read_text())
    _until(lambda: not _runs(server))


def test_an_interpreter_without_vllm_is_named(tmp_path):
    with pytest.raises(EngineError, match=r"has no vllm; install it there or name another.*--engine-python"):
        plugin_folder(sys.executable, tmp_path)


def test_the_plugin_is_found_by_its_entry_point_alone(launch, tmp_path):
    """By an interpreter that knows nothing of this environment but the folder."""
    folder = plugin_folder(launch("").python, tmp_path / "plugin")
    script = (
        "import importlib.metadata as m, sys; sys.path.insert(0, sys.argv[1]); "
        "(e,) = [e for e in m.entry_points(group='vllm.general_plugins') if e.name == 'treadle']; "
        "print(e.value)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", script, str(folder)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "treadle.weights.vllm_plugin:register"
    assert plugin_folder(launch("").python, tmp_path / "plugin") == folder


def test_no_interpreter_is_named(tmp_path):
    with pytest.raises(EngineError, match=r"can't run .*nothing-there.*--engine-python"):
        plugin_folder(str(tmp_path / "nothing-there"), tmp_path)


@pytest.mark.parametrize("killed", ["owner", "guard"])
def test_a_server_ends_when_its_owner_or_its_guard_is_killed(killed, tmp_path):
    """Also what the server started."""
    owner = f"""
import sys, time
from pathlib import Path
from treadle.rollout.engines.server_process import ServerCommand, ServerProcess
script = "import subprocess, sys; c = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); " \\
    "print(c.pid, flush=True); c.wait()"
server = ServerProcess.start(ServerCommand("x", [sys.executable, "-c", script], {{}}, Path({str(tmp_path / "log")!r})))
print(server.process.pid, flush=True)
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", owner], stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    guard = int(process.stdout.readline())
    log = tmp_path / "log"
    _until(lambda: log.is_file() and log.read_text().strip())
    grandchild = int(log.read_text())
    (process if killed == "owner" else psutil.Process(guard)).kill()
    _until(lambda: not _runs(guard) and not _runs(grandchild))
    process.kill()
    process.wait()


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _until(happens) -> None:
    deadline = time.monotonic() + 20
    while not happens():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


# Servers that answer wrongly, or not at all


def talk(answer: bytes | None, use):
    """Run `use(engine)` against a server that gives every request this answer, or none."""

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        if answer is None:
            await asyncio.sleep(SECONDS)
        writer.write(answer or b"")
        writer.close()

    async def main():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        engine = client(64, answer_seconds=0.3).engine(f"127.0.0.1:{port}", "engine 7")
        try:
            return await asyncio.wait_for(use(engine), SECONDS)
        finally:
            server.close()

    return asyncio.run(main())


def http(status: int, body: str) -> bytes:
    return f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode()


async def one(engine):
    return [c async for c in engine.generate([1, 2], SamplingParams(4), 1)]


def test_a_server_that_hangs_is_named_with_what_it_was_asked():
    with pytest.raises(EngineLostError, match=r"engine 7 did not answer /pause within 0\.3 s"):
        talk(None, lambda engine: engine.pause())


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (http(200, "<html>"), EngineError, "with no JSON: '<html>'"),
        (http(200, '{"choices": 3}'), EngineError, "malformed reply"),
        (http(400, '{"error": "n is wrong"}'), EngineError, r"refused .* \(400\): .*n is wrong"),
        (http(500, "EngineDeadError"), EngineLostError, "EngineDeadError"),
        (b"HTTP/1.1 200 X\r\nContent-Length: 90\r\n\r\nhalf", EngineLostError, "engine 7 is gone"),
        (b"", EngineLostError, "engine 7 is gone"),
    ],
)
def test_answers_that_are_none(answer, kind, message):
    with pytest.raises(kind, match=message) as caught:
        talk(answer, one)
    assert type(caught.value) is kind or kind is EngineError
    assert isinstance(caught.value, EngineLostError) is (kind is EngineLostError)


def test_nobody_there_is_lost():
    async def main():
        engine = client(64).engine("127.0.0.1:9", "engine 7")
        with pytest.raises(EngineLostError, match="engine 7 is gone"):
            await one(engine)

    asyncio.run(main())


# An update that breaks off

OFFER = Offer("shm", 4, {"w": WeightSpec((2,), torch.float32)}, {"path": "x", "digest": "y"})


def told(refused: set[tuple[str, int]], use):
    """Run `use(engine)` against a server that refuses the given (path, how many times it was asked before); what it was asked."""
    asked: list[str] = []

    async def serve(reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        path = head.split()[1].split("?")[0]
        no = (path, asked.count(path)) in refused
        asked.append(path)
        writer.write(http(500, '{"error": "out of memory"}') if no else http(200, '{"success": true}'))
        writer.close()

    async def main():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        engine = client(64, answer_seconds=5).engine(f"127.0.0.1:{port}", "engine 7")
        await asyncio.wait_for(use(engine), SECONDS)
        server.close()

    asyncio.run(main())
    return asked


def test_an_update_that_is_refused_before_it_begins_changes_nothing():
    async def use(engine):
        await engine.set_version(3)
        with pytest.raises(EngineError, match=r"refused /update_weights \(500\): .*out of memory"):
            await engine.receive(OFFER)
        assert engine.version == 3
        await engine.health()

    asked = told({("/update_weights", 0)}, use)
    assert asked[1:5] == ["/pause", "/start_weight_update", "/update_weights", "/resume"]


def test_after_an_update_that_broke_off_nothing_is_generated_until_a_whole_one():
    async def use(engine):
        await engine.set_version(3)
        with pytest.raises(EngineError, match="out of memory"):
            await engine.receive(OFFER)
        for refusal in (one(engine), engine.health()):
            with pytest.raises(EngineError, match=r"no whole weights: the update to version 4 broke off half-way"):
                await refusal
        await engine.pause()
        await engine.resume()  # as a pool does: it must not go on
        assert engine.version == 3
        await engine.receive(OFFER)
        assert engine.version == 4
        await engine.health()

    asked = told({("/update_weights", 1)}, use)
    assert asked.count("/resume") == 1
    assert asked.index("/resume") > asked.index("/reset_prefix_cache")


def test_an_older_version_is_refused():
    async def use(engine):
        await engine.set_version(9)
        with pytest.raises(EngineError, match="version 4 is offered, engine 7 already has 9"):
            await engine.receive(OFFER)

    assert told(set(), use) == ["/update_weight_version"]


# Arguments


def test_arguments_of_the_user_go_to_the_server_as_they_are():
    given = {"max_model_len": "512", "enforce-eager": True, "enable_prefix_caching": False, "lora_modules": ("a", "b")}
    launch = ServerLaunch("python", "folder", "bfloat16", "cpu", Path("log"), 1.0, arguments=given)
    words = arguments_of(launch, 4321)
    text = " ".join(words)
    assert "--max-model-len 512" in text
    assert "--enforce-eager" in words
    assert "--no-enable-prefix-caching" in words
    assert "--lora-modules a b" in text
    assert "--port 4321" in text
    assert "--logprobs-mode processed_logprobs" in text
    assert "--enable-sleep-mode" not in words
    assert "--tensor-parallel-size" not in words


def test_a_server_on_several_gpus_sleeps_and_shares_the_model_out():
    words = arguments_of(ServerLaunch("python", "folder", "bfloat16", "cuda", Path("log"), 1.0, gpus=4), 4321)
    assert "--enable-sleep-mode" in words
    assert "--tensor-parallel-size 4" in " ".join(words)


def test_the_variables_give_a_cpu_server_its_share(tmp_path, monkeypatch):
    launch = ServerLaunch("python", "folder", "bfloat16", "cpu", Path("log"), 1.0, kv_cache_gib=2.6, threads=3)
    found = variables_of(launch, tmp_path)
    assert (found["VLLM_CPU_KVCACHE_SPACE"], found["OMP_NUM_THREADS"]) == ("3", "3")
    assert found["PYTHONPATH"] == str(tmp_path)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "9")
    assert variables_of(launch, tmp_path)["VLLM_CPU_KVCACHE_SPACE"] == "9"
