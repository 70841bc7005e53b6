"""What only the embedded engine promises: what it computes, what it keeps, and how it fails."""

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest
import torch

from treadle.errors import EngineError
from treadle.rollout.engines.torch_engine.engine import TorchEngine, generate_step
from treadle.rollout.engines.torch_engine.model_runner import ModelRunner
from treadle.rollout.engines.torch_engine.scheduler import EngineLimits, Request, Scheduler
from treadle.types import SamplingParams, Status

SECONDS = 60.0
ROOMY = EngineLimits(max_rows=256, kv_bytes=1 << 30, fused=False)  # hooks on the module see every forward pass
TOKEN_BYTES = 2 * 2 * 2 * 8 * 4  # keys and values, 2 layers, 2 heads of 8, float32: one token of the tiny Llama


class Line(Scheduler):
    """A scheduler with a runner that computes what it decides."""

    def __init__(self, model, codec, limits):
        self.runner = ModelRunner(model, limits)
        super().__init__(self.runner.store, codec.eos_token_ids, codec.decode)

    def step(self):
        return generate_step(self, self.runner)

    @property
    def store(self):
        return self.runner.store


@pytest.fixture
def scheduler(tiny_model, tiny_codec):
    """Make a scheduler with these limits."""
    return lambda limits=ROOMY: Line(tiny_model, tiny_codec, limits)


@pytest.fixture
def serve(tiny_model, tiny_codec):
    def run(use, limits=ROOMY):
        async def main():
            engine = TorchEngine(tiny_model, tiny_codec, limits)
            try:
                return await use(engine)
            finally:
                await engine.close()

        return asyncio.run(asyncio.wait_for(main(), SECONDS))

    return run


def request(length, new=5, n=1, seed=0):
    return Request([3 + (i * 7) % 90 for i in range(length)], SamplingParams(new, seed=seed, ignore_eos=True), n)


def finish(scheduler, most=10_000):
    """Step to the end; the completions of every request."""
    found = {}
    for _ in range(most):
        if not scheduler.has_work:
            return found
        for of, completion in scheduler.step():
            found.setdefault(of, []).append(completion)
    raise AssertionError(f"work is left after {most} steps")


async def complete(engine, prompt, sampling, n=1):
    async with aclosing(engine.generate(prompt, sampling, n)) as completions:
        return [c async for c in completions]


def tokens_per_call(model):
    """Tokens of every forward pass from now on, in order."""
    calls = []
    model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    return calls


# What is computed


def test_a_prompt_is_computed_once_for_all_its_samples(tiny_model, scheduler):
    line = scheduler()
    calls = tokens_per_call(tiny_model)
    line.waiting += [request(30, new=4, n=8), request(11, new=4, n=3)]
    finish(line)
    assert calls == [30 + 11, 11, 11, 11]  # both prompts in one pass, then one token a sample


def test_the_last_token_is_not_fed_to_the_model(tiny_model, scheduler):
    line = scheduler()
    calls = tokens_per_call(tiny_model)
    line.waiting.append(request(9, new=1, n=4))
    (completions,) = finish(line).values()
    assert calls == [9]
    assert [len(c.token_ids) for c in completions] == [1] * 4


def test_a_request_enters_while_others_run(tiny_model, scheduler):
    line = scheduler(replace(ROOMY, max_rows=4, kv_bytes=1 << 26))
    line.waiting += [request(5, new=6, n=2), request(5, new=3, n=2)]
    line.step()
    calls = tokens_per_call(tiny_model)
    line.waiting.append(request(7, new=2))
    line.step()
    assert calls == [4]  # all rows are taken: the four go on
    line.step()  # the second request ends
    line.step()
    assert calls == [4, 4, 7]
    line.step()
    assert calls == [4, 4, 7, 3]


def test_the_store_grows_for_a_later_turn_while_others_run(tiny_model, scheduler):
    """A longer prompt, and more requests than there are slots, do not wait for the running rows; all stay right."""
    alone = {}
    for name, line_request in (("first", request(5, new=90, n=2)), ("late", request(150, new=4))):
        line = scheduler()
        line.waiting.append(line_request)
        (alone[name],) = finish(line).values()
    line = scheduler()
    first, late = request(5, new=90, n=2), [request(150, new=4) for _ in range(3)]
    line.waiting.append(first)
    line.step()
    before = line.store.shape
    line.waiting += late
    line.step()
    assert len(line.rows) == 5
    assert line.store.shape.slots >= 4
    assert line.store.shape.prefix_capacity > before.prefix_capacity
    found = finish(line)
    for ended, expected in ((found[first], alone["first"]), *((found[r], alone["late"]) for r in late)):
        order = sorted(ended, key=lambda c: c.index)
        assert [c.token_ids.tolist() for c in order] == [
            c.token_ids.tolist() for c in sorted(expected, key=lambda c: c.index)
        ]


