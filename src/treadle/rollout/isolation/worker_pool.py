"""Calls to worker processes: started when needed, killed when late, replaced when dead.

One thread here hands out the calls and watches the workers. A pool is of one of two kinds:

- in turn: up to `num_workers` processes, each with one call at a time. A call's time counts from when it starts to run.
- concurrent (`async` functions): one process with an event loop takes all calls at once. If a call keeps the loop from
  the others, they are moved to another process, and it runs on alone until its deadline. If the process dies, each of
  its calls is run again, alone: the one that kills its process again fails, the others get their answers.

So a call that hangs, blocks or crashes costs its own sample and nobody else's, and no answer depends on what else runs.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import queue
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from treadle.rollout.isolation.fault import CallFault, StartFault
from treadle.rollout.isolation.frames import encode_frame
from treadle.rollout.isolation.process import WorkerProcess

_START_SECONDS = 120.0
_END_SECONDS = 10.0
_GRACE_SECONDS = 1.0  # a concurrent worker keeps deadlines itself; one that is silent for this much longer is blocked
_STALL_SECONDS = 1.0
_POLL_SECONDS = 0.01
_MAX_PROCESSES = 8
_MAX_FAILED_STARTS = 3


@dataclass(frozen=True)
class Work:
    """What a pool's workers do: `loader` is the `module:function` that makes a handler of each of the `specs`."""

    loader: str
    specs: Sequence[Any]
    timeout_seconds: float
    concurrent: bool = False
    num_workers: int = 1


@dataclass(eq=False)
class _Call:
    number: int
    frame: bytes
    future: Future[Any]
    alone: bool = False  # its process died, or did not answer, while it ran beside others


@dataclass(eq=False)
class _Worker:
    process: WorkerProcess
    start_deadline: float
    ready: bool = False
    calls: dict[int, _Call] = field(default_factory=dict)
    late_at: float = math.inf  # the deadline of its call, or of the next sign that its event loop turns
    blocked_by: int | None = None
    dies_by: float | None = None  # the connection is closed; the exit code is waited for until then

    @property
    def is_exclusive(self) -> bool:
        """True if it may get no other call beside those it has."""
        return self.blocked_by is not None or any(call.alone for call in self.calls.values())


class WorkerPool:
    """Runs calls in worker processes; no thread and no process is started before the first call."""

    def __init__(self, work: Work):
        self._numbers = itertools.count()
        self._dispatcher = _Dispatcher(work)
        self._thread: threading.Thread | None = None
        self._bell: socket.socket | None = None

    def submit(self, index: int, payload: Any) -> Future[Any]:
        """Queue a call of the handler of `specs[index]`; the future gets its answer, or a `CallFault`.

        Cancelling the future gives the call up.

        Raises:
            CallFault: if the pool is closed, or JSON can't hold the payload.
        """
        number, dispatcher = next(self._numbers), self._dispatcher
        try:
            frame = encode_frame({"call": number, "index": index, "payload": payload})
        except (TypeError, ValueError, RecursionError) as error:
            raise CallFault(f"can't be sent its input: {error}") from error
        call = _Call(number, frame, Future())
        with dispatcher.lock:
            if dispatcher.closed:
                raise CallFault(dispatcher.closed)
            if self._thread is None:
                self._bell, bell = socket.socketpair()
                dispatcher.selector.register(bell, selectors.EVENT_READ)
                self._thread = threading.Thread(target=dispatcher.serve, args=(bell,), name="worker-pool", daemon=True)
                self._thread.start()
            self._post("call", call)  # under the lock: the pool's thread, when it ends, fails all that was posted
        call.future.add_done_callback(lambda future: self._post("cancel", call) if future.cancelled() else None)
        return call.future

    def close(self) -> None:
        """Kill the workers and fail all calls; waits 10 s at most. Safe to call twice."""
        with self._dispatcher.lock:
            self._dispatcher.closed = self._dispatcher.closed or "the workers are closed"
        self._post("close", None)
        if self._thread is not None:
            self._thread.join(2 * _END_SECONDS)
        if self._bell is not None:
            self._bell.close()

    def process_ids(self) -> list[int]:
        """Process ids of the workers' supervisors that run now."""
        return [w.process.process_id for w in list(self._dispatcher.workers) if w.process.exit_code is None]

    def _post(self, what: str, call: _Call | None) -> None:
        self._dispatcher.posted.put((what, call))
        if self._bell is not None:
            with contextlib.suppress(OSError):  # full: it rings already; or closed
                self._bell.send(b"x", socket.MSG_DONTWAIT)


