"""The process that runs a user's functions: it loads them once, then answers one request after another or many at once.

It is started by `pool.py` with one end of a socket pair. It imports no torch.
"""

from __future__ import annotations

import asyncio
import contextvars
import importlib
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from treadle.errors import TreadleError
from treadle.registry import describe_error
from treadle.rollout.isolation.fault import CallFault
from treadle.rollout.isolation.frames import encode_frame, receive_frame

Handler = Callable[[Any], Any]
"""Takes a request's JSON value and returns the answer's; `async` if the pool is concurrent."""

_PARENT_CHECK_SECONDS = 1.0
_CALL: contextvars.ContextVar[int | None] = contextvars.ContextVar("call", default=None)


def serve(descriptor: int) -> None:
    """Answer requests on an inherited socket until it closes."""
    if sys.platform != "linux":
        _end_with_parent()
    os.set_inheritable(descriptor, False)
    connection = socket.socket(fileno=descriptor)
    order = receive_frame(connection)
    module, _, name = order["loader"].partition(":")
    try:
        load = getattr(importlib.import_module(module), name)
        handlers: list[Handler] = [load(spec) for spec in order["specs"]]
    except BaseException as error:  # user modules run here
        reason = str(error) if isinstance(error, TreadleError) else describe_error(error)
        connection.sendall(encode_frame({"fault": reason, "kind": type(error).__name__}))
        return
    connection.sendall(encode_frame({"ready": True}))
    if order["concurrent"]:
        _Concurrent(connection, handlers, order).run()
    else:
        _serve_in_turn(connection, handlers)


def _serve_in_turn(connection: socket.socket, handlers: Sequence[Handler]) -> None:
    """Answer one request after another on the main thread, where signals such as SIGALRM work."""
    while True:
        try:
            request = receive_frame(connection)
        except EOFError:
            return
        try:
            answer = {"result": handlers[request["index"]](request["payload"])}
        except BaseException as error:
            answer = {"fault": _reason(error)}
        connection.sendall(_encode_answer(request["call"], answer))


class _Concurrent:
    """Answers many requests at once on one event loop; reports a call that keeps the loop from the others.

    A call's time counts while the loop is its own or idle, not while other calls keep the loop.
    """

    def __init__(self, connection: socket.socket, handlers: Sequence[Handler], order: dict[str, Any]):
        self._connection, self._handlers = connection, handlers
        self._timeout_seconds, self._stall_seconds = order["timeout_seconds"], order["stall_seconds"]
        self._beat_seconds = order["beat_seconds"]
        self._sending = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._loop.set_task_factory(self._make_task)
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._owners: weakref.WeakKeyDictionary[asyncio.Task[Any], int | None] = weakref.WeakKeyDictionary()
        self._busy_seconds = 0.0  # of the loop, by samples of `_watch`
        self._own_seconds: dict[int | None, float] = {}  # of each call in `_calls`

    def run(self) -> None:
        """Serve until the connection closes, which ends the process."""
        for target in (self._read, self._watch):
            threading.Thread(target=target, name=target.__name__, daemon=True).start()
        asyncio.set_event_loop(self._loop)
        self._loop.call_soon(self._beat)
        self._loop.run_forever()

    def _read(self) -> None:
        """Run the thread that reads requests, so that they are read while the loop is busy."""
        while True:
            try:
                request = receive_frame(self._connection)
            except EOFError:
                os._exit(0)
            self._loop.call_soon_threadsafe(self._cancel if "cancel" in request else self._begin, request)

    def _watch(self) -> None:
        """Run the thread that finds which call holds the loop, and reports one that blocks it."""
        task, reported, now = None, None, time.monotonic()
        since = now
        while True:
            time.sleep(self._stall_seconds / 10)
            before, now, current = now, time.monotonic(), asyncio.current_task(self._loop)
            owner = None if current is None else self._owners.get(current)
            if current is not None:
                self._busy_seconds += now - before
                if owner in self._own_seconds:
                    self._own_seconds[owner] += now - before
            if current is not task:
                task, since = current, now
            elif task is not None and task is not reported and now - since > self._stall_seconds:
                reported = task
                self._send(encode_frame({"blocked": owner}))

    def _beat(self) -> None:
        """Say that the loop turns."""
        if self._calls:
            self._send(encode_frame({"beat": True}))
        self._loop.call_later(self._beat_seconds, self._beat)

    def _begin(self, request: dict[str, Any]) -> None:
        context = contextvars.copy_context()
        context.run(_CALL.set, request["call"])
        task = self._loop.create_task(self._answer(request), context=context)
        self._calls[request["call"]] = task

    def _cancel(self, request: dict[str, Any]) -> None:
        for call in request["cancel"]:
            if call in self._calls:
                self._calls[call].cancel()

    async def _answer(self, request: dict[str, Any]) -> None:
        call = request["call"]
        task = asyncio.ensure_future(_run(self._handlers[request["index"]], request["payload"]))
        self._own_seconds[call] = 0.0
        try:
            answer = await self._outcome(call, task)
        finally:
            task.cancel()  # not waited for: it may refuse to be cancelled
            del self._calls[call], self._own_seconds[call]
        self._send(_encode_answer(call, answer))

    async def _outcome(self, call: int, task: asyncio.Task[dict[str, Any]]) -> dict[str, Any]:
        """Wait for the answer until its time is used up; what other calls take of the loop is added to it."""
        seconds, others = self._timeout_seconds, self._busy_seconds
        while seconds > 0:
            done, _ = await asyncio.wait({task}, timeout=seconds)
            if done:
                return {"fault": "cancelled itself"} if task.cancelled() else task.result()
            before, others = others, self._busy_seconds - self._own_seconds[call]
            seconds = others - before
        return {"fault": f"timed out after {self._timeout_seconds:g} s"}

    def _make_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **kwargs: Any) -> asyncio.Task[Any]:
        """Make a task that knows which call it belongs to, as do all tasks that a call makes."""
        task = asyncio.Task(coroutine, loop=loop, **kwargs)
        context = kwargs.get("context")
        self._owners[task] = _CALL.get() if context is None else context.get(_CALL)
        return task

    def _send(self, frame: bytes) -> None:
        with self._sending:
            self._connection.sendall(frame)


async def _run(handler: Callable[[Any], Awaitable[Any]], payload: Any) -> dict[str, Any]:
    try:
        return {"result": await handler(payload)}
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # a SystemExit would end the event loop
        return {"fault": _reason(error)}


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, CallFault) else describe_error(error)


def _encode_answer(call: int, answer: dict[str, Any]) -> bytes:
    try:
        return encode_frame({"call": call, **answer})
    except (TypeError, ValueError, RecursionError) as error:
        return encode_frame({"call": call, "fault": f"returned something that can't be sent: {error}"})


def _end_with_parent() -> None:
    parent_pid = os.getppid()

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(_PARENT_CHECK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
