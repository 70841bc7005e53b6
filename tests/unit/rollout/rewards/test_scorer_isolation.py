"""Rewards that hang, crash or block: only their own sample fails, and nothing is left running."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from treadle.config.sections import RewardSection
from treadle.errors import TreadleError
from treadle.rollout.rewards import build_scorer
from treadle.types import Prompt, Status

PROMPT = Prompt(0, (1, 2), "the prompt")


def wait_until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def below(pid):
    """Ids of the processes that this one has started, and they."""
    import psutil

    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def is_running(pid):
    """True for a process that is there and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_hangs_and_crashes_fail_their_own_samples_only(score, path):
    words = ["ok 1", "hang", "ok 2", "hang in C", "exit", "segfault", "ok 3"]
    samples = score({"custom_rm_path": path("misbehaves"), "rm_timeout_seconds": 0.75}, words)
    failures = {w: s.failure.removeprefix("reward misbehaves: ") for w, s in zip(words, samples, strict=True)}
    assert failures == {
        "ok 1": "",
        "hang": "timed out after 0.75 s",
        "ok 2": "",
        "hang in C": "timed out after 0.75 s",
        "exit": "its worker process died (exit code 3)",
        "segfault": "its worker process died (killed by SIGSEGV)",
        "ok 3": "",
    }
    assert [s.reward for s in samples] == [1.0, None, 1.0, None, None, None, 1.0]


def test_time_in_the_queue_does_not_count(score, path):
    samples = score({"custom_rm_path": path("misbehaves"), "rm_timeout_seconds": 1.0}, ["slow"] * 4)
    assert [s.reward for s in samples] == [1.0] * 4, "1.2 s in all, each 0.3 s"


def test_workers_run_side_by_side(score, path, tmp_path):
    settings = {"custom_rm_path": path("meets"), "rm_num_workers": 4, "rm_timeout_seconds": 60.0}
    samples = score(settings, list("abcd"), columns={"folder": str(tmp_path)})
    assert [s.reward for s in samples] == [1.0] * 4


def test_no_process_starts_before_it_is_needed_and_none_stays(path, sample):
    async def run():
        async with build_scorer(RewardSection(rm_type=("exact", path("process_of_worker")))) as scorer:
            assert scorer.process_ids() == []
            (before,) = (await scorer.open_group(PROMPT, 1).score(sample("x")),)
            assert before.status is Status.FAILED, "exact has no label"
            (pid,) = scorer.process_ids()
            assert is_running(pid)
            return pid, scorer

    pid, scorer = asyncio.run(run())
    wait_until(lambda: not is_running(pid))
    asyncio.run(scorer.close())
    closed = asyncio.run(score_one(scorer, sample("x")))
    assert "reward process_of_worker: the workers are closed" in closed.failure


async def score_one(scorer, sample):
    return await scorer.open_group(PROMPT, 1).score(sample)


def test_closing_does_not_wait_for_a_reward_that_hangs(path, sample):
    async def run():
        async with build_scorer(RewardSection(custom_rm_path=path("misbehaves"))) as scorer:
            hangs = asyncio.create_task(score_one(scorer, sample("hang")))
            queued = asyncio.create_task(score_one(scorer, sample("ok")))
            while not scorer.process_ids():
                await asyncio.sleep(0.02)
        return await asyncio.gather(hangs, queued)

    start = time.monotonic()
    samples = asyncio.run(run())
    assert time.monotonic() - start < 30, "it hangs for 60 s"
    assert [s.status for s in samples] == [Status.FAILED, Status.FAILED]


def test_a_worker_has_no_torch_ignores_ctrl_c_and_is_used_again(path, sample):
    async def run():
        section = RewardSection(rm_type=(path("torch_is_loaded"), path("process_of_worker")))
        async with build_scorer(section) as scorer:
            first = await score_one(scorer, sample("x"))
            os.kill(scorer.process_ids()[0], signal.SIGINT)
            return first, await score_one(scorer, sample("x"))

    first, second = asyncio.run(run())
    assert first.reward_parts["torch_is_loaded"] == 0.0
    assert first.reward_parts["process_of_worker"] == second.reward_parts["process_of_worker"]


