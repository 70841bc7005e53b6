"""What tests of several servers share: processes that end, and an update that breaks off."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil
import pytest

from treadle.errors import EngineError
from treadle.rollout.engines.server_engine import ServerEngine
from treadle.types import Completion, SamplingParams
from treadle.weights import Offer


def is_running(pid: int) -> bool:
    """Return whether a process has not ended; a zombie has."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(happens: Callable[[], object]) -> None:
    """Wait up to 20 s."""
    deadline = time.monotonic() + 20
    while not happens():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


async def one(engine: ServerEngine) -> list[Completion]:
    """Generate a sample."""
    return [c async for c in engine.generate([1, 2], SamplingParams(4), 1)]


async def check_broken_update(engine: ServerEngine, offer: Callable[[], Offer], message: str) -> None:
    """Nothing is generated after an update that broke off, until a whole one.

    The server refuses the first update to version 4, `offer()`, after it has begun, with this message, and takes the second.
    """
    await engine.set_version(3)
    with pytest.raises(EngineError, match=message):
        await engine.receive(offer())
    for refusal in (one(engine), engine.health()):
        with pytest.raises(EngineError, match=r"no whole weights: the update to version 4 broke off half-way"):
            await refusal
    await engine.pause()
    await engine.resume()  # as a pool does: it must not go on
    assert engine.version == 3
    await engine.receive(offer())
    assert engine.version == 4
    await engine.health()
