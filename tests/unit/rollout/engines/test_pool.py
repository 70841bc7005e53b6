"""Several real engines behind one face: who serves, what a loss costs, and what new weights do to what is in flight."""

import asyncio

import pytest

from treadle.errors import EngineError, EngineLostError
from treadle.rollout.engines.pool import EnginePool
from treadle.rollout.engines.restarts import PoolLimits
from treadle.rollout.engines.torch_engine.engine import TorchEngine
from treadle.rollout.engines.torch_engine.scheduler import EngineLimits
from treadle.types import SamplingParams, Status
from treadle.weights import Offer

SECONDS = 60.0
QUIET = PoolLimits(check_interval_seconds=1000.0, check_timeout_seconds=1.0, max_restarts=2)
LONG = SamplingParams(60, seed=5, ignore_eos=True)


async def take(engine, offer):
    """Receive an offer."""
    engine.engine.hold_version(offer.version)


class Losable:
    """A torch engine that can be lost: its calls raise from then on, as those to a dead process do."""

    def __init__(self, engine):
        self.engine, self.is_lost, self.hangs, self.closed, self.served = engine, asyncio.Event(), False, False, []
        self.apply = None  # what a test has it do with an offer

    @property
    def version(self):
        return self.engine.version

    async def generate(self, token_ids, sampling, n=1):
        self.served.append(tuple(token_ids))
        done = asyncio.create_task(self._all(token_ids, sampling, n))
        lost = asyncio.create_task(self.is_lost.wait())
        try:
            await asyncio.wait([done, lost], return_when=asyncio.FIRST_COMPLETED)
            if lost.done():
                raise EngineLostError("its process died")
            for completion in done.result():
                yield completion
        finally:
            for task in (done, lost):
                task.cancel()

    async def _all(self, token_ids, sampling, n):
        return [c async for c in self.engine.generate(token_ids, sampling, n)]

    async def _call(self, call):
        if self.is_lost.is_set():
            raise EngineLostError("its process died")
        await call()

    async def receive(self, offer):
        await self._call(lambda: (self.apply or take)(self, offer))

    async def set_version(self, version):
        await self._call(lambda: self.engine.set_version(version))

    async def num_receivers(self):
        return 2

    async def abort(self):
        await self._call(self.engine.abort)

    async def pause(self):
        await self._call(self.engine.pause)

    async def resume(self):
        await self._call(self.engine.resume)

    async def sleep(self):
        await self._call(self.engine.sleep)

    async def wake(self, part):
        await self._call(lambda: self.engine.wake(part))

    async def health(self):
        if self.hangs:
            await asyncio.sleep(1000)
        await self._call(self.engine.health)

    async def close(self):
        self.closed = True
        self.is_lost.set()
        await self.engine.close()


@pytest.fixture
def pooled(tiny_model, tiny_codec):
    """`pooled(use, count=2, limits=QUIET, starts=True)`: run `use(pool, engines, notes)`; `engines` grows by restarts,
    with the weights of the other engine or, where `bare`, none of the run."""

    def run(use, *, count=2, limits=QUIET, starts=True, bare=False):
        async def main():
            def make():
                return Losable(TorchEngine(tiny_model, tiny_codec, EngineLimits(64, 1 << 28)))

            engines, notes = [make() for _ in range(count)], []

            async def start(index):
                if not starts:
                    raise EngineError("no memory")
                engines.append(make())
                engines[-1].engine.hold_version(-1 if bare else engines[1 - index].version)
                return engines[-1]

            pool = EnginePool(engines[:count], start, limits, notes.append)
            try:
                return await use(pool, engines, notes)
            finally:
                await pool.close()

        return asyncio.run(asyncio.wait_for(main(), SECONDS))

    return run


async def receive(pool, engines, apply, version=2, transport="broadcast"):
    """Have the pool receive an offer; each engine does `apply` with it."""
    for engine in engines:
        engine.apply = apply
    await pool.receive(Offer(transport, version, {}, {}))


