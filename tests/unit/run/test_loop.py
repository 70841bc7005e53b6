"""The order of everything in the one loop, for every lag, seen by parts that write down what is asked of them."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from treadle.errors import CheckpointError, ConfigError, EngineError, FailedSamplesError
from treadle.metrics import metric, reduce_metrics
from treadle.run.lease import Lease
from treadle.run.loop import Collection, Schedule, train_loop

SECONDS = 20.0


class Recorder:
    """Parts that do nothing but note calls; a collection takes a few turns of the event loop.

    `fail` names the call that raises, such as "train 1".
    """

    def __init__(self, fail=None, collect_turns=3, error=RuntimeError):
        self.calls, self.recorded, self.fail, self.turns, self.error = [], [], fail, collect_turns, error
        self.version = 0
        self.version_at_start = {}  # of each collection
        self.in_flight = self.most_in_flight = 0
        self.cancelled = []
        self.unsaved = ()  # saves that fail

    def note(self, call):
        self.calls.append(call)
        if call == self.fail:
            raise self.error(f"{call} failed")

    async def collect(self, rollout_id):
        self.version_at_start[rollout_id] = self.version
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            self.note(f"collect {rollout_id}")
            for _ in range(self.turns):
                await asyncio.sleep(0)
            return Collection([f"groups {rollout_id}"], [metric("rollout/num_samples", 10 + rollout_id)])
        except asyncio.CancelledError:
            self.cancelled.append(rollout_id)
            raise
        finally:
            self.in_flight -= 1

    async def train(self, rollout_id, groups):
        assert groups == [f"groups {rollout_id}"]
        self.note(f"train {rollout_id}")
        for _ in range(20):  # time enough for what is in flight
            await asyncio.sleep(0)
        return [metric("train/num_steps", rollout_id)]

    async def publish(self, version):
        self.note(f"publish {version}")
        self.version = version
        return [metric("perf/publish_seconds", 0.25)]

    async def evaluate(self, done):
        self.note(f"evaluate {done}")

    async def save(self, done, *, last=False):
        self.note(f"save {done}" + " last" * last)
        if done in self.unsaved:
            if last:
                raise CheckpointError("the disk is full")
            return None
        return [metric("perf/save_seconds", done)]

    def record(self, rollout_id, metrics):
        self.note(f"record {rollout_id}")
        self.recorded.append((rollout_id, reduce_metrics(metrics)))


class NotingLease:
    def __init__(self, parts):
        self.parts = parts

    @asynccontextmanager
    async def hold(self, holder):
        self.parts.calls.append(f"[{holder}")
        yield
        self.parts.calls.append("]")


def run(parts, schedule, lease=None):
    asyncio.run(asyncio.wait_for(train_loop(parts, lease or Lease(), schedule), SECONDS))
    return parts


def test_on_policy_order():
    parts = run(Recorder(), Schedule(0, 3))
    assert parts.calls == [
        *("collect 0", "train 0", "publish 1", "record 0"),
        *("collect 1", "train 1", "publish 2", "record 1"),
        *("collect 2", "train 2", "publish 3", "record 2"),
    ]
    assert parts.version_at_start == {0: 0, 1: 1, 2: 2}


def test_everything_due_at_once_is_recorded_saved_then_evaluated():
    parts = run(Recorder(), Schedule(0, 2, eval_interval=1, save_interval=1))
    assert parts.calls == [
        "evaluate 0",
        *("collect 0", "train 0", "publish 1", "record 0", "save 1", "evaluate 1"),
        *("collect 1", "train 1", "publish 2", "record 1", "save 2", "evaluate 2"),
    ]


def test_who_holds_the_accelerators():
    parts = Recorder()
    run(parts, Schedule(0, 1, eval_interval=1, save_interval=1), NotingLease(parts))
    assert parts.calls == [
        *("[rollout", "evaluate 0", "]"),
        *("[rollout", "collect 0", "]"),
        *("[training", "train 0", "]"),
        *("publish 1", "record 0", "save 1"),
        *("[rollout", "evaluate 1", "]"),
    ]


@pytest.mark.parametrize("lag", [0, 1, 2, 5])
@pytest.mark.parametrize("turns", [0, 3, 50])
def test_generation_runs_ahead_by_the_lag_and_no_further(lag, turns):
    parts = run(Recorder(collect_turns=turns), Schedule(0, 8, max_lag=lag))
    collected = [int(c.split()[1]) for c in parts.calls if c.startswith("collect")]
    trained = [int(c.split()[1]) for c in parts.calls if c.startswith("train")]
    assert collected == trained == list(range(8))
    assert parts.most_in_flight <= lag + 1
    behind = [rollout_id - version for rollout_id, version in parts.version_at_start.items()]
    assert max(behind) == lag
    assert behind == [min(i, lag) for i in range(8)], "as fresh as the lag allows, and the first ones are on-policy"


def test_one_step_off_order():
    parts = run(Recorder(), Schedule(0, 3, max_lag=1))
    assert [c for c in parts.calls if not c.startswith("collect")] == [
        *("train 0", "publish 1", "record 0"),
        *("train 1", "publish 2", "record 1"),
        *("train 2", "publish 3", "record 2"),
    ]
    at = parts.calls.index
    assert parts.calls[:2] == ["collect 0", "collect 1"]
    assert at("record 0") < at("collect 2") < at("publish 2"), "it starts while rollout 1 is trained"


def test_a_collection_goes_on_while_a_training_step_runs():
    finished = []

    class Watching(Recorder):
        async def collect(self, rollout_id):
            result = await super().collect(rollout_id)
            finished.append((rollout_id, self.version))
            return result

    run(Watching(collect_turns=10), Schedule(0, 3, max_lag=1))
    assert finished == [(0, 0), (1, 0), (2, 1)], "the last one was done before version 2 was published"


def test_results_are_trained_in_order_whichever_collection_is_first_done():
    class Uneven(Recorder):
        async def collect(self, rollout_id):
            self.turns = 40 if rollout_id % 2 == 0 else 1
            return await super().collect(rollout_id)

    parts = run(Uneven(), Schedule(0, 6, max_lag=3))
    assert [c for c in parts.calls if c.startswith("train")] == [f"train {i}" for i in range(6)]


def test_a_resumed_run_does_the_rest_only():
    parts = run(Recorder(), Schedule(4, 6, eval_interval=4, save_interval=4))
    assert parts.calls == [
        "evaluate 4",
        *("collect 4", "train 4", "publish 5", "record 4"),
        *("collect 5", "train 5", "publish 6", "record 5", "save 6", "evaluate 6"),
    ]


@pytest.mark.parametrize(
    ("schedule", "calls"), [(Schedule(0, 0), []), (Schedule(3, 3, eval_interval=2), ["evaluate 3"])]
)
def test_nothing_to_do(schedule, calls):
    assert run(Recorder(), schedule).calls == calls


def test_metrics_of_a_rollout_and_of_the_save_before_it():
    parts = run(Recorder(), Schedule(0, 3, save_interval=1))
    rows = [row for _, row in parts.recorded]
    assert [rollout_id for rollout_id, _ in parts.recorded] == [0, 1, 2]
    assert [row["rollout/num_samples"] for row in rows] == [10, 11, 12]
    assert [row["train/num_steps"] for row in rows] == [0, 1, 2]
    assert [row["perf/publish_seconds"] for row in rows] == [0.25] * 3
    assert all(row["perf/step_seconds"] >= 0 for row in rows)
    assert [row.get("perf/save_seconds") for row in rows] == [None, 1, 2]


@pytest.mark.parametrize(
    ("interval", "due"),
    [(None, []), (1, [0, 1, 2, 3, 4, 5, 6, 7]), (3, [0, 3, 6, 7]), (7, [0, 7]), (100, [0, 7])],
)
def test_what_is_due_at_an_interval_and_at_the_end(interval, due):
    schedule = Schedule(0, 7, eval_interval=interval, save_interval=interval)
    assert [i for i in range(8) if schedule.is_eval_due(i)] == due
    assert [i for i in range(8) if schedule.is_save_due(i)] == due


# What goes wrong


@pytest.mark.parametrize("call", ["collect 2", "train 1", "publish 2", "save 2", "record 1", "evaluate 2"])
def test_whatever_raises_ends_the_loop_and_cancels_what_is_in_flight(call):
    parts = Recorder(fail=call, collect_turns=100)
    with pytest.raises(RuntimeError, match=f"{call} failed"):
        run(parts, Schedule(0, 8, eval_interval=2, save_interval=2, max_lag=2))
    assert parts.in_flight == 0
    assert "train 2" not in parts.calls
    if not call.startswith("collect"):
        assert parts.calls[-1] == call or parts.calls[-1].startswith("collect"), "nothing is done after it"


@pytest.mark.parametrize(
    ("schedule", "fault", "saves"),
    [
        (Schedule(0, 9), FailedSamplesError, ["save 2 last"]),
        (Schedule(0, 9, save_interval=1), ConfigError, ["save 1", "save 2"]),
        (Schedule(2, 9, max_lag=2), FailedSamplesError, []),
        (Schedule(0, 9, can_save=False), FailedSamplesError, []),
        (Schedule(0, 9), EngineError, []),
    ],
)
def test_what_was_trained_is_saved_when_the_users_code_ends_the_run(schedule, fault, saves):
    parts = Recorder(fail="collect 2", error=fault)
    with pytest.raises(fault, match="collect 2 failed"):
        run(parts, schedule)
    assert [call for call in parts.calls if call.startswith("save")] == saves
    assert not parts.in_flight


def test_a_save_that_failed_is_tried_again_before_the_run_ends_early():
    """Then it is an error: a run that only warned would look as if it were saved."""
    parts = Recorder(fail="collect 2", error=FailedSamplesError)
    parts.unsaved = (1, 2)
    with pytest.raises(CheckpointError, match=r"^collect 2 failed; and then the disk is full$"):
        run(parts, Schedule(0, 9, save_interval=1))
    assert [call for call in parts.calls if call.startswith("save")] == ["save 1", "save 2", "save 2 last"]
    assert "perf/save_seconds" not in parts.recorded[1][1]


def test_in_flight_collections_are_cancelled():
    class Slow(Recorder):
        async def collect(self, rollout_id):
            self.turns = 0 if rollout_id == 0 else 100_000
            return await super().collect(rollout_id)

    parts = Slow(fail="train 0")
    with pytest.raises(RuntimeError, match="train 0 failed"):
        run(parts, Schedule(0, 8, max_lag=3))
    assert parts.cancelled == [1, 2, 3]


def test_a_cancelled_loop_cancels_its_collections():
    parts = Recorder(collect_turns=1_000_000)

    async def main():
        task = asyncio.create_task(train_loop(parts, Lease(), Schedule(0, 4, max_lag=1)))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(main(), SECONDS))
    assert parts.cancelled == [0, 1]


# Leases


class NotingEngine:
    def __init__(self):
        self.calls = []

    async def sleep(self):
        self.calls.append("sleep")

    async def wake(self, part):
        self.calls.append(f"wake {part}")


def test_a_shared_lease_frees_the_engines_memory_for_training_and_wakes_weights_first():
    engine = NotingEngine()

    async def main():
        lease = Lease(engine)
        for holder in ("rollout", "training", "rollout"):
            async with lease.hold(holder):
                engine.calls.append(holder)

    asyncio.run(main())
    woken = ["wake weights", "wake kv", "rollout"]
    assert engine.calls == [*woken, "sleep", "training", *woken]
