"""What every rollout engine does.

To test your own, add an entry to ENGINES: how it is made from a model folder's tiny Llama, and how it is told that
its weights have a new version.
"""

import asyncio
import dataclasses
import itertools
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from treadle.chat import Codec
from treadle.errors import EngineError
from treadle.rollout.engines.base import Engine
from treadle.rollout.engines.torch_engine import EngineLimits, TorchEngine
from treadle.types import Completion, SamplingParams, Status

SECONDS = 60.0  # a whole test; nothing here may wait for ever
CONTEXT = 256  # of the tiny Llama


@dataclass(frozen=True)
class EngineCase:
    make: Callable[..., Engine]  # (model, codec, max_rows)
    set_version: Callable[[Engine, int], None]


def make_torch_engine(model, codec, max_rows):
    return TorchEngine(model, codec, EngineLimits(max_rows=max_rows, kv_bytes=1 << 30))


ENGINES = {"torch": EngineCase(make_torch_engine, TorchEngine.set_version)}


@pytest.fixture(params=ENGINES)
def case(request) -> EngineCase:
    return ENGINES[request.param]


@pytest.fixture
def serve(case, tiny_model, tiny_codec):
    """Run a coroutine function on a fresh engine, which is closed afterwards."""

    def run(use, *, max_rows=256, codec=tiny_codec):
        async def main():
            engine = case.make(tiny_model, codec, max_rows)
            try:
                return await use(engine)
            finally:
                await engine.close()

        return asyncio.run(asyncio.wait_for(main(), SECONDS))

    return run


