"""Worker processes for synchronous rewards: started when needed, killed when late, replaced when dead.

Each worker has a thread here that starts it, hands it one call at a time and waits with the call's deadline. A
call's time counts from when it starts to run, so a call that hangs costs its own sample and nobody else's.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from treadle.rollout.rewards.catalog import RewardSpec
from treadle.rollout.rewards.forms import RewardFault
from treadle.rollout.rewards.frames import receive_frame, send_frame
from treadle.rollout.rewards.inputs import RewardInput, RewardScore, input_to_json

_START_SECONDS = 120.0
_END_SECONDS = 10.0
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from treadle.rollout.rewards.worker import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)

Scores = list[RewardScore | None]


class _WorkerProcess:
    """One child process with the rewards loaded; its thread is its only user."""

    def __init__(self, specs: Sequence[RewardSpec]):
        here, there = socket.socketpair()
        self._connection = here
        with there:
            paths = json.dumps([str(path) for path in sys.path])
            command = [sys.executable, "-P", "-c", _BOOT, paths, str(there.fileno()), str(os.getpid())]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=(there.fileno(),),
                process_group=0,  # no Ctrl-C from the terminal, and its own children can be ended with it
                env={"PYTHONHASHSEED": "0", **os.environ},  # sets have one order in every worker
            )
        self._specs = specs
        self._ended = False

    @property
    def process_id(self) -> int:
        return self._process.pid

    def start(self) -> None:
        """Load the rewards; raises `RewardFault` where one can't be loaded in time."""
        deadline = time.monotonic() + _START_SECONDS
        try:
            send_frame(self._connection, [spec.to_json() for spec in self._specs], deadline)
            reply = receive_frame(self._connection, deadline)
        except TimeoutError:
            raise RewardFault(f"the reward worker took more than {_START_SECONDS:g} s to import its rewards") from None
        except (EOFError, OSError):
            raise RewardFault(f"the reward worker died while it imported its rewards ({self._exit_text()})") from None
        if "fault" in reply:
            raise RewardFault(f"the reward worker could not import its rewards: {reply['fault']}")

    def call(self, reward: int, inputs: Sequence[RewardInput], timeout_seconds: float) -> Scores:
        """Run one call; raises `RewardFault`, after which a worker that timed out or died is not `alive`."""
        deadline = time.monotonic() + timeout_seconds
        request = {"reward": reward, "inputs": [input_to_json(item) for item in inputs]}
        try:
            send_frame(self._connection, request, deadline)
            reply = receive_frame(self._connection, deadline)
        except TimeoutError:
            self.end()
            raise RewardFault(f"timed out after {timeout_seconds:g} s") from None
        except (EOFError, OSError):
            text = self._exit_text()
            self.end()
            raise RewardFault(f"its worker process died ({text})") from None
        if "fault" in reply:
            raise RewardFault(reply["fault"])
        return [None if row is None else RewardScore(row["value"], row["parts"]) for row in reply["scores"]]

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """End the process and what it started, at once; any thread may do it."""
        if not self._ended:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill the process and take its exit status."""
        self.kill()
        self._ended = True
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        self._connection.close()

    def _exit_text(self) -> str:
        try:
            code = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        if code >= 0:
            return f"exit code {code}"
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
        return f"killed by signal {-code}"


@dataclass(frozen=True, slots=True)
class _Call:
    reward: int
    inputs: Sequence[RewardInput]
    future: Future[Scores]


class WorkerPool:
    """`num_workers` processes that run the rewards of `specs`; nothing is started before the first call."""

    def __init__(self, specs: Sequence[RewardSpec], num_workers: int, timeout_seconds: float):
        self._specs = tuple(specs)
        self._num_workers = num_workers
        self._timeout_seconds = timeout_seconds
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._workers: dict[int, _WorkerProcess] = {}
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, reward: int, inputs: Sequence[RewardInput]) -> tuple[Future[Scores], float]:
        """Queue one call; returns its future and the most seconds the future can take, by the deadlines ahead of it."""
        future: Future[Scores] = Future()
        with self._lock:
            if self._closed:
                raise RewardFault("the scorer is closed")
            ahead = self._calls.qsize()
            self._calls.put(_Call(reward, inputs, future))
            if not self._threads:
                for number in range(self._num_workers):
                    name = f"reward-worker-{number}"
                    self._threads.append(threading.Thread(target=self._serve, args=(number,), name=name, daemon=True))
                    self._threads[-1].start()
        turn = self._timeout_seconds + _START_SECONDS + _END_SECONDS
        return future, (ahead // self._num_workers + 2) * turn

    def close(self) -> None:
        """Kill the workers, fail what is queued, and wait for the threads (10 s each at most)."""
        with self._lock:
            self._closed = True
            for _ in self._threads:
                self._calls.put(None)
            for worker in self._workers.values():
                worker.kill()
        deadline = time.monotonic() + _END_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def process_ids(self) -> list[int]:
        """The workers that run now."""
        with self._lock:
            return [worker.process_id for worker in self._workers.values() if worker.alive]

    def _serve(self, number: int) -> None:
        """Body of a worker's thread. The thread outlives its process: the kernel ties the child to it."""
        worker: _WorkerProcess | None = None
        while (call := self._calls.get()) is not None:
            if not call.future.set_running_or_notify_cancel():
                continue
            try:
                if worker is None or not worker.alive:
                    worker = self._replace(number, worker)
                call.future.set_result(worker.call(call.reward, call.inputs, self._timeout_seconds))
            except RewardFault as fault:
                call.future.set_exception(fault)
            except BaseException as error:  # ours; still no call may wait for ever
                call.future.set_exception(RewardFault(f"could not be run: {error!r}"))
        if worker is not None:
            worker.end()

    def _replace(self, number: int, old: _WorkerProcess | None) -> _WorkerProcess:
        if old is not None:
            old.end()
        with self._lock:
            self._workers.pop(number, None)
            if self._closed:
                raise RewardFault("the scorer was closed")
            worker = self._workers[number] = _WorkerProcess(self._specs)
        try:
            worker.start()
        except BaseException:
            worker.end()
            raise
        return worker