def test_a_worker_that_died_between_calls_is_replaced(path, sample):
    async def run():
        async with build_scorer(RewardSection(custom_rm_path=path("length"))) as scorer:
            await score_one(scorer, sample("x"))
            (pid,) = scorer.process_ids()
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: scorer.process_ids() == [])
            return await score_one(scorer, sample("abc"))

    assert asyncio.run(run()).reward == 3.0


def test_what_a_late_reward_started_ends_with_it(score, path, tmp_path):
    file = tmp_path / "pid"
    settings = {"custom_rm_path": path("starts_a_child"), "rm_timeout_seconds": 1.0}
    (sample,) = score(settings, ["x"], columns={"file": str(file)})
    assert sample.failure == "reward starts_a_child: timed out after 1 s"
    wait_until(lambda: not is_running(int(file.read_text())))


@pytest.mark.skipif(sys.platform != "linux", reason="a subreaper is Linux's")
@pytest.mark.parametrize("word", ["hang", "exit", "segfault", "fine"])
def test_what_has_left_the_workers_group_and_session_ends_with_it_too(score, path, tmp_path, word):
    file = tmp_path / "pid"
    settings = {"custom_rm_path": path("detaches_a_child"), "rm_timeout_seconds": 3.0}
    score(settings, [word], columns={"file": str(file)})
    wait_until(lambda: not is_running(int(file.read_text())))