@pytest.fixture(scope="module")
def plain_model(tiny_model_dir):
    """The same model as transformers runs it by itself."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32, attn_implementation="eager")


async def complete(engine, prompt, sampling, n=1) -> list[Completion]:
    """The completions of one request, by index."""
    async with aclosing(engine.generate(prompt, sampling, n)) as completions:
        return sorted([c async for c in completions], key=lambda c: c.index)


def make_prompts(count, seed=0, shortest=1, longest=40):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 98, rng.integers(shortest, longest + 1)).tolist() for _ in range(count)]


def tokens_of(completions):
    return [c.token_ids.tolist() for c in completions]


def same(one: Completion, other: Completion) -> bool:
    return (
        one.token_ids.tolist() == other.token_ids.tolist()
        and np.allclose(one.logprobs, other.logprobs, atol=1e-4)
        and one.status is other.status
    )


def shape_is_right(completion: Completion) -> bool:
    arrays = completion.token_ids, completion.logprobs, completion.weight_versions
    return [a.dtype for a in arrays] == [np.int32, np.float32, np.int32] and len({a.shape for a in arrays}) == 1


# Against transformers


def test_greedy_tokens_are_those_of_transformers_generate(serve, plain_model):
    prompts = make_prompts(20)
    sampling = SamplingParams(max_new_tokens=24, temperature=0)

    async def use(engine):
        return await asyncio.gather(*(complete(engine, p, sampling) for p in prompts))

    for prompt, (completion,) in zip(prompts, serve(use), strict=True):
        with torch.no_grad():
            ids = torch.tensor([prompt])
            want = plain_model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, eos_token_id=0
            )
        assert completion.token_ids.tolist() == want[0, len(prompt) :].tolist()
        assert shape_is_right(completion)


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 1.4])
def test_logprobs_are_those_of_a_plain_forward_at_the_temperature(serve, plain_model, temperature):
    prompts = make_prompts(6, seed=1)
    sampling = SamplingParams(max_new_tokens=40, temperature=temperature, seed=5, ignore_eos=True)

    async def use(engine):
        return await asyncio.gather(*(complete(engine, p, sampling, n=4) for p in prompts))

    gaps = []
    for prompt, completions in zip(prompts, serve(use), strict=True):
        for completion in completions:
            tokens = completion.token_ids.tolist()
            with torch.no_grad():
                logits = plain_model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].double()
            want = torch.log_softmax(logits / (temperature or 1.0), dim=-1)[range(len(tokens)), tokens]
            gaps.append(np.abs(completion.logprobs - want.numpy()))
    gaps = np.concatenate(gaps)
    assert len(gaps) == 6 * 4 * 40
    assert gaps.mean() < 1e-5
    assert gaps.max() < 1e-4


def test_logprobs_are_of_the_cut_distribution(serve, plain_model):
    prompt = make_prompts(1, seed=2)[0]
    sampling = SamplingParams(max_new_tokens=30, temperature=0.8, top_k=5, seed=1, ignore_eos=True)
    (completion,) = serve(lambda engine: complete(engine, prompt, sampling))
    tokens = completion.token_ids.tolist()
    with torch.no_grad():
        logits = plain_model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1] / 0.8
    best = logits.topk(5, dim=-1)
    logits = torch.full_like(logits, float("-inf")).scatter(1, best.indices, best.values)
    want = torch.log_softmax(logits, dim=-1)[range(len(tokens)), tokens]
    assert completion.logprobs == pytest.approx(want.numpy(), abs=1e-4)


# Samples


def test_n_samples_have_indices_and_differ(serve):
    prompt = make_prompts(1)[0]
    completions = serve(lambda engine: complete(engine, prompt, SamplingParams(20, seed=3, ignore_eos=True), n=8))
    assert [c.index for c in completions] == list(range(8))
    assert all(shape_is_right(c) and len(c.token_ids) == 20 for c in completions)
    assert len({tuple(t) for t in tokens_of(completions)}) == 8


def test_seeds_and_prompts_make_other_samples(serve):
    one, two = make_prompts(2, shortest=10)

    async def use(engine):
        return [
            tokens_of(await complete(engine, prompt, SamplingParams(20, seed=seed, ignore_eos=True), 2))
            for prompt, seed in ((one, 0), (one, 1), (two, 0))
        ]

    found = serve(use)
    assert all(x != y for x, y in itertools.combinations([*found[0], *found[1], *found[2]], 2))


def test_a_sample_depends_on_seed_and_index_only(serve):
    """Alone, with another n, in a crowd, and submitted while others run."""
    prompts = make_prompts(12, seed=4)
    sampling = SamplingParams(max_new_tokens=30, temperature=0.9, seed=11)

    async def alone(engine):
        return await complete(engine, prompts[0], sampling, n=3)

    async def with_another_n(engine):
        return (await complete(engine, prompts[0], sampling, n=7))[:3]

    async def in_a_crowd(engine):
        others = (complete(engine, p, dataclasses.replace(sampling, temperature=1.3), n=4) for p in prompts[1:])
        return (await asyncio.gather(*others, complete(engine, prompts[0], sampling, n=3)))[-1]

    async def submitted_later(engine):
        long = dataclasses.replace(sampling, max_new_tokens=120, seed=2, ignore_eos=True)
        running = [asyncio.create_task(complete(engine, p, long, n=2)) for p in prompts[1:5]]
        await complete(engine, prompts[5], SamplingParams(5, ignore_eos=True), n=1)
        assert not any(task.done() for task in running)
        later = await complete(engine, prompts[0], sampling, n=3)
        await asyncio.gather(*running)
        return later

    want = serve(alone)
    for use in (alone, with_another_n, in_a_crowd, submitted_later):
        found = serve(use)
        assert len(found) == 3
        assert all(same(a, b) for a, b in zip(want, found, strict=True)), use.__name__


def test_different_settings_run_side_by_side(serve):
    prompts = make_prompts(6, seed=6)
    settings = [
        SamplingParams(10, temperature=0),
        SamplingParams(25, temperature=0.5, top_k=3, seed=1),
        SamplingParams(3, temperature=1.5, seed=2),
        SamplingParams(40, top_p=0.8, seed=3),
        SamplingParams(17, min_p=0.2, seed=4, stop=("a", "b")),
        SamplingParams(1, seed=5),
    ]

    async def together(engine):
        return await asyncio.gather(*(complete(engine, p, s, 3) for p, s in zip(prompts, settings, strict=True)))

    async def one_by_one(engine):
        return [await complete(engine, p, s, 3) for p, s in zip(prompts, settings, strict=True)]

    for a, b in zip(serve(together), serve(one_by_one), strict=True):
        assert all(same(x, y) for x, y in zip(a, b, strict=True))


def test_completions_come_as_they_finish(serve):
    prompt = make_prompts(1)[0]

    async def use(engine):
        free = SamplingParams(60, temperature=1.0, seed=1, ignore_eos=True)
        samples = await complete(engine, prompt, free, n=6)
        stop = int(samples[0].token_ids[9])
        async with aclosing(engine.generate(prompt, dataclasses.replace(free, stop_token_ids=(stop,)), 6)) as found:
            return [c async for c in found]

    lengths = [len(c.token_ids) for c in serve(use)]
    assert lengths == sorted(lengths)
    assert len(set(lengths)) > 1


# How a sample ends


def test_length_limit(serve):
    prompt = make_prompts(1)[0]
    for limit in (1, 2, 65):
        (completion,) = serve(lambda engine, n=limit: complete(engine, prompt, SamplingParams(n, ignore_eos=True)))
        assert len(completion.token_ids) == limit
        assert (completion.status, completion.stop_reason) == (Status.TRUNCATED, "length")


def test_eos_of_the_codec_ends_a_sample_unless_ignored(serve, tiny_codec):
    prompt = make_prompts(1)[0]
    sampling = SamplingParams(40, temperature=1.0, seed=2)
    (free,) = serve(lambda engine: complete(engine, prompt, dataclasses.replace(sampling, ignore_eos=True)))
    eos = int(free.token_ids[20])
    first = free.token_ids.tolist().index(eos)
    codec = Codec(tiny_codec.tokenizer, frozenset({0, eos}), "two ends")
    (ended,) = serve(lambda engine: complete(engine, prompt, sampling), codec=codec)
    assert ended.token_ids.tolist() == free.token_ids[: first + 1].tolist()
    assert (ended.status, ended.stop_reason) == (Status.COMPLETED, "eos")
    (ignored,) = serve(
        lambda engine: complete(engine, prompt, dataclasses.replace(sampling, ignore_eos=True)), codec=codec
    )
    assert same(ignored, free)


def test_an_end_at_the_limit_is_an_end(serve):
    """A sample whose last allowed token ends it was not cut."""
    prompt = make_prompts(1)[0]

    async def use(engine):
        (free,) = await complete(engine, prompt, SamplingParams(8, ignore_eos=True))
        last = int(free.token_ids[free.token_ids.tolist().index(int(free.token_ids[7]))])
        limit = free.token_ids.tolist().index(last) + 1
        return await complete(engine, prompt, SamplingParams(limit, ignore_eos=True, stop_token_ids=(last,)))

    (completion,) = serve(use)
    assert completion.status is Status.COMPLETED


def test_stop_token_ids_end_a_sample_also_where_eos_is_ignored(serve):
    prompt = make_prompts(1)[0]

    async def use(engine):
        (free,) = await complete(engine, prompt, SamplingParams(30, ignore_eos=True))
        stops = (int(free.token_ids[7]), int(free.token_ids[12]))
        ended = await complete(engine, prompt, SamplingParams(30, ignore_eos=True, stop_token_ids=stops))
        return free, stops, ended[0]

    free, stops, ended = serve(use)
    end = min(free.token_ids.tolist().index(s) for s in stops)
    assert ended.token_ids.tolist() == free.token_ids[: end + 1].tolist()
    assert ended.status is Status.COMPLETED
    assert ended.stop_reason == f"stop token {free.token_ids[end]}"


def test_stop_strings_end_a_sample_where_they_appear_and_are_kept(serve, tiny_codec):
    prompt = make_prompts(1)[0]

    async def use(engine):
        (free,) = await complete(engine, prompt, SamplingParams(60, seed=9, ignore_eos=True))
        text = tiny_codec.decode(free.token_ids)
        stops = ("never in it", text[20:24], text[40:42])
        return free, stops, await complete(engine, prompt, SamplingParams(60, seed=9, ignore_eos=True, stop=stops))

    free, stops, (ended,) = serve(use)
    texts = [tiny_codec.decode(free.token_ids[: k + 1]) for k in range(60)]
    end, stop = next((k, s) for k, text in enumerate(texts) for s in stops if s in text)
    assert ended.token_ids.tolist() == free.token_ids[: end + 1].tolist()
    assert texts[end].endswith(stop)
    assert (ended.status, ended.stop_reason) == (Status.COMPLETED, f"stop string {stop!r}")


def test_a_stop_string_in_the_prompt_does_not_count(serve, tiny_codec):
    prompt = tiny_codec.encode_text("stop here")
    (completion,) = serve(lambda engine: complete(engine, prompt, SamplingParams(5, ignore_eos=True, stop=("here",))))
    assert completion.status is Status.TRUNCATED


# Versions, pause, abort


def test_every_token_has_the_version_it_was_sampled_with(serve, case):
    long, short = make_prompts(2)

    async def use(engine):
        case.set_version(engine, 3)
        assert engine.version == 3
        task = asyncio.create_task(complete(engine, long, SamplingParams(150, ignore_eos=True), n=2))
        await complete(engine, short, SamplingParams(5, ignore_eos=True))
        await engine.pause()
        case.set_version(engine, 4)
        await engine.resume()
        return await task

    for completion in serve(use):
        versions = completion.weight_versions.tolist()
        assert versions == sorted(versions)
        assert set(versions) == {3, 4}
        assert versions.count(3) >= 5


def test_pause_holds_everything_and_resume_goes_on(serve):
    prompt = make_prompts(1)[0]
    sampling = SamplingParams(100, seed=1, ignore_eos=True)

    async def use(engine):
        (want,) = await complete(engine, prompt, sampling)
        running = asyncio.create_task(complete(engine, prompt, sampling))
        await complete(engine, prompt, SamplingParams(3, ignore_eos=True))
        await engine.pause()
        late = asyncio.create_task(complete(engine, prompt, sampling))
        done, _ = await asyncio.wait([running, late], timeout=0.1)
        assert not done
        await engine.resume()
        return want, *(await running), *(await late)

    want, running, late = serve(use)
    assert same(want, running)
    assert same(want, late)


def test_abort_gives_back_what_there_is(serve):
    prompts = make_prompts(3, seed=8)
    sampling = SamplingParams(200, seed=1, ignore_eos=True)

    async def use(engine):
        running = asyncio.create_task(complete(engine, prompts[0], sampling, n=2))
        await complete(engine, prompts[1], SamplingParams(5, ignore_eos=True))
        waiting = asyncio.create_task(complete(engine, prompts[2], sampling, n=3))  # no room beside the other two
        await asyncio.sleep(0)
        await engine.abort()
        await engine.health()
        return await running, await waiting, await complete(engine, prompts[0], sampling, n=2)

    running, waiting, again = serve(use, max_rows=3)
    for cut, whole in zip(running, again, strict=True):
        assert (cut.status, cut.stop_reason) == (Status.ABORTED, "abort")
        assert 5 <= len(cut.token_ids) < 200
        assert cut.token_ids.tolist() == whole.token_ids[: len(cut.token_ids)].tolist()
        assert cut.logprobs == pytest.approx(whole.logprobs[: len(cut.token_ids)], abs=1e-4)
        assert shape_is_right(cut)
    assert [(c.index, c.status, len(c.token_ids)) for c in waiting] == [(i, Status.ABORTED, 0) for i in range(3)]
    assert all(shape_is_right(c) for c in waiting)


@pytest.mark.parametrize("moments", range(8))
def test_an_abort_at_any_moment_leaves_a_working_engine(serve, moments):
    prompts = make_prompts(4, seed=8)

    async def use(engine):
        sampling = SamplingParams(100, ignore_eos=True)
        tasks = [asyncio.create_task(complete(engine, p, sampling, n=2)) for p in prompts]
        for _ in range(moments):
            await asyncio.sleep(0)
        await engine.abort()
        await engine.health()
        cut = await asyncio.gather(*tasks)
        return cut, await complete(engine, prompts[0], SamplingParams(4, ignore_eos=True))

    cut, (after,) = serve(use)
    assert all(len(c) == 2 for c in cut)
    assert len(after.token_ids) == 4


def test_abort_of_nothing_and_abort_while_paused(serve):
    prompt = make_prompts(1)[0]
    sampling = SamplingParams(6, seed=1, ignore_eos=True)

    async def use(engine):
        await engine.abort()
        (want,) = await complete(engine, prompt, sampling)
        await engine.pause()
        task = asyncio.create_task(complete(engine, prompt, sampling))
        await asyncio.sleep(0.02)
        await engine.abort()
        (cut,) = await task
        await engine.resume()
        await asyncio.sleep(0.02)
        await engine.health()
        return want, cut, *(await complete(engine, prompt, sampling))

    want, cut, after = serve(use)
    assert (cut.status, len(cut.token_ids)) == (Status.ABORTED, 0)
    assert same(want, after)


# Sleep


def test_sleep_and_wake_change_nothing(serve):
    prompts = make_prompts(5)
    sampling = SamplingParams(12, seed=2)

    async def use(engine):
        found = []
        for _ in range(3):
            found.append(await asyncio.gather(*(complete(engine, p, sampling, n=2) for p in prompts)))
            await engine.sleep()
            await engine.wake("weights")
            await engine.wake("kv")
        return found

    first, second, third = serve(use)
    for a, b, c in zip(first, second, third, strict=True):
        assert all(same(x, y) and same(x, z) for x, y, z in zip(a, b, c, strict=True))


def test_sleep_with_samples_running_is_refused(serve):
    prompt = make_prompts(1)[0]

    async def use(engine):
        task = asyncio.create_task(complete(engine, prompt, SamplingParams(100, ignore_eos=True)))
        await complete(engine, prompt, SamplingParams(3, ignore_eos=True))
        with pytest.raises(EngineError, match="can't sleep with samples running"):
            await engine.sleep()
        return await task

    (completion,) = serve(use)
    assert len(completion.token_ids) == 100


# Room


@pytest.mark.parametrize("max_rows", [1, 3, 7])
def test_more_requests_than_fit_all_finish_with_the_same_samples(serve, max_rows):
    prompts = make_prompts(9, seed=3)
    sampling = SamplingParams(10, seed=4)

    async def use(engine):
        return await asyncio.gather(*(complete(engine, p, sampling, n=3) for p in prompts))

    roomy, tight = serve(use), serve(use, max_rows=max_rows)
    for a, b in zip(roomy, tight, strict=True):
        assert all(same(x, y) for x, y in zip(a, b, strict=True))


def test_longer_prompts_and_responses_and_larger_n_than_before(serve):
    short, long = make_prompts(1, longest=5)[0], make_prompts(1, seed=1, shortest=150, longest=150)[0]
    small, large = SamplingParams(4, seed=1, ignore_eos=True), SamplingParams(100, seed=1, ignore_eos=True)

    async def use(engine):
        await complete(engine, short, small)
        while_running = asyncio.create_task(complete(engine, short, large, n=2))
        await complete(engine, short, small)
        return await complete(engine, long, large, n=9), await while_running

    many, two = serve(use)
    assert len(many) == 9
    assert all(len(c.token_ids) == 100 for c in [*many, *two])
    (alone, *_) = serve(lambda engine: complete(engine, long, large, n=9))
    assert same(many[0], alone)


def test_the_whole_context_may_be_used(serve):
    prompt = make_prompts(1, shortest=200, longest=200)[0]
    sampling = SamplingParams(CONTEXT - 200, ignore_eos=True)
    (completion,) = serve(lambda engine: complete(engine, prompt, sampling))
    assert len(completion.token_ids) == CONTEXT - 200


# What is refused


@pytest.mark.parametrize(
    ("prompt", "new", "n", "message"),
    [
        ([], 5, 1, "0 tokens"),
        ([3, 4], 5, 0, "n=0"),
        ([3, 4], 0, 1, "0 new"),
        ([3] * 250, 7, 1, "250 tokens and 7 new ones do not fit the model's context of 256"),
    ],
)
def test_bad_requests_are_refused_and_do_no_harm(serve, prompt, new, n, message):
    async def use(engine):
        with pytest.raises(EngineError, match=message):
            await complete(engine, prompt, SamplingParams(new), n)
        await engine.health()
        return await complete(engine, [5, 6], SamplingParams(3, ignore_eos=True))

    assert len(serve(use)) == 1


# Callers that leave, and the end


def test_a_caller_that_leaves_does_not_disturb_the_others(serve):
    prompts = make_prompts(4, seed=5)
    sampling = SamplingParams(60, seed=1, ignore_eos=True)

    async def alone(engine):
        return [await complete(engine, p, sampling, n=2) for p in prompts]

    async def with_leavers(engine):
        tasks = [asyncio.create_task(complete(engine, p, sampling, n=2)) for p in prompts]
        await complete(engine, prompts[0], SamplingParams(4, ignore_eos=True))
        for leaver in tasks[1::2]:
            leaver.cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(f, asyncio.CancelledError) for f in found] == [False, True, False, True]
        await engine.health()
        return found

    want, found = serve(alone), serve(with_leavers)
    for i in (0, 2):
        assert all(same(a, b) for a, b in zip(want[i], found[i], strict=True))


def test_a_request_whose_caller_left_is_dropped(serve):
    """It holds no room: the engine can sleep once the others are done."""
    prompt = make_prompts(1, longest=9)[0]

    async def use(engine):
        leaver = asyncio.create_task(complete(engine, prompt, SamplingParams(240, ignore_eos=True), n=2))
        await complete(engine, prompt, SamplingParams(4, ignore_eos=True))
        leaver.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaver
        (after,) = await complete(engine, prompt, SamplingParams(3, ignore_eos=True))
        await engine.sleep()
        return after

    assert len(serve(use, max_rows=3).token_ids) == 3


def test_close_ends_what_is_in_flight(serve):
    prompts = make_prompts(2)

    async def use(engine):
        running = asyncio.create_task(complete(engine, prompts[0], SamplingParams(200, ignore_eos=True), n=2))
        await complete(engine, prompts[1], SamplingParams(3, ignore_eos=True))
        await engine.close()
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await complete(engine, prompts[0], SamplingParams(3))
        return await running

    for completion in serve(use):
        assert completion.status is Status.ABORTED
        assert 3 <= len(completion.token_ids) < 200


def test_close_while_paused(serve):
    prompt = make_prompts(1)[0]

    async def use(engine):
        await engine.pause()
        task = asyncio.create_task(complete(engine, prompt, SamplingParams(5)))
        await asyncio.sleep(0.02)
        await engine.close()
        return await task

    (completion,) = serve(use)
    assert (completion.status, len(completion.token_ids)) == (Status.ABORTED, 0)