class _Dispatcher:
    """Hands out the calls and watches the workers, in the pool's thread. Other threads post to it."""

    def __init__(self, work: Work):
        self.posted: queue.SimpleQueue[tuple[str, _Call | None]] = queue.SimpleQueue()
        self.lock = threading.Lock()
        self.closed = ""  # why, once it is
        self.workers: list[_Worker] = []
        self.selector = selectors.DefaultSelector()
        self._work = work
        self._waiting: deque[_Call] = deque()
        self._most_calls = 1.0 if not work.concurrent else math.inf  # at once in one process
        self._most_workers = _MAX_PROCESSES if work.concurrent else work.num_workers
        self._failed_starts = 0  # in a row
        # The seconds in which a worker must answer its call or, if it is concurrent, send anything.
        self._patience = work.timeout_seconds + (_GRACE_SECONDS if work.concurrent else 0.0)

    def serve(self, bell: socket.socket) -> None:
        """Run until the pool is closed; a byte on `bell` says that something was posted."""
        try:
            while self._take_posted():
                self._hand_out()
                for key, events in self.selector.select(self._sleep_seconds()):
                    if key.fileobj is bell:
                        bell.recv(4096)
                    else:
                        self._hear(key.data, events)
                self._check_deadlines()
            reason = "the workers were closed"
        except BaseException as error:  # ours; still no call may wait for ever
            reason = f"could not be run: {error!r}"
        with self.lock:
            self.closed = self.closed or reason
        for worker in self.workers:
            worker.process.kill()
        for worker in self.workers:
            worker.process.end(_END_SECONDS)
            for call in worker.calls.values():
                _fail(call, reason)
        while not self.posted.empty():
            if (posted := self.posted.get()[1]) is not None:
                self._waiting.append(posted)
        for call in self._waiting:
            _fail(call, reason)
        self.selector.close()
        bell.close()

    def _take_posted(self) -> bool:
        """Take what other threads asked for; False if the pool is to close."""
        while not self.posted.empty():
            what, call = self.posted.get()
            if call is None:
                return False
            if what == "call":
                self._waiting.append(call)
            elif self._work.concurrent:
                self._drop(call)
        return True

    def _drop(self, call: _Call) -> None:
        for worker in self.workers:
            if worker.calls.get(call.number) is not call:
                continue
            if worker.blocked_by == call.number:  # it can't be told to stop
                del worker.calls[call.number]
                self._end(worker, "")
            else:
                self._take_away(worker, [call])
            return

    def _take_away(self, worker: _Worker, calls: Sequence[_Call]) -> None:
        for call in calls:
            worker.calls.pop(call.number)
        self._send(worker, encode_frame({"cancel": [call.number for call in calls]}))

    def _hand_out(self) -> None:
        """Give waiting calls to workers, and start workers for those that none can take."""
        full = {False: False, True: False}  # by `alone`: whether there is a place for no such call
        for _ in range(len(self._waiting)):
            call = self._waiting.popleft()
            if call.future.done():
                continue
            if full[call.alone]:
                self._waiting.append(call)  # all that wait are passed through once, which keeps their order
                continue
            try:
                worker = self._find_worker(call)
            except OSError as error:  # no memory or descriptor for another process
                _fail(call, f"its worker process could not be started: {error}")
                continue
            if worker is None and not self._work.concurrent:
                self._waiting.appendleft(call)
                return
            if worker is None:
                full[call.alone] = True
                self._waiting.append(call)
                continue
            worker.calls[call.number] = call
            if worker.ready:
                self._give(worker, call)

    def _find_worker(self, call: _Call) -> _Worker | None:
        most = 1.0 if call.alone else self._most_calls
        usable = [
            w
            for w in self.workers
            if w.dies_by is None and not w.is_exclusive and len(w.calls) < most and w.process.exit_code is None
        ]
        if usable:
            return usable[0]
        if len(self.workers) >= self._most_workers:
            return None
        work = self._work
        order = {
            "loader": work.loader,
            "specs": list(work.specs),
            "concurrent": work.concurrent,
            "timeout_seconds": work.timeout_seconds,
            "stall_seconds": min(_STALL_SECONDS, work.timeout_seconds / 2),
            "beat_seconds": min(_STALL_SECONDS, work.timeout_seconds / 4),
        }
        worker = _Worker(WorkerProcess(order), time.monotonic() + _START_SECONDS)
        self.workers.append(worker)
        self.selector.register(worker.process.connection, selectors.EVENT_READ, worker)
        return worker

    def _give(self, worker: _Worker, call: _Call) -> None:
        if len(worker.calls) == 1 or worker.late_at == math.inf:
            worker.late_at = time.monotonic() + self._patience
        self._send(worker, call.frame)

    def _send(self, worker: _Worker, frame: bytes) -> None:
        worker.process.send(frame)
        if worker.process.has_unsent and worker.dies_by is None:
            self.selector.modify(worker.process.connection, selectors.EVENT_READ | selectors.EVENT_WRITE, worker)

    def _hear(self, worker: _Worker, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            worker.process.flush()
            if not worker.process.has_unsent:
                self.selector.modify(worker.process.connection, selectors.EVENT_READ, worker)
        if events & selectors.EVENT_READ:
            try:
                for message in worker.process.receive():
                    self._read(worker, message)
            except EOFError:
                if worker in self.workers and worker.dies_by is None:
                    self.selector.unregister(worker.process.connection)
                    worker.dies_by = time.monotonic() + _END_SECONDS

    def _read(self, worker: _Worker, message: dict[str, Any]) -> None:
        if worker.ready and "blocked" not in message:
            worker.late_at = time.monotonic() + self._patience
        if "ready" in message:
            worker.ready, self._failed_starts = True, 0
            for call in list(worker.calls.values()):
                self._give(worker, call)
        elif "beat" in message:
            pass
        elif "blocked" in message:
            self._isolate(worker, message["blocked"])
        elif "call" not in message:  # it could not load what it was to run
            self._end(worker, StartFault(message["fault"], message["kind"]))
        elif message["call"] in worker.calls:
            call = worker.calls.pop(message["call"])
            if call.number == worker.blocked_by:
                worker.blocked_by = None
            self._most_calls += self._work.concurrent
            if call.future.set_running_or_notify_cancel():
                if "fault" in message:
                    call.future.set_exception(CallFault(message["fault"]))
                else:
                    call.future.set_result(message["result"])

    def _isolate(self, worker: _Worker, number: int | None) -> None:
        """Leave the call that blocks an event loop alone on it; the others run elsewhere, fewer at a time for a while."""
        others = [call for call in worker.calls.values() if call.number != number]
        if others:
            self._most_calls = max(1.0, len(worker.calls) // 2)
            self._waiting.extendleft(reversed(others))
        if number not in worker.calls:  # what an ended call has left behind blocks it
            worker.calls.clear()
            self._end(worker, "")
            return
        worker.blocked_by = number
        if others:
            self._take_away(worker, others)

    def _check_deadlines(self) -> None:
        """End at most one worker: that takes a while, and answers of others may have come since."""
        now = time.monotonic()
        for worker in self.workers:
            if worker.dies_by is not None:
                if worker.process.exit_code is not None or now > worker.dies_by:
                    return self._bury(worker)
            elif not worker.ready and now > worker.start_deadline:
                return self._end(worker, f"its worker process took more than {_START_SECONDS:g} s to start")
            elif worker.calls and now > worker.late_at:
                return self._end_late(worker)
        return None

    def _end_late(self, worker: _Worker) -> None:
        """End a worker that did not answer in time; what ran beside the call that keeps it is run again."""
        text = f"timed out after {self._work.timeout_seconds:g} s"
        if not self._work.concurrent:
            self._end(worker, text)
            return
        text += " (it blocks its event loop)"
        self._rerun_alone(worker)
        self._end(worker, text)

    def _rerun_alone(self, worker: _Worker) -> None:
        """Take the calls off a worker that has several, to run each again alone: one of them is to blame."""
        if len(worker.calls) > 1:
            for call in worker.calls.values():
                call.alone = True
            self._waiting.extendleft(reversed(worker.calls.values()))
            worker.calls.clear()

    def _bury(self, worker: _Worker) -> None:
        """Take a worker off that died by itself, and its call with it; if it had several, each is run again, alone."""
        text = worker.process.exit_text()
        if worker.ready:
            self._rerun_alone(worker)
            self._end(worker, f"its worker process died ({text})")
        else:
            self._end(worker, f"its worker process died while it started ({text})")

    def _end(self, worker: _Worker, reason: str | CallFault) -> None:
        """Kill a worker and fail the calls it still has."""
        if worker.dies_by is None:
            self.selector.unregister(worker.process.connection)
        self.workers.remove(worker)
        worker.process.end(_END_SECONDS)
        calls = list(worker.calls.values())
        self._failed_starts += not worker.ready
        if self._failed_starts >= _MAX_FAILED_STARTS:  # each try takes a while, and what waits would fare no better
            calls += self._waiting
            self._waiting.clear()
            self._failed_starts = 0
        for call in calls:
            _fail(call, reason)

    def _sleep_seconds(self) -> float | None:
        """Return the seconds that the thread may sleep unless something arrives."""
        if any(worker.dies_by is not None for worker in self.workers):
            return _POLL_SECONDS
        times = [w.late_at if w.ready else w.start_deadline for w in self.workers if w.calls or not w.ready]
        return max(0.0, min(times) - time.monotonic()) if times else None


def _fail(call: _Call, reason: str | CallFault) -> None:
    if call.future.set_running_or_notify_cancel():
        call.future.set_exception(CallFault(reason) if isinstance(reason, str) else reason)
