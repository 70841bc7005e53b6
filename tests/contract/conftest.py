"""The engines that run through the contract tests, and what those tests share.

To test your own, add an entry to ENGINES: how it is made on a module of transformers, and how it is told that its
weights have a new version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np
import pytest

from treadle.rollout.engines.base import Engine
from treadle.rollout.engines.torch_engine import EngineLimits, TorchEngine

SECONDS = 60.0  # a whole test; nothing here may wait for ever


@dataclass(frozen=True)
class EngineCase:
    make: Callable[..., Engine]  # (model, codec, max_rows)
    set_version: Callable[[Engine, int], None]


def make_torch_engine(model, codec, max_rows):
    return TorchEngine(model, codec, EngineLimits(max_rows=max_rows, kv_bytes=1 << 30))


ENGINES = {"torch": EngineCase(make_torch_engine, TorchEngine.set_version)}


@pytest.fixture(params=ENGINES)
def engine_case(request) -> EngineCase:
    return ENGINES[request.param]


@pytest.fixture
def serve(engine_case, tiny_model, tiny_codec):
    """`serve(use, max_rows=256, codec=…)`: run the coroutine function `use(engine)` on a fresh engine, then close it."""

    def run(use, *, max_rows=256, codec=tiny_codec):
        async def main():
            engine = engine_case.make(tiny_model, codec, max_rows)
            try:
                return await use(engine)
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
