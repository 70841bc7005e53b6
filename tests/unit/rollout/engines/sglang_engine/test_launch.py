"""What an SGLang server is started with, and interpreters that can't."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from treadle.errors import EngineError
from treadle.rollout.engines.server_kind import ServerLaunch
from treadle.rollout.engines.sglang_engine.launch import SGLANG

LAUNCH = ServerLaunch("python", "folder", "bfloat16", "cpu", Path("log"), 1.0)


def test_an_interpreter_without_sglang_is_named(tmp_path):
    with pytest.raises(EngineError, match=r"has no sglang; install it there or name another.*--engine-python"):
        SGLANG.environment(replace(LAUNCH, python=sys.executable))
    with pytest.raises(EngineError, match=r"can't run .*nothing-there.*--engine-python"):
        SGLANG.environment(replace(LAUNCH, python=str(tmp_path / "nothing-there")))


def test_arguments_of_the_user_go_to_the_server_as_they_are(tiny_model_dir):
    given = {"attention_backend": "torch_native", "disable-cuda-graph": True, "context_length": "100"}
    launch = ServerLaunch("python", str(tiny_model_dir), "float32", "cpu", Path("log"), 1.0, 0.5, arguments=given)
    words = SGLANG.command_line(launch, 4321)
    text = " ".join(words)
    assert "--attention-backend torch_native" in text
    assert "--disable-cuda-graph" in words
    assert "--port 4321" in text
    assert "--context-length 108" in text  # with those that the server keeps for itself
    assert f"--max-total-tokens {2**29 // (2 * 2 * 2 * 8 * 4)}" in text  # k and v, 2 layers, 2 heads of 8, 4 bytes
    assert "--enable-memory-saver" not in words
    assert "--tensor-parallel-size" not in words
    plain = ServerLaunch("python", str(tiny_model_dir), "float32", "cpu", Path("log"), 1.0)
    assert "--context-length 264" in " ".join(SGLANG.command_line(plain, 4321))


def test_a_server_on_several_gpus_sleeps_and_shares_the_model_out(tiny_model_dir):
    launch = ServerLaunch("python", str(tiny_model_dir), "bfloat16", "cuda", Path("log"), 1.0, gpus=4)
    words = SGLANG.command_line(launch, 4321)
    assert {"--enable-memory-saver", "--enable-weights-cpu-backup"} <= set(words)
    assert "--tensor-parallel-size 4" in " ".join(words)
    assert "--device" not in words
    assert "--max-total-tokens" not in words


def test_the_variables_give_a_cpu_server_its_share(monkeypatch, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho '{\"engine\": true}'\n")
    python.chmod(0o700)
    launch = replace(LAUNCH, python=str(python), threads=3)
    found = SGLANG.environment(launch)
    assert (found["SGLANG_USE_CPU_ENGINE"], found["OMP_NUM_THREADS"]) == ("1", "3")
    monkeypatch.setenv("SGLANG_REQUEST_STATE_WAIT_TIMEOUT", "9")
    assert SGLANG.environment(launch)["SGLANG_REQUEST_STATE_WAIT_TIMEOUT"] == "9"
