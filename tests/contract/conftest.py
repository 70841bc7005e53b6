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

from treadle.rollout.engines.base import Engine
from treadle.rollout.engines.http_calls import HttpCalls
from treadle.rollout.engines.torch_engine import EngineLimits, TorchEngine
from treadle.rollout.engines.vllm_engine import VllmEngine, VllmLaunch, VllmLimits, start_vllm

SECONDS = 60.0  # a whole test; nothing here may wait for ever


CONTEXT = 256


@dataclass(frozen=True)
class EngineCase:
    """`make(model, codec, max_rows)`, or `make(address, codec, max_rows)` of the server that the fixture `server` names.

    `seeded`: it draws each sample from a seed of its own. `bounded`: it takes `max_rows`.
    """

    make: Callable[..., Engine]
    set_version: Callable[[Engine, int], Awaitable[None]]
    server: str | None = None
    seeded: bool = True
    bounded: bool = True


def make_torch_engine(model, codec, max_rows):
    return TorchEngine(model, codec, EngineLimits(max_rows=max_rows, kv_bytes=1 << 30))


async def set_torch_version(engine, version):
    engine.set_version(version)


def make_vllm_engine(address, codec, max_rows):
    return VllmEngine(HttpCalls.to(address, "vllm"), codec.eos_token_ids, VllmLimits(CONTEXT))


async def set_vllm_version(engine, version):
    await engine.set_version(version)


ENGINES = {
    "torch": EngineCase(make_torch_engine, set_torch_version),
    "vllm": EngineCase(make_vllm_engine, set_vllm_version, "vllm_address", seeded=False, bounded=False),
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


@pytest.fixture(scope="session")
def launch_vllm(vllm_python, tmp_path_factory) -> Callable[[Path], VllmLaunch]:
    """`launch_vllm(model_dir)`: how the tests start a server."""

    def make(model_dir: Path) -> VllmLaunch:
        log = tmp_path_factory.mktemp("vllm") / "server.log"
        small = {"enforce-eager": True, "max-model-len": str(CONTEXT)}
        return VllmLaunch(vllm_python, str(model_dir), "float32", "cpu", log, 400, 1, threads=1, arguments=small)

    return make


@pytest.fixture(scope="session")
def vllm_address(launch_vllm, wide_model_dir) -> Iterator[str]:
    """One server for all tests that do it no harm, with the weights of the wide model as version 0."""
    engine = asyncio.run(_started(launch_vllm(wide_model_dir)))
    assert engine.process is not None
    yield engine.address
    engine.process.close()


async def _started(launch: VllmLaunch) -> VllmEngine:
    engine = await start_vllm(launch, {0}, VllmLimits(CONTEXT))
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
    import torch

    from treadle.models.load import load_model

    if engine_case.server is None:
        runs_on = load_model(str(wide_model_dir), torch.float32, torch.device("cpu"))
    else:
        runs_on = request.getfixturevalue(engine_case.server)
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
