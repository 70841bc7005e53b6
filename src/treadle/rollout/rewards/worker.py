"""The process that runs synchronous rewards: load them once, then one request, one answer.

It is started by `pool.py` with one end of a socket pair, ends when the parent does, and is killed by the parent
when a call runs out of time. It imports no torch.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from treadle.registry import describe_error
from treadle.rollout.rewards.catalog import RewardSpec, load_reward
from treadle.rollout.rewards.forms import RewardFault, RewardFunction, evaluate
from treadle.rollout.rewards.frames import receive_frame, send_frame
from treadle.rollout.rewards.inputs import input_from_json

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PARENT_CHECK_SECONDS = 1.0


def main(descriptor: int, parent_pid: int) -> None:
    """Serve requests on an inherited socket until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    _end_with_parent(parent_pid)
    os.set_inheritable(descriptor, False)
    connection = socket.socket(fileno=descriptor)
    specs = [RewardSpec.from_json(row) for row in receive_frame(connection)]
    rewards: list[RewardFunction] = []
    for spec in specs:
        try:
            rewards.append(load_reward(spec))
        except BaseException as error:  # user modules run here
            send_frame(connection, {"fault": f"reward {spec.name}: {describe_error(error)}"})
            return
    send_frame(connection, {"ready": True})
    while True:
        try:
            request = receive_frame(connection)
        except EOFError:
            return
        send_frame(connection, _answer(rewards, request))


def _answer(rewards: Sequence[RewardFunction], request: dict[str, Any]) -> dict[str, Any]:
    inputs = [input_from_json(row) for row in request["inputs"]]
    try:
        scores = evaluate(rewards[request["reward"]], inputs)
    except RewardFault as fault:
        return {"fault": str(fault)}
    return {"scores": [None if s is None else {"value": s.value, "parts": dict(s.parts)} for s in scores]}


def _end_with_parent(parent_pid: int) -> None:
    """Die when the parent dies, even inside a reward that never returns.

    On Linux the kernel does it. Elsewhere, and in between, a thread looks; it can't while C code holds the GIL.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(_PARENT_CHECK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
