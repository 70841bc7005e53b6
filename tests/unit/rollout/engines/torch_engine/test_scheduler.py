"""What the scheduler decides, without a model: memory is counted in rows, and tests say which tokens are sampled."""

import subprocess
import sys

import numpy as np
import pytest

from treadle.rollout.engines.torch_engine import scheduler as scheduler_module
from treadle.rollout.engines.torch_engine.scheduler import Request, Scheduler, row_seed
from treadle.types import SamplingParams, Status

EOS = 0


class CountedMemory:
    """Room for so many rows; `held` is the requests by their slots, `moves` the rows that moved."""

    def __init__(self, max_rows):
        self.max_rows, self.held, self.moves = max_rows, [], []

    def admit(self, waiting, num_rows):
        if self.held and num_rows + waiting[0].n > self.max_rows:
            return False
        self.held.append(waiting[0])
        return True

    def move_row(self, source, target):
        self.moves.append((source, target))

    def release(self, request):
        self.held.remove(request)

    def clear(self):
        self.held.clear()


@pytest.fixture
def make():
    """`make(*requests, max_rows=8)`: a scheduler with these requests in line."""

    def make(*requests, max_rows=8):
        scheduler = Scheduler(CountedMemory(max_rows), frozenset({EOS}), lambda ids: "".join(chr(i) for i in ids))
        scheduler.waiting += requests
        return scheduler

    return make


def request(length=3, n=1, new=10, **sampling):
    return Request(list(range(1, length + 1)), SamplingParams(new, **sampling), n)


def step(scheduler, *tokens, version=0):
    """Sample these tokens (5 for rows without one); the requests of the batch, and what ended."""
    batch = scheduler.schedule()
    tokens = [*tokens, *[5] * (len(batch.rows) - len(tokens))]
    return [row.request for row in batch.rows], scheduler.postprocess(batch, tokens, [-0.5] * len(tokens), version)


def test_it_imports_no_torch():
    program = f"import sys, {scheduler_module.__name__}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


def test_admitted_requests_get_their_first_tokens_and_then_all_rows_run(make):
    one, two, late = request(n=2), request(), request()
    line = make(one, two)
    assert step(line) == ([one, one, two], [])
    line.waiting.append(late)
    assert step(line) == ([late], [])
    assert step(line) == ([one, one, two, late], [])
    assert [len(row.token_ids) for row in line.rows] == [2, 2, 2, 2]


def test_requests_are_admitted_in_order_as_far_as_there_is_memory(make):
    first, large, small = request(n=3), request(n=2), request()
    line = make(first, large, small, max_rows=4)
    assert step(line)[0] == [first] * 3
    assert step(line)[0] == [first] * 3  # the small one would fit, and waits behind the large one
    assert step(line, EOS)[1][0][0] is first
    assert step(line)[0] == [large] * 2
    assert list(line.waiting) == [small]


def test_one_prefill_takes_a_limited_number_of_tokens_but_always_one_prompt(make, monkeypatch):
    monkeypatch.setattr(scheduler_module, "MAX_PREFILL_TOKENS", 10)
    requests = [request(4), request(6), request(1), request(11)]
    line = make(*requests)
    assert [step(line)[0] for _ in range(3)] == [requests[:2], [requests[2]], [requests[3]]]


@pytest.mark.parametrize(
    ("sampling", "tokens", "want"),
    [
        ({}, [7, EOS], (Status.COMPLETED, "eos")),
        ({"stop_token_ids": (7,)}, [7], (Status.COMPLETED, "stop token 7")),
        ({"stop_token_ids": (EOS,), "ignore_eos": True}, [EOS], (Status.COMPLETED, "stop token 0")),
        ({"stop": ("zz", "xy")}, [ord("x"), ord("y")], (Status.COMPLETED, "stop string 'xy'")),
        ({"ignore_eos": True, "new": 3}, [EOS, EOS, EOS], (Status.TRUNCATED, "length")),
    ],
)
def test_what_ends_a_sample(make, sampling, tokens, want):
    line = make(request(**sampling))
    for i, token in enumerate(tokens):
        _, ended = step(line, token, version=i)
        assert bool(ended) is (i == len(tokens) - 1)
    ((_, completion),) = ended
    assert (completion.status, completion.stop_reason) == want
    assert completion.token_ids.tolist() == tokens
    assert completion.weight_versions.tolist() == list(range(len(tokens)))
    assert completion.logprobs.dtype == np.float32
    assert not line.has_work
    assert not line.memory.held


def test_the_last_row_takes_the_place_of_one_that_ended(make):
    one, two = request(n=2), request(n=2)
    line = make(one, two)
    step(line)
    _, ended = step(line, EOS, 5, EOS, 5)
    assert [(of, completion.index) for of, completion in ended] == [(one, 0), (two, 0)]
    assert line.memory.moves == [(3, 2), (2, 0)]
    assert [(row.request, row.index) for row in line.rows] == [(two, 1), (one, 1)]
    assert line.memory.held == [one, two]
    step(line, EOS)
    assert line.memory.held == [one]


def test_dropped_requests_leave_the_line_and_the_rows(make):
    runs, stays, waits, gone = request(n=2), request(), request(n=9), request()
    line = make(runs, stays, waits, gone)
    step(line)
    line.drop([runs, gone])
    line.drop([runs])  # it has left
    assert [row.request for row in line.rows] == [stays]
    assert list(line.waiting) == [waits]
    assert line.memory.held == [stays]


def test_an_abort_ends_everything_with_the_tokens_so_far(make):
    runs, waits = request(n=2), request(n=9)
    line = make(runs, waits)
    step(line, 7, 8)
    found = [(of, c.index, c.token_ids.tolist(), c.status) for of, c in line.abort()]
    aborted = Status.ABORTED
    assert found == [(runs, 0, [7], aborted), (runs, 1, [8], aborted), *((waits, i, [], aborted) for i in range(9))]
    assert not line.has_work
    assert not line.memory.held


def test_samples_of_a_request_have_seeds_of_their_own(make):
    line = make(request(n=3, seed=4))
    line.schedule()
    assert [row.seed for row in line.rows] == [row_seed(4, i) for i in range(3)]