async def complete(engine, prompt, sampling=LONG, n=2):
    return sorted([c async for c in engine.generate(prompt, sampling, n)], key=lambda c: c.index)


def tokens(completions):
    return [c.token_ids.tolist() for c in completions]


def test_a_prompt_stays_on_one_engine_and_the_least_loaded_serves(pooled):
    async def use(pool, engines, notes):
        await asyncio.gather(*(complete(pool, [5 + i], n=2) for i in range(4)), complete(pool, [50], n=6))
        return [engine.served for engine in engines]

    first, second = pooled(use)
    assert sorted(first + second) == [(5,), (6,), (7,), (8,), (50,)]
    assert len(first) == 3
    assert len(second) == 2


def test_a_lost_engine_costs_no_sample_and_gives_none_twice(pooled):
    async def use(pool, engines, notes):
        prompts = [[10 + i] for i in range(6)]
        want = [tokens(await complete(engines[0], prompt)) for prompt in prompts]
        running = [asyncio.create_task(complete(pool, prompt)) for prompt in prompts]
        await asyncio.sleep(0.02)
        engines[1].is_lost.set()
        got = [tokens(await task) for task in running]
        while len(engines) < 3:
            await asyncio.sleep(0.01)
        return want, got, engines[1].closed, sum(len(engine.served) for engine in engines) - 2 * len(prompts), notes

    want, got, closed, redone, notes = pooled(use)
    assert got == want
    assert closed
    assert redone == 3
    assert "engine 1 died (its process died)" in notes[0]
    assert "engine 1 is back" in notes[-1]


def test_a_restarted_engine_generates_only_with_weights_of_the_run(pooled):
    """It waits for the publish that its transport needs, and so do its prompts."""

    async def use(pool, engines, notes):
        await receive(pool, engines, take, version=0)
        running = asyncio.create_task(complete(pool, [5]))
        await asyncio.sleep(0.02)
        engines[0].is_lost.set()
        while len(engines) < 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert engines[1].served == []
        assert pool.wants_weights
        await pool.prepare("wait")
        await pool.receive(Offer("broadcast", 3, {}, {}))
        assert not pool.wants_weights
        return await running, notes

    completions, notes = pooled(use, count=1, bare=True)
    assert {v for c in completions for v in c.weight_versions.tolist()} == {3}
    assert notes[-1] == "engine 0 is back and waits for weights"


def test_a_restarted_engine_receives_an_offer_that_holds_everything(pooled):
    async def use(pool, engines, notes):
        await receive(pool, engines, take, version=4, transport="shm")
        engines[0].is_lost.set()
        return tokens(await complete(pool, [5])), pool.version, notes

    got, version, notes = pooled(use, count=1, bare=True)
    assert (len(got), version) == (2, 4)
    assert notes[-1] == "engine 0 is back with the weights of version 4"


@pytest.mark.parametrize("fails", [False, True])
def test_a_restarted_engine_has_the_weights_published_again(pooled, fails):
    async def use(pool, engines, notes):
        async def republish():
            if fails:
                raise EngineError("the trainer's weights are gone")
            await pool.prepare("wait")
            await pool.receive(Offer("broadcast", 4, {}, {}))

        pool.republish = republish
        await receive(pool, engines, take, version=4)
        engines[0].is_lost.set()
        return tokens(await complete(pool, [5])), pool.version

    if fails:
        with pytest.raises(EngineError, match="the trainer's weights are gone"):
            pooled(use, count=1, bare=True)
    else:
        got, version = pooled(use, count=1, bare=True)
        assert (len(got), version) == (2, 4)


def test_weights_of_a_run_that_never_trains_are_named_on_restarted_engines_too(pooled):
    async def use(pool, engines, notes):
        await pool.set_version(7)
        engines[0].is_lost.set()
        await complete(pool, [5])
        return pool.version, await pool.num_receivers()

    assert pooled(use, count=1, bare=True) == (7, 2)


