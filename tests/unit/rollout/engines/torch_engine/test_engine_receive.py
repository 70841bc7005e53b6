"""What the embedded engine does while and after its weights are written by a transport."""

import asyncio
import copy
import threading
from contextlib import aclosing

import pytest
import torch

from treadle.errors import EngineError
from treadle.rollout.engines.torch_engine.engine import TorchEngine
from treadle.rollout.engines.torch_engine.scheduler import EngineLimits
from treadle.types import SamplingParams, Status
from treadle.weights import Offer, ServedWeights

LONG = SamplingParams(200, ignore_eos=True)


class Receiver:
    """Writes weights one by one; `before_the_second` runs in between and may raise."""

    def __init__(self, served: ServedWeights, before_the_second=lambda: None):
        self.served, self.before_the_second = served, before_the_second

    def receive(self, offer: Offer) -> None:
        with self.served.writing(offer.version):
            for i, tensor in enumerate(self.served.tensors.values()):
                if i == 1:
                    self.before_the_second()
                tensor.add_(0.01)

    def close(self) -> None:
        pass


@pytest.fixture
def use(tiny_model, tiny_codec):
    """`use(main)`: run the coroutine function `main(engine, served)` on a fresh engine."""

    def run(main):
        async def whole():
            model = copy.deepcopy(tiny_model)
            engine = TorchEngine(model, tiny_codec, EngineLimits(8, 1 << 26))
            served = ServedWeights(dict(model.named_parameters()), engine.hold_version)
            try:
                await main(engine, served)
            finally:
                await engine.close()

        asyncio.run(asyncio.wait_for(whole(), 60))

    return run


async def generate(engine, sampling=LONG):
    async with aclosing(engine.generate([5, 9, 30], sampling)) as found:
        (completion,) = [completion async for completion in found]
        return completion


async def wait_until(condition):
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never came to that")


def offer(version: int, served: ServedWeights) -> Offer:
    return Offer("test", version, served.specs, {})


def test_a_sample_goes_on_with_the_new_weights_and_says_which_token_is_whose(use):
    async def main(engine, served):
        running = asyncio.create_task(generate(engine))
        await wait_until(lambda: engine._scheduler.rows)
        await engine.receive_by(Receiver(served), offer(3, served))
        versions = (await running).weight_versions.tolist()
        assert set(versions) == {0, 3}
        assert versions == sorted(versions)

    use(main)


def test_an_update_that_breaks_off_aborts_what_runs_and_refuses_what_comes(use):
    def break_off():
        raise RuntimeError("cable pulled")

    async def main(engine, served):
        running = asyncio.create_task(generate(engine))
        await wait_until(lambda: engine._scheduler.rows)
        with pytest.raises(EngineError, match=r"version 3 broke off: cable pulled"):
            await engine.receive_by(Receiver(served, break_off), offer(3, served))
        aborted = await running
        assert aborted.status is Status.ABORTED
        assert set(aborted.weight_versions.tolist()) <= {0}  # no token of the mixture
        for refused in (generate(engine), engine.health()):
            with pytest.raises(EngineError, match="no whole weights"):
                await refused
        await engine.receive_by(Receiver(served), offer(3, served))
        await engine.health()
        assert set((await generate(engine)).weight_versions.tolist()) == {3}

    use(main)


def test_a_caller_that_gives_up_does_not_let_anything_generate_half_way(use):
    gate = threading.Event()

    async def main(engine, served):
        before = torch.cat([t.flatten() for t in served.tensors.values()]).clone()
        update = asyncio.create_task(engine.receive_by(Receiver(served, lambda: gate.wait(30)), offer(3, served)))
        await wait_until(lambda: served.torn)
        update.cancel()
        running = asyncio.create_task(generate(engine, SamplingParams(3, ignore_eos=True)))
        await asyncio.sleep(0.1)
        assert not update.done()
        assert not engine._scheduler.rows
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await update
        assert set((await running).weight_versions.tolist()) == {3}
        assert (torch.cat([t.flatten() for t in served.tensors.values()]) != before).all()
        await engine.health()

    use(main)
