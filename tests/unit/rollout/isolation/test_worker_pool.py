"""The pool itself, with handlers of its own: what the rewards' and environments' tests do not reach."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from treadle.rollout.isolation.fault import CallFault
from treadle.rollout.isolation.frames import decode_frames, encode_frame
from treadle.rollout.isolation.worker_pool import Work, WorkerPool

HANDLERS = '''
import asyncio, os, time
from pathlib import Path

def load(spec):
    if spec == "fails":
        with open(os.environ["STARTS"], "a") as file:
            file.write("x")
        raise ImportError("no such thing")
    return {"echo": echo, "act": act}[spec]

def echo(payload):
    return payload

async def block_later():
    await asyncio.sleep(0.1)
    time.sleep(60)

async def act(payload):
    """Wait, block or crash, as told; the answer is the number."""
    kind, number = payload
    if kind == "crash":
        await asyncio.sleep(0.05)
        os._exit(1)
    if kind == "block":
        time.sleep(0.7)
    if kind == "hang":
        time.sleep(60)
    if kind == "object":
        return object()
    if kind == "leave":
        global left
        left = asyncio.create_task(block_later())
        return number
    await asyncio.sleep(0.01 * (number % 7))
    return number
'''


@pytest.fixture
def open_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., WorkerPool]]:
    """`open_pool(spec, timeout_seconds, **fields of Work)`: a pool of the handlers above."""
    (tmp_path / "handlers_of_the_test.py").write_text(HANDLERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("STARTS", str(tmp_path / "starts"))
    pools: list[WorkerPool] = []

    def make(spec: str, timeout_seconds: float = 30.0, **fields: Any) -> WorkerPool:
        pools.append(WorkerPool(Work("handlers_of_the_test:load", [spec], timeout_seconds, **fields)))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def outcome(future: Future[Any]) -> Any:
    try:
        return future.result(120)
    except CallFault as fault:
        return str(fault)


def test_large_values_go_both_ways(open_pool) -> None:
    pool = open_pool("echo", num_workers=2)
    values = ["x" * 5_000_000, list(range(100_000)), {"é": None}]
    futures = [pool.submit(0, value) for value in values]
    assert [outcome(f) for f in futures] == values


def test_frames_come_whole_however_they_are_cut() -> None:
    values = [1, "two", {"three": [3]}]
    data = b"".join(map(encode_frame, values))
    for size in (1, 7, len(data)):
        buffer, found = bytearray(), []
        for at in range(0, len(data), size):
            buffer += data[at : at + size]
            found += decode_frames(buffer)
        assert found == values
        assert not buffer


def test_an_answer_that_is_no_json_is_a_fault(open_pool) -> None:
    assert "returned something that can't be sent" in outcome(
        open_pool("act", concurrent=True).submit(0, ["object", 1])
    )


def test_an_input_that_is_no_json_costs_its_own_call_only(open_pool) -> None:
    pool = open_pool("echo")
    with pytest.raises(CallFault, match="can't be sent its input: Exceeds the limit"):
        pool.submit(0, {"n": 10**5000})
    assert outcome(pool.submit(0, 1)) == 1


@pytest.mark.parametrize("concurrent", [False, True])
def test_a_process_that_can_not_be_made_costs_its_own_call_only(open_pool, monkeypatch, concurrent: bool) -> None:
    pool = open_pool("act" if concurrent else "echo", concurrent=concurrent)
    with monkeypatch.context() as patch:
        patch.setattr("treadle.rollout.isolation.process.sys.executable", "/there/is/no/python")
        assert "its worker process could not be started: [Errno 2]" in outcome(pool.submit(0, ["wait", 1]))
    assert outcome(pool.submit(0, ["wait", 2])) in (2, ["wait", 2])


def test_what_a_call_left_behind_blocks_no_later_one(open_pool) -> None:
    pool = open_pool("act", 2.0, concurrent=True)
    assert outcome(pool.submit(0, ["leave", 1])) == 1
    time.sleep(1.5)
    assert outcome(pool.submit(0, ["wait", 2])) == 2


def test_calls_that_block_and_are_given_up_leave_their_places(open_pool) -> None:
    pool = open_pool("act", 60.0, concurrent=True)
    hanging = [pool.submit(0, ["hang", number]) for number in range(2)]
    while len(pool.process_ids()) < 2:
        time.sleep(0.05)
    time.sleep(1.5)
    for future in hanging:
        future.cancel()
    assert outcome(pool.submit(0, ["wait", 3])) == 3
    assert len(pool.process_ids()) == 1


@pytest.mark.parametrize("concurrent", [False, True])
def test_workers_that_can_not_start_are_given_up_after_three_tries(open_pool, tmp_path: Path, concurrent: bool) -> None:
    pool = open_pool("fails", concurrent=concurrent)
    futures = [pool.submit(0, None) for _ in range(50)]
    reasons = {outcome(f) for f in futures}
    assert len(reasons) == 1
    assert reasons.pop().startswith("its worker process could not be started: raised ImportError: no such thing (")
    assert len((tmp_path / "starts").read_text()) <= 3
    assert pool.process_ids() == []


@pytest.mark.parametrize(("count", "seed"), [(30, 0), pytest.param(400, 1, marks=pytest.mark.long)])
def test_answers_depend_on_nothing_that_runs_beside_them(open_pool, count: int, seed: int) -> None:
    """Calls that wait, block and crash, submitted in bursts and in any order: each has the answer it has alone."""
    draw = random.Random(seed)
    kinds = ["wait"] * 20 + ["block"] * 3 + ["crash", "hang"]
    calls = [(draw.choice(kinds) if number > 3 else kinds[-number], number) for number in range(count)]
    pool = open_pool("act", 1.5, concurrent=True)
    futures = []
    for kind, number in calls:
        futures.append(pool.submit(0, [kind, number]))
        if draw.random() < 0.1:
            time.sleep(draw.random() / 5)
    wanted = {
        "crash": "its worker process died (exit code 1)",
        "hang": "timed out after 1.5 s (it blocks its event loop)",
    }
    assert [outcome(f) for f in futures] == [wanted.get(kind, number) for kind, number in calls]


def test_a_closed_pool_says_so(open_pool) -> None:
    pool = open_pool("echo")
    assert outcome(pool.submit(0, 1)) == 1
    pool.close()
    with pytest.raises(CallFault, match="the workers are closed"):
        pool.submit(0, 1)