def test_an_engine_that_cannot_be_brought_up_is_closed(pooled, monkeypatch):
    async def use(pool, engines, notes):
        await receive(pool, engines, take, version=4, transport="shm")

        async def refuse(engine, offer):
            raise EngineError("another model")

        monkeypatch.setattr(Losable, "receive", refuse)
        engines[0].is_lost.set()
        with pytest.raises(EngineError, match="2 restarts in a row"):
            await complete(pool, [5])
        return [engine.closed for engine in engines]

    assert pooled(use, count=1, bare=True) == [True, True, True]


def test_a_lost_engine_comes_before_what_others_say_of_it(pooled):
    """An exchange that all take part in fails everywhere when one is lost; that one is the reason to try again."""

    async def use(pool, engines, notes):
        async def apply(engine, offer):
            raise EngineLostError("gone") if engine is engines[1] else EngineError("a peer closed the connection")

        with pytest.raises(EngineLostError, match="gone"):
            await receive(pool, engines, apply)

    pooled(use)


def test_an_engine_that_does_not_answer_is_taken_for_dead(pooled):
    async def use(pool, engines, notes):
        engines[0].hangs = True
        while len(engines) < 3:
            await asyncio.sleep(0.01)
        return notes, engines[0].closed

    notes, closed = pooled(use, limits=PoolLimits(0.05, 0.1, 2))
    assert "engine 0 died (it did not answer within 0.1 s)" in notes[0]
    assert closed


def test_engines_that_never_come_back_end_the_request_with_the_remedy(pooled):
    async def use(pool, engines, notes):
        running = asyncio.create_task(complete(pool, [5]))
        await asyncio.sleep(0.02)
        engines[0].is_lost.set()
        with pytest.raises(EngineError, match=r"engine 0 died and 2 restarts in a row.*--max-restarts"):
            await running
        return notes

    assert sum("did not start (no memory)" in note for note in pooled(use, count=1, starts=False)) == 2


@pytest.mark.parametrize(("on_publish", "versions"), [("wait", {1}), ("pause", {1, 2}), ("abort", {2})])
def test_what_is_in_flight_when_new_weights_come(pooled, on_publish, versions):
    async def use(pool, engines, notes):
        for engine in engines:
            engine.engine.hold_version(1)
        running = asyncio.create_task(complete(pool, [5], SamplingParams(200, seed=5, ignore_eos=True)))
        await complete(pool, [7], SamplingParams(2, ignore_eos=True), n=1)

        await pool.prepare(on_publish)
        await receive(pool, engines, take)
        return await running, pool.version

    completions, version = pooled(use)
    assert version == 2
    assert len(completions) == 2
    for completion in completions:
        assert completion.status is Status.TRUNCATED
        assert set(completion.weight_versions.tolist()) == versions


def test_an_engine_lost_while_weights_come_is_replaced_and_the_publish_says_so(pooled):
    async def use(pool, engines, notes):
        async def apply(engine, offer):
            if engine is engines[0]:
                engine.is_lost.set()
                raise EngineLostError("its process died")

        await pool.prepare("wait")
        with pytest.raises(EngineLostError):
            await receive(pool, engines, apply)
        await pool.prepare("wait")  # waits for the new engine
        await pool.receive(Offer("broadcast", 2, {}, {}))
        return len(engines), tokens(await complete(pool, [5]))

    count, got = pooled(use)
    assert count == 3
    assert [len(t) for t in got] == [60, 60]


def test_a_refusal_of_weights_is_raised_and_requests_go_on(pooled):
    async def use(pool, engines, notes):
        async def apply(engine, offer):
            raise EngineError("other shapes")

        await pool.prepare("wait")
        with pytest.raises(EngineError, match="other shapes"):
            await receive(pool, engines, apply)
        return len(await complete(pool, [5]))

    assert pooled(use) == 2