def test_the_store_never_grows_past_its_limits(scheduler):
    line = scheduler(replace(ROOMY, max_rows=2, kv_bytes=1))
    line.waiting += [request(5, new=5), request(150, new=5)]
    line.step()
    shape = line.store.shape
    line.step()
    assert line.store.shape == shape
    assert len(line.rows) == 1
    assert len(finish(line)) == 2


def test_the_head_sees_only_the_last_token_of_a_prompt(tiny_model, scheduler, monkeypatch):
    seen = []
    head = torch.nn.functional.linear

    def spy(x, weight, bias=None):
        if weight is tiny_model.get_output_embeddings().weight:
            seen.append(x.shape[0])
        return head(x, weight, bias)

    line = scheduler()
    monkeypatch.setattr(torch.nn.functional, "linear", spy)
    line.waiting += [request(30, new=2, n=5), request(20, new=2, n=5)]
    finish(line)
    assert seen == [2, 10]


# What is kept


def test_the_store_is_as_large_as_the_waiting_requests_need(scheduler):
    line = scheduler()
    line.waiting += [request(70, new=10, n=3), request(5, new=65, n=2)]
    line.step()
    shape = line.store.shape
    assert (shape.slots, shape.rows) == (2, 5)
    assert (shape.prefix_capacity, shape.row_capacity) == (80, 80)  # rounded up to 16


@pytest.mark.parametrize("kv_tokens", [16 + 2 * 16, 3 * (16 + 2 * 16) - 1, 3 * (16 + 2 * 16)])
def test_the_store_stays_within_its_bytes(scheduler, kv_tokens):
    line = scheduler(replace(ROOMY, max_rows=256, kv_bytes=kv_tokens * TOKEN_BYTES))
    requests = [request(10, new=4, n=2, seed=s) for s in range(7)]
    line.waiting += requests
    line.step()
    assert line.store.shape.num_bytes <= kv_tokens * TOKEN_BYTES
    assert line.store.shape.slots == kv_tokens // (16 + 2 * 16)
    found = finish(line)
    assert sorted(map(id, found)) == sorted(map(id, requests))
    assert all([c.index for c in sorted(cs, key=lambda c: c.index)] == [0, 1] for cs in found.values())


def test_rows_stay_within_their_number_but_one_request_always_fits(scheduler):
    line = scheduler(replace(ROOMY, max_rows=4, kv_bytes=1))
    line.waiting += [request(5, n=9), request(5, n=2)]
    seen = []
    while line.has_work:
        line.step()
        seen.append((len(line.rows), line.store.shape.rows))
    assert max(seen)[0] == 9
    assert (2, 2) in seen


def test_a_small_store_does_not_narrow_what_comes_next(scheduler):
    """After one lonely request a whole rollout runs at once, not one by one."""
    line = scheduler()
    line.waiting.append(request(20, new=8, n=4))
    finish(line)
    line.waiting += [request(10, new=4, n=4) for _ in range(5)]
    line.step()
    assert len(line.rows) == 20


def test_a_store_is_used_again_only_where_it_is_just_what_a_new_one_would_be(scheduler):
    """What ran before must not show in what comes next."""
    line = scheduler()
    line.waiting += [request(20, new=8, n=2) for _ in range(3)]
    finish(line)
    shape, memory = line.store.shape, line.store.prefixes
    line.waiting += [request(30, new=8, n=2) for _ in range(3)]
    finish(line)
    assert line.store.prefixes is memory
    line.waiting += [request(30, new=8, n=2) for _ in range(2)]
    finish(line)
    assert line.store.prefixes is not memory
    assert line.store.shape == replace(shape, slots=2, rows=4)


def test_prompts_are_computed_in_portions(tiny_model, scheduler, monkeypatch):
    monkeypatch.setattr("treadle.rollout.engines.torch_engine.scheduler.MAX_PREFILL_TOKENS", 50)
    line = scheduler()
    calls = tokens_per_call(tiny_model)
    line.waiting += [request(20, new=2), request(20, new=2), request(20, new=2), request(60, new=2)]
    finish(line)
    assert calls[:3] == [40, 20, 60]  # 20 + 20 fit; 20 + 60 do not; 60 alone goes all the same


def test_those_who_left_make_room(scheduler):
    line = scheduler(replace(ROOMY, max_rows=3, kv_bytes=1 << 30))
    gone, stays, waits = request(5, new=50, n=2), request(6, new=50, n=1, seed=3), request(7, new=50, n=2)
    waits_too = request(8, new=5)
    line.waiting += [gone, stays, waits, waits_too]
    for _ in range(3):
        line.step()
    line.drop([gone, waits_too])
    assert [row.request for row in line.rows] == [stays]
    assert list(line.waiting) == [waits]
    line.drop([gone])  # it is not there any more
    line.step()
    assert len(line.rows) == 3
    found = finish(line)
    alone = scheduler()
    alone.waiting.append(again := request(6, new=50, n=1, seed=3))
    assert found[stays][0].token_ids.tolist() == finish(alone)[again][0].token_ids.tolist()
    assert len(found[waits]) == 2


