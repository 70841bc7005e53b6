"""The engines that run through the contract tests, and what those tests share.

To test your own, add an entry to ENGINES: how it is made on a module of transformers, how it is told that its weights
have a new version, and what it can't do. An engine that is a server is started once and shared by all tests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from treadle.rollout.engines.base import Engine
from treadle.rollout.engines.server_engine import ServerEngine, ServerSettings
from treadle.rollout.engines.server_kind import ServerKind, ServerLaunch
from treadle.rollout.engines.sglang_engine.launch import SGLANG
from treadle.rollout.engines.torch_engine.engine import TorchEngine
from treadle.rollout.engines.torch_engine.scheduler import EngineLimits
from treadle.rollout.engines.vllm_engine.launch import VLLM

SECONDS = 60.0  # a whole test; nothing here may wait for ever


CONTEXT = 256


@dataclass(frozen=True)
class EngineCase:
    """`make(model, codec, max_rows)`, or `make((address, model_dir), codec, max_rows)` of the shared server of kind `server`.

    `seeded`: it draws each sample from a seed of its own. `bounded`: it takes `max_rows`.
    """

    make: Callable[..., Engine]
    set_version: Callable[[Engine, int], Awaitable[None]]
    server: str | None = None
    seeded: bool = True
    bounded: bool = True


def make_torch_engine(model, codec, max_rows):
    return TorchEngine(model, codec, EngineLimits(max_rows=max_rows, kv_bytes=1 << 30))


async def set_version(engine, version):
    await engine.set_version(version)


@dataclass(frozen=True)
class ServerCase:
    """One kind of server, and the arguments that make it small. `python` is the fixture that names its interpreter."""

    python: str
    kind: ServerKind
    arguments: dict[str, str | bool]

    def settings(self, model_dir: Path, **seconds: float) -> ServerSettings:
        return ServerSettings(self.kind.dialect(model_dir, torch.float32, "cpu"), {0}, CONTEXT, **seconds)


SERVERS = {
    "vllm": ServerCase("vllm_python", VLLM, {"enforce-eager": True, "max-model-len": str(CONTEXT)}),
    "sglang": ServerCase(
        "sglang_python",
        SGLANG,
        {"attention-backend": "torch_native", "disable-overlap-schedule": True, "disable-cuda-graph": True},
    ),
}


def make_server_engine(kind):
    def make(server, codec, max_rows):
        address, model_dir = server
        settings = replace(SERVERS[kind].settings(model_dir), eos_token_ids=codec.eos_token_ids)
        return ServerEngine(address, kind, settings)

    return make


ENGINES = {
    "torch": EngineCase(make_torch_engine, set_version),
    **{kind: EngineCase(make_server_engine(kind), set_version, kind, seeded=False, bounded=False) for kind in SERVERS},
}


@pytest.fixture(
    params=[pytest.param(name, marks=[pytest.mark.engines] if c.server else []) for name, c in ENGINES.items()]
)
def engine_case(request) -> EngineCase:
    case = ENGINES[request.param]
    for name, has in (("seeded", case.seeded), ("bounded", case.bounded)):
        if not has and request.node.get_closest_marker(f"needs_{name}"):
            pytest.skip(f"{request.param} here is not {name}")
    return case


@pytest.fixture(params=SERVERS)
def server_kind(request) -> str:
    return request.param


@pytest.fixture(scope="session")
def settings_of() -> Callable[..., ServerSettings]:
    """`settings_of(kind, model_dir, answer_seconds=30)`: how the tests speak with a server of that model."""
    return lambda kind, model_dir, **seconds: SERVERS[kind].settings(model_dir, **seconds)


@pytest.fixture(scope="session")
def launch_server(request, tmp_path_factory) -> Callable[[str, Path], ServerLaunch]:
    """`launch_server(kind, model_dir)`: how the tests start a server."""

    def make(kind: str, model_dir: Path) -> ServerLaunch:
        case = SERVERS[kind]
        log = tmp_path_factory.mktemp(kind) / "server.log"
        python = request.getfixturevalue(case.python)
        room = 1 if kind == "vllm" else 0.03  # of keys and values, in GiB; vLLM takes whole ones
        return ServerLaunch(
            python, str(model_dir), "float32", "cpu", log, 400, room, threads=1, arguments=case.arguments
        )

    return make


@pytest.fixture(scope="session")
def shared_server(launch_server, wide_model_dir) -> Iterator[Callable[[str], tuple[str, Path]]]:
    """`shared_server(kind)`: address and model of one server for all tests that do it no harm, with its weights as version 0."""
    started: dict[str, ServerEngine] = {}

    def find(kind: str) -> tuple[str, Path]:
        if kind not in started:
            started[kind] = asyncio.run(_started(kind, launch_server(kind, wide_model_dir), wide_model_dir))
        return started[kind].client.address, wide_model_dir

    yield find
    for engine in started.values():
        assert engine.process is not None
        engine.process.close()


async def _started(kind: str, launch: ServerLaunch, model_dir: Path) -> ServerEngine:
    engine = await SERVERS[kind].kind.start(launch, SERVERS[kind].settings(model_dir))
    await engine.set_version(0)
    return engine


class WithoutSeeds:
    """An engine that has no seeds, asked greedily: then samples are the same each time, which most tests need."""

    def __init__(self, engine: Engine):
        self._engine = engine

    def __getattr__(self, name: str):
        return getattr(self._engine, name)

    def generate(self, token_ids, sampling, n=1) -> AsyncIterator[object]:
        return self._engine.generate(token_ids, replace(sampling, temperature=0.0), n)


@pytest.fixture
def serve(engine_case, wide_model_dir, tiny_codec, request):
    """`serve(use, max_rows=256, codec=…)`: run the coroutine function `use(engine)` on a fresh engine, then close it."""
    from treadle.models.load import load_model

    if engine_case.server is None:
        runs_on = load_model(str(wide_model_dir), torch.float32, torch.device("cpu"))
    else:
        runs_on = request.getfixturevalue("shared_server")(engine_case.server)
    greedy = not engine_case.seeded and not request.node.get_closest_marker("samples")

    def run(use, *, max_rows=256, codec=tiny_codec):
        async def main():
            engine = engine_case.make(runs_on, codec, max_rows)
            try:
                if engine_case.server is not None:
                    await engine_case.set_version(engine, 0)
                return await use(WithoutSeeds(engine) if greedy else engine)
            finally:
                await engine.close()

        return asyncio.run(asyncio.wait_for(main(), SECONDS))

    return run


@pytest.fixture
def complete():
    """`await complete(engine, prompt, sampling, n=1)`: the completions of one request, by index."""

    async def run(engine, prompt, sampling, n=1):
        async with aclosing(engine.generate(prompt, sampling, n)) as completions:
            return sorted([c async for c in completions], key=lambda c: c.index)

    return run


@pytest.fixture
def make_prompts():
    """`make_prompts(count, seed=0, shortest=1, longest=40)`: random prompts of the tiny tokenizer's plain tokens."""

    def make(count, seed=0, shortest=1, longest=40):
        rng = np.random.default_rng(seed)
        return [rng.integers(3, 98, rng.integers(shortest, longest + 1)).tolist() for _ in range(count)]

    return make


@pytest.fixture
def same():
    """`same(one, other)`: True where two completions are the same, up to rounding of the logprobs."""

    def compare(one, other):
        return (
            one.token_ids.tolist() == other.token_ids.tolist()
            and np.allclose(one.logprobs, other.logprobs, atol=1e-4)
            and one.status is other.status
        )

    return compare


@pytest.fixture
def shape_is_right():
    """`shape_is_right(completion)`: True where the three arrays are of one length and of their types."""

    def check(completion):
        arrays = completion.token_ids, completion.logprobs, completion.weight_versions
        return [a.dtype for a in arrays] == [np.int32, np.float32, np.int32] and len({a.shape for a in arrays}) == 1

    return check