@pytest.mark.parametrize("word", ["hang", "hang in C"])
def test_workers_never_outlive_the_parent(path, word, tmp_path):
    program = f"""
import asyncio
import numpy as np
from treadle.config.sections import RewardSection
from treadle.errors import TreadleError
from treadle.rollout.rewards import build_scorer
from treadle.types import Prompt, Sample, Status

sample = Sample(0, 0, *(np.zeros(1, t) for t in ("int32", "bool", "float32", "int32")), 1.0, Status.COMPLETED, {word!r})

async def main():
    scorer = build_scorer(RewardSection(custom_rm_path={path("misbehaves")!r}))
    task = asyncio.create_task(scorer.open_group(Prompt(0, (), ""), 1).score(sample))
    while not scorer.process_ids():
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.7)
    print(*scorer.process_ids(), flush=True)
    await task

asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        pid = int(parent.stdout.readline())
        pids = [pid, *below(pid)]
        assert len(pids) == 2
        assert all(map(is_running, pids))
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    wait_until(lambda: not any(map(is_running, pids)))


def test_a_module_that_can_not_be_imported_again_fails_the_samples(score, tmp_path):
    file = tmp_path / "fails_later.py"
    file.write_text(
        "from pathlib import Path\nmark = Path(__file__).with_suffix('.mark')\n"
        "assert not mark.exists(), 'the second time'\nmark.touch()\ndef reward(sample):\n    return 1.0\n"
    )
    (sample,) = score({"custom_rm_path": f"{file}:reward"}, ["x"])
    assert "reward reward: its worker process could not be started: reward " in sample.failure
    assert "the second time" in sample.failure


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("os.kill(os.getpid(), 11)", "its worker process died while it started (killed by SIGSEGV)"),
        ("os._exit(0)", "can't be imported: it called os._exit(0) (ends.py:1)"),
        ("import ctypes; ctypes.CDLL(None)._exit(0)", "its worker process died while it started (exit code 0)"),
    ],
)
def test_a_module_that_ends_its_process_is_named_and_the_run_never_imports_it(tmp_path, line, text):
    file = tmp_path / "ends.py"
    file.write_text(f"import os; {line}\n")
    with pytest.raises(TreadleError) as caught:
        build_scorer(RewardSection(custom_rm_path=f"{file}:reward"))
    assert f"reward '{file}:reward': " in str(caught.value)
    assert text in str(caught.value)


def test_async_rewards_run_at_once(score, path):
    samples = score({"custom_rm_path": path("async_meets"), "rm_timeout_seconds": 60.0}, ["a" * n for n in range(50)])
    assert [s.reward for s in samples] == [float(n) for n in range(50)]


def test_async_rewards_that_go_wrong(score, path):
    words = ["ok", "raise", "exit", "hang", "stubborn", "cancel"]
    samples = score({"custom_rm_path": path("async_misbehaves"), "rm_timeout_seconds": 0.5}, words)
    assert samples[0].reward == 1.0
    causes = [
        "raised KeyError: 'gone' (",
        "raised SystemExit: 1 (",
        "timed out after 0.5 s",
        "timed out after 0.5 s",
        "cancelled itself",
    ]
    for sample, cause in zip(samples[1:], causes, strict=True):
        assert sample.status is Status.FAILED
        assert sample.failure.startswith(f"reward async_misbehaves: {cause}")


@pytest.mark.parametrize("word", ["block 60", pytest.param("block in C", marks=pytest.mark.long)])
def test_an_async_reward_that_blocks_the_loop_costs_itself_only(score, path, word):
    words = ["wait", word, "wait", "ok"]
    samples = score({"custom_rm_path": path("async_misbehaves"), "rm_timeout_seconds": 1.0}, words)
    assert samples[1].failure == "reward async_misbehaves: timed out after 1 s (it blocks its event loop)"
    assert [s.reward for s in samples] == [1.0, None, 1.0, 1.0]


@pytest.mark.long
def test_an_async_reward_that_blocks_for_a_while_gets_its_value_and_delays_no_other(path, sample):
    async def run():
        async with build_scorer(RewardSection(custom_rm_path=path("async_misbehaves"))) as scorer:
            blocking = [asyncio.create_task(score_one(scorer, sample("block 6"))) for _ in range(2)]
            others = await asyncio.gather(*(score_one(scorer, sample("wait")) for _ in range(20)))
            assert not any(task.done() for task in blocking)
            return others + await asyncio.gather(*blocking)

    assert [s.reward for s in asyncio.run(run())] == [1.0] * 22


def test_the_time_of_an_async_call_does_not_count_while_others_keep_the_loop(score, path):
    words = ["hog 0.6", "hang", "hog 0.6", "hog 60", "ok"]
    samples = score({"custom_rm_path": path("async_misbehaves"), "rm_timeout_seconds": 1.5}, words)
    assert [s.reward for s in samples] == [1.0, None, 1.0, None, 1.0]
    assert {s.failure for s in samples if s.failure} == {"reward async_misbehaves: timed out after 1.5 s"}


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("_exit", "(exit code 0)"),
        pytest.param("segfault", "(killed by SIGSEGV)", marks=pytest.mark.long),
        pytest.param("leaves a task", "(exit code 3)", marks=pytest.mark.long),
    ],
)
def test_an_async_reward_that_ends_its_process_costs_itself_only(score, path, word, text):
    words = ["wait", word, "wait", "ok", word]
    samples = score({"custom_rm_path": path("async_misbehaves")}, words)
    assert [s.reward for s in samples] == [1.0, None, 1.0, 1.0, None]
    assert {s.failure for s in samples if s.failure} == {f"reward async_misbehaves: its worker process died {text}"}


def test_async_rewards_share_an_event_loop(score, path):
    samples = score({"custom_rm_path": path("async_limited")}, ["x"] * 12)
    assert max(s.reward for s in samples) == 3.0


def test_what_gives_up_a_call_frees_the_event_loop_of_it(path, sample):
    async def run():
        async with build_scorer(RewardSection(custom_rm_path=path("async_misbehaves"))) as scorer:
            task = asyncio.create_task(score_one(scorer, sample("hang")))
            while not scorer.process_ids():
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.3)
            task.cancel()
            return await score_one(scorer, sample("ok"))

    assert asyncio.run(run()).reward == 1.0


def test_what_a_reward_prints_acts_on_no_terminal(score, path, capfd):
    """The response sets the title of the terminal, and turns the rest of the line around."""
    samples = score({"custom_rm_path": path("prints"), "rm_num_workers": 1}, ["\x1b]0;owned\x07\u202eabc"])
    assert samples[0].reward == 1.0, samples[0].failure
    out, err = capfd.readouterr()
    assert out == ""
    shown = "␛]0;owned␇\\u202eabc"
    assert sorted(err.splitlines()) == [f"{word} {shown}" for word in ("echoed", "logged", "printed", "written")]
