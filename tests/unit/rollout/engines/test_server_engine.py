"""The engine of a server that answers wrongly, or not at all, or that breaks off an update."""

import asyncio

import pytest
import torch

from tests.server_checks import check_broken_update, one
from treadle.errors import EngineError, EngineLostError
from treadle.rollout.engines.server_engine import ServerEngine, ServerSettings
from treadle.rollout.engines.vllm_engine.dialect import VllmDialect
from treadle.weights import Offer, WeightSpec

SECONDS = 30.0


def settings(**seconds: float) -> ServerSettings:
    return ServerSettings(VllmDialect(), {0}, 64, **seconds)


def talk(answer: bytes | None, use):
    """Run `use(engine)` against a server that gives every request this answer, or none."""

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        if answer is None:
            await asyncio.sleep(SECONDS)
        writer.write(answer or b"")
        writer.close()

    async def main():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        engine = ServerEngine(f"127.0.0.1:{port}", "engine 7", settings(answer_seconds=0.3))
        try:
            return await asyncio.wait_for(use(engine), SECONDS)
        finally:
            server.close()

    return asyncio.run(main())


def http(status: int, body: str) -> bytes:
    return f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode()


def test_a_server_that_hangs_is_named_with_what_it_was_asked():
    with pytest.raises(EngineLostError, match=r"engine 7 did not answer /pause within 0\.3 s"):
        talk(None, lambda engine: engine.pause())


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (http(200, "<html>"), EngineError, "with no JSON: '<html>'"),
        (http(200, '{"choices": 3}'), EngineError, "malformed reply"),
        (http(400, '{"error": "n is wrong"}'), EngineError, r"refused .* \(400\): .*n is wrong"),
        (http(500, "EngineDeadError"), EngineLostError, "EngineDeadError"),
        (b"HTTP/1.1 200 X\r\nContent-Length: 90\r\n\r\nhalf", EngineLostError, "engine 7 is gone"),
        (b"", EngineLostError, "engine 7 is gone"),
    ],
)
def test_answers_that_are_none(answer, kind, message):
    with pytest.raises(kind, match=message) as caught:
        talk(answer, one)
    assert type(caught.value) is kind or kind is EngineError
    assert isinstance(caught.value, EngineLostError) is (kind is EngineLostError)


def test_nobody_there_is_lost():
    async def main():
        engine = ServerEngine("127.0.0.1:9", "engine 7", settings())
        with pytest.raises(EngineLostError, match="engine 7 is gone"):
            await one(engine)

    asyncio.run(main())


# An update that breaks off

OFFER = Offer("shm", 4, {"w": WeightSpec((2,), torch.float32)}, {"path": "x", "digest": "y"})


def told(refused: set[tuple[str, int]], use):
    """Run `use(engine)` against a server that refuses the given (path, how many times it was asked before); what it was asked."""
    asked: list[str] = []

    async def serve(reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        path = head.split()[1].split("?")[0]
        no = (path, asked.count(path)) in refused
        asked.append(path)
        writer.write(http(500, '{"error": "out of memory"}') if no else http(200, '{"success": true}'))
        writer.close()

    async def main():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        engine = ServerEngine(f"127.0.0.1:{port}", "engine 7", settings(answer_seconds=5))
        await asyncio.wait_for(use(engine), SECONDS)
        server.close()

    asyncio.run(main())
    return asked


def test_an_update_that_is_refused_before_it_begins_changes_nothing():
    async def use(engine):
        await engine.set_version(3)
        with pytest.raises(EngineError, match=r"refused /update_weights \(500\): .*out of memory"):
            await engine.receive(OFFER)
        assert engine.version == 3
        await engine.health()

    asked = told({("/update_weights", 0)}, use)
    assert asked[1:5] == ["/pause", "/start_weight_update", "/update_weights", "/resume"]


def test_after_an_update_that_broke_off_nothing_is_generated_until_a_whole_one():
    asked = told({("/update_weights", 1)}, lambda engine: check_broken_update(engine, lambda: OFFER, "out of memory"))
    assert asked.count("/resume") == 1
    assert asked.index("/resume") > asked.index("/reset_prefix_cache")


def test_an_older_version_is_refused():
    async def use(engine):
        await engine.set_version(9)
        with pytest.raises(EngineError, match="version 4 is offered, engine 7 already has 9"):
            await engine.receive(OFFER)

    assert told(set(), use) == ["/update_weight_version"]
