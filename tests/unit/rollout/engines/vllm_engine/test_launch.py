"""vLLM servers that do not start, the plugin that they find, and the arguments that they get."""

import asyncio
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.server_checks import is_running, wait_until
from treadle.errors import DeadlineError, EngineError
from treadle.rollout.engines.server_engine import ServerSettings
from treadle.rollout.engines.server_kind import ServerLaunch
from treadle.rollout.engines.vllm_engine.dialect import VllmDialect
from treadle.rollout.engines.vllm_engine.launch import VLLM, plugin_folder

SECONDS = 30.0


@pytest.fixture
def launch(tmp_path):
    """`launch(body, seconds=10)`: a server whose "interpreter" answers the probe, then runs `body` instead of vLLM."""

    def make(body: str, seconds: float = 10.0) -> ServerLaunch:
        python = tmp_path / "python"
        answer = json.dumps({"engine": True, "xxhash": True, "tag": "x"})
        python.write_text(f"#!/bin/sh\nif [ \"$1\" = -c ]; then echo '{answer}'; exit 0; fi\n{body}\n")
        python.chmod(0o700)
        return ServerLaunch(str(python), "model", "float32", "cpu", tmp_path / "logs" / "server.log", seconds)

    return make


def start(launch: ServerLaunch):
    return asyncio.run(asyncio.wait_for(VLLM.start(launch, ServerSettings(VllmDialect(), {0}, 256)), SECONDS))


def test_a_server_that_ends_at_its_start_is_quoted(launch):
    with pytest.raises(EngineError, match=r"did not start: .*no such model \| the server ended with exit code 3"):
        start(launch("echo 'ValueError: no such model'; exit 3"))


def test_a_server_that_never_serves_runs_into_the_deadline_and_is_ended(launch, tmp_path):
    body = f"echo loading; echo $$ > {tmp_path / 'pid'}; sleep 600 & wait"
    with pytest.raises(DeadlineError, match=r"did not serve within 0\.5 s.*engine-start-timeout.*ends with: loading"):
        start(launch(body, seconds=0.5))
    server = int((tmp_path / "pid").read_text())
    wait_until(lambda: not is_running(server))


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


def test_arguments_of_the_user_go_to_the_server_as_they_are():
    given = {"max_model_len": "512", "enforce-eager": True, "enable_prefix_caching": False, "lora_modules": ("a", "b")}
    launch = ServerLaunch("python", "folder", "bfloat16", "cpu", Path("log"), 1.0, arguments=given)
    words = VLLM.command_line(launch, 4321)
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
    words = VLLM.command_line(ServerLaunch("python", "folder", "bfloat16", "cuda", Path("log"), 1.0, gpus=4), 4321)
    assert "--enable-sleep-mode" in words
    assert "--tensor-parallel-size 4" in " ".join(words)


def test_the_variables_give_a_cpu_server_its_share(launch, tmp_path, monkeypatch):
    launch = replace(launch(""), kv_cache_gib=2.6, threads=3)
    found = VLLM.environment(launch)
    assert (found["VLLM_CPU_KVCACHE_SPACE"], found["OMP_NUM_THREADS"]) == ("3", "3")
    assert found["PYTHONPATH"] == str(launch.log.parent / "plugin")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "9")
    assert VLLM.environment(launch)["VLLM_CPU_KVCACHE_SPACE"] == "9"
