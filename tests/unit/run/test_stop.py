"""A stop from outside, seen by the loop at every place it may come."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from treadle.metrics import metric
from treadle.run.lease import Lease
from treadle.run.loop import Collection, Schedule, train_loop
from treadle.run.ray.connection import hangups_ignored
from treadle.run.stop import Stop, leave, stops_on_signals

SECONDS = 20.0


class Stopped:
    """Parts that ask for a stop inside the call named `at`."""

    def __init__(self, stop, at, signum=signal.SIGTERM):
        self.stop, self.at, self.signum, self.calls = stop, at, signum, []

    async def note(self, call):
        self.calls.append(call)
        if call == self.at:
            self.stop.request(self.signum)
        await asyncio.sleep(0.01)

    async def collect(self, rollout_id):
        await self.note(f"collect {rollout_id}")
        return Collection([], [])

    async def train(self, rollout_id, groups):
        await self.note(f"train {rollout_id}")
        self.calls.append(f"trained {rollout_id}")
        return []

    async def publish(self, version):
        return []

    async def evaluate(self, done):
        await self.note(f"evaluate {done}")

    async def save(self, done, *, last=False):
        self.calls.append(f"save {done}")
        return [metric("perf/save_seconds", 0)]

    def record(self, rollout_id, metrics):
        self.calls.append(f"record {rollout_id}")


def run(at, signum=signal.SIGTERM, **schedule):
    async def main():
        stop = Stop()
        parts = Stopped(stop, at, signum)
        await train_loop(parts, Lease(), Schedule(0, 4, **schedule), stop)
        return parts.calls

    return asyncio.run(asyncio.wait_for(main(), SECONDS))


def test_while_generating_it_gives_up_the_rollout_and_saves_what_was_trained():
    calls = run("collect 2")
    assert calls[-2:] == ["collect 2", "save 2"]
    assert calls.count("record 1") == 1


def test_while_training_it_finishes_the_step():
    assert run("train 1")[-4:] == ["train 1", "trained 1", "record 1", "save 2"]


def test_nothing_is_saved_twice_or_before_anything_was_trained():
    assert run("evaluate 1", eval_interval=1, save_interval=1)[-3:] == ["record 0", "save 1", "evaluate 1"]
    assert run("collect 0") == ["collect 0"]


def test_what_runs_ahead_is_cancelled():
    assert run("train 1", max_lag=1)[-3:] == ["trained 1", "record 1", "save 2"]


@pytest.mark.parametrize(
    ("signum", "schedule", "saves"),
    [
        (signal.SIGTERM, {}, True),
        (signal.SIGHUP, {}, True),
        (signal.SIGINT, {}, False),
        (signal.SIGINT, {"save_interval": 100}, True),
        (signal.SIGTERM, {"can_save": False}, False),
    ],
)
def test_ctrl_c_saves_where_checkpoints_are_asked_for_and_the_others_always(signum, schedule, saves):
    assert (run("train 1", signum, **schedule)[-1] == "save 2") is saves


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_signals_reach_the_stop_and_the_handlers_are_put_back(signum):
    async def main():
        stop, told = Stop(), []
        with stops_on_signals(stop, told.append):
            os.kill(os.getpid(), signum)
            assert await stop.unless(asyncio.create_task(asyncio.sleep(SECONDS))) is None
        return stop, told

    before = signal.signal(signum, signal.SIG_DFL)  # what started the tests may ignore it, and Ray handles one
    try:
        stop, told = asyncio.run(asyncio.wait_for(main(), SECONDS))
        assert (stop.signum, stop.always_saves) == (signum, True)
        assert told == [f"{signum.name}: stopping at the next safe place; once more stops at once"]
        assert signal.getsignal(signum) == signal.SIG_DFL
    finally:
        signal.signal(signum, before)


def test_a_run_that_nohup_started_outlives_its_terminal():
    async def main():
        stop = Stop()
        with stops_on_signals(stop, pytest.fail):
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0.05)
        return stop.requested

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert not asyncio.run(asyncio.wait_for(main(), SECONDS))
    finally:
        signal.signal(signal.SIGHUP, before)


STUBBORN = """
import asyncio, time
from treadle.run.ray.connection import hangups_ignored
from treadle.run.stop import Stop, stops_on_signals

async def main():
    with stops_on_signals(Stop(), print):
        print("ready", flush=True)
        end = time.monotonic() + 60
        while time.monotonic() < end:  # the event loop has no turn
            time.sleep(0.01)

asyncio.run(main())
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_the_process_at_once_whatever_it_does(signum):
    process = subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signum)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)
    process.send_signal(signum)
    assert process.wait(SECONDS) == 128 + signum


def test_what_ray_starts_outlives_the_terminal():
    tell = [sys.executable, "-c", "import signal; print(int(signal.getsignal(signal.SIGHUP)))"]
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with hangups_ignored():
            assert int(subprocess.check_output(tell)) == signal.SIG_IGN
        assert int(subprocess.check_output(tell)) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


def test_how_the_program_ends():
    leave(None)
    with pytest.raises(KeyboardInterrupt):
        leave(signal.SIGINT)
    for signum, code in ((signal.SIGTERM, 143), (signal.SIGHUP, 129)):
        with pytest.raises(SystemExit) as end:
            leave(signum)
        assert end.value.code == code