def test_sleep_frees_the_store(serve, tiny_codec):
    async def use(engine):
        sampling = SamplingParams(5)
        first = await complete(engine, [5, 6, 7], sampling)
        assert engine._runner.store.shape.num_bytes > 0
        await engine.sleep()
        assert engine._runner.store.shape.num_bytes == 0
        assert not any(layer.numel() for layer in engine._runner.store.prefixes.layers)
        second = await complete(engine, [5, 6, 7], sampling)
        return first, second

    (first,), (second,) = serve(use)
    assert first.token_ids.tolist() == second.token_ids.tolist()


# How it fails


def fail_at(model, call):
    """Let the model's `call`-th forward pass from now on raise."""
    count = 0

    def hook(module, args):
        nonlocal count
        count += 1
        if count == call:
            raise RuntimeError("out of memory, say")

    model.base_model.register_forward_pre_hook(hook)


@pytest.mark.parametrize("call", [1, 4])
def test_every_caller_hears_of_a_failed_step(serve, tiny_model, call):
    sampling = SamplingParams(20, ignore_eos=True)

    async def use(engine):
        fail_at(tiny_model, call)
        await engine.health()
        tasks = [complete(engine, [5] * length, sampling, n=2) for length in (3, 9, 4)]
        found = await asyncio.gather(*tasks, return_exceptions=True)
        with pytest.raises(EngineError, match="out of memory, say"):
            await engine.health()
        with pytest.raises(EngineError, match=r"failed earlier.*out of memory, say"):
            await complete(engine, [5], sampling)
        return found

    found = serve(use, replace(ROOMY, max_rows=4, kv_bytes=1 << 30))  # the third request waits in line
    assert [type(f) for f in found] == [EngineError] * 3
    assert all("the torch engine failed: RuntimeError('out of memory, say')" in str(f) for f in found)


def test_weights_that_are_not_finite_are_named(serve, tiny_model):
    async def use(engine):
        with torch.no_grad():
            tiny_model.get_input_embeddings().weight[9] = float("nan")
        await complete(engine, [9, 10], SamplingParams(3))

    with pytest.raises(EngineError, match="the logits of 1 of 1 samples are not finite"):
        serve(use)


def test_what_finished_before_a_failure_is_still_handed_over(serve, tiny_model):
    async def use(engine):
        fail_at(tiny_model, 4)
        short = asyncio.create_task(complete(engine, [5, 6], SamplingParams(2, ignore_eos=True)))
        long = asyncio.create_task(complete(engine, [5, 6], SamplingParams(20, ignore_eos=True)))
        return await asyncio.gather(short, long, return_exceptions=True)

    (short,), long = serve(use)
    assert (short.status, len(short.token_ids)) == (Status.TRUNCATED, 2)
    assert isinstance(long, EngineError)


def test_new_weights_are_used_from_the_next_token_on(serve, tiny_model):
    """The module is the trainer's own: nothing is copied, and the version says which weights made a token."""

    async def use(engine):
        task = asyncio.create_task(complete(engine, [5, 6, 7], SamplingParams(60, temperature=0, ignore_eos=True)))
        await complete(engine, [5], SamplingParams(3, ignore_eos=True))
        await engine.pause()
        with torch.no_grad():
            tiny_model.get_input_embeddings().weight.zero_()  # all logits are 0 from here on
        engine.hold_version(1)
        await engine.resume()
        return await task

    (completion,) = serve(use)
    new = completion.weight_versions == 1
    assert 3 <= (~new).sum() < 60
    assert completion.logprobs[new] == pytest.approx(torch.full((int(new.sum()),), 1 / 98).log().numpy(), abs=1e-5)
    assert (completion.logprobs[~new] > -4).all()


@pytest.mark.parametrize("said", [True, False])
def test_prepared_weights_follow_the_module_whether_the_version_was_set_or_not(tiny_model, tiny_codec, said):
    limits = replace(ROOMY, fused=True)

    def first_logprob(line: Line) -> float:
        line.waiting.append(Request([5, 6, 7], SamplingParams(1, temperature=1.0, ignore_eos=True, seed=3), 1))
        ((_, completion),) = line.step()
        return float(completion.logprobs[0])

    line = Line(tiny_model, tiny_codec, limits)
    before = first_logprob(line)
    with torch.no_grad():
        for parameter in tiny_model.parameters():
            parameter.mul_(1.5)
    line.runner.version += said
    after = first_logprob(line)
    assert after != before
    assert after == pytest.approx(first_logprob(Line(tiny_model, tiny_codec, limits)), abs=1e-6)
