"""What tests of SGLang's client share: a stand-in of a server, of which they say what it answers."""

import asyncio
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from treadle.rollout.engines.server_engine import ServerEngine, ServerSettings
from treadle.rollout.engines.sglang_engine.dialect import SglangDialect

SECONDS = 30.0


@pytest.fixture
def model_dir(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.zeros(2, 3), "lm_head.weight": torch.zeros(4)}, folder / "model.safetensors")
    return folder


@pytest.fixture
def told():
    """`told(model_dir, answers, use)`: what a server of that model was asked while `use(engine)` ran."""

    def told(model_dir: Path, answers, use):
        """Run `use(engine)` against a server; `answers(path, body)` is status and body for what it is asked, or None for no
        answer ever. Returns what it was asked."""
        asked: list[tuple[str, dict]] = []

        async def serve(reader, writer):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = next(
                (int(line.split(":")[1]) for line in head.split("\r\n") if line.lower().startswith("content-l")), 0
            )
            body = json.loads(await reader.readexactly(length) or b"{}")
            path = head.split()[1]
            asked.append((path, body))
            if (answer := answers(path, body)) is not None:
                status, text = answer
                head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(text)}\r\nConnection: close\r\n\r\n"
                writer.write((head + text).encode())
                writer.close()

        async def main():
            server = await asyncio.start_server(serve, "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
            dialect = SglangDialect(model_dir, torch.float32, tied=True)
            engine = ServerEngine(f"127.0.0.1:{port}", "engine 7", ServerSettings(dialect, {0}, 64, answer_seconds=5))
            await asyncio.wait_for(use(engine), SECONDS)
            server.close()

        asyncio.run(main())
        return asked

    return told
