"""Whole tiny runs whose samples come from a server: they learn, and the server always has the trainer's weights."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import psutil
import pytest

from treadle.config import load_config
from treadle.run.start import train

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(900)]

NUM_ROLLOUT = 12
SMALL = {
    "vllm": ("--vllm-enforce-eager", "--vllm-max-model-len", "128", "--kv-cache-gib", "1"),
    "sglang": (
        *("--sglang-attention-backend", "torch_native", "--sglang-disable-cuda-graph"),
        *("--sglang-disable-overlap-schedule", "--sglang-context-length", "128", "--kv-cache-gib", "0.05"),
    ),
}
"""What makes a server of each kind a small one for a CPU."""


@pytest.fixture(params=SMALL)
def kind(request) -> str:
    return request.param


@pytest.fixture
def server_flags(kind, request, wide_model_dir, toy_flags):
    """Flags of the toy run with a server."""
    at = toy_flags.index("--hf-checkpoint")
    own = [*toy_flags[:at], *toy_flags[at + 2 :], "--hf-checkpoint", str(wide_model_dir)]
    python = request.getfixturevalue(f"{kind}_python")
    return [*own, "--rollout-engine", kind, "--engine-python", python, *SMALL[kind], "--num-rollout", str(NUM_ROLLOUT)]


def assert_learned(rows) -> None:
    rewards = [row["rollout/reward_mean"] for row in rows if "rollout/reward_mean" in row]
    gaps = [row["train/rollout_logprob_abs_diff_max"] for row in rows if "train/rollout_logprob_abs_diff_max" in row]
    assert len(rewards) == len(gaps) == NUM_ROLLOUT
    assert max(gaps) < 1e-4, "the server generated with other weights than the trainer's"
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1


def assert_no_server_is_left(model: Path) -> None:
    """A Ray worker that ends is killed; its server must go as well, soon."""
    deadline = time.monotonic() + 20
    while left := [p for p in psutil.process_iter(["cmdline"]) if str(model) in (p.info["cmdline"] or ())]:
        assert time.monotonic() < deadline, f"servers are left: {left}"
        time.sleep(0.2)


def kill_a_server(model: Path, steps_done, at: list[int]) -> None:
    """kill -9, once three steps are done; how many it were, into `at`."""
    deadline = time.monotonic() + 600
    while steps_done() < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    at.append(steps_done())
    servers = [p for p in psutil.process_iter(["cmdline"]) if str(model) in (p.info["cmdline"] or ())]
    for process in (child for server in servers for child in server.children()):
        process.kill()


@pytest.mark.parametrize("runtime", ["local", "ray"])
def test_a_server_that_is_killed_gets_the_weights_of_a_broadcast_anew(
    server_flags, wide_model_dir, request, read_rows, tmp_path, runtime
):
    """They are in no file that the new server could read, and it never generates with those it was started with."""
    if runtime == "ray":
        request.getfixturevalue("ray_here")
    folder = tmp_path / "run"
    lines = folder / "metrics.jsonl"

    def steps_done() -> int:
        return len(lines.read_text().splitlines()) if lines.exists() else 0

    flags = [*server_flags, "--weight-transport", "broadcast", "--health-check-interval-seconds", "1"]
    killed_at: list[int] = []
    killer = threading.Thread(target=kill_a_server, args=(wide_model_dir, steps_done, killed_at))
    killer.start()
    train(load_config(None, [*flags, "--runtime", runtime, "--run-dir", str(folder)]), "toy")
    killer.join()
    assert 3 <= killed_at[0] < NUM_ROLLOUT
    assert_learned(read_rows(folder))
    assert_no_server_is_left(wide_model_dir)


@pytest.mark.parametrize("transport", ["auto", "broadcast"])
@pytest.mark.parametrize("runtime", ["local", "ray"])
def test_a_run_learns(runtime, transport, kind, server_flags, wide_model_dir, request, read_rows, tmp_path):
    if runtime == "ray":
        request.getfixturevalue("ray_here")
    folder = tmp_path / "run"
    flags = [*server_flags, "--weight-transport", transport, "--runtime", runtime, "--run-dir", str(folder)]
    train(load_config(None, flags), "toy")
    assert_learned(read_rows(folder))
    assert_no_server_is_left(wide_model_dir)
    if runtime == "local":
        assert (folder / "engines" / f"{kind}-0.log").is_file()
