"""What every rollout engine lives through: pauses, aborts, sleep, crowds, callers that leave, and its end."""

import asyncio

import pytest

from treadle.errors import EngineError
from treadle.types import SamplingParams, Status

CONTEXT = 256  # of the tiny Llama


# Pause and abort


def test_pause_holds_everything_and_resume_goes_on(serve, complete, make_prompts, same):
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


@pytest.mark.needs_bounded
def test_abort_gives_back_what_there_is(serve, complete, make_prompts, shape_is_right):
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


@pytest.mark.parametrize("paused", [False, True])
def test_an_abort_in_the_middle_gives_back_the_tokens_so_far(serve, paused, complete, make_prompts, shape_is_right):
    prompts = make_prompts(2, seed=8)
    sampling = SamplingParams(200, seed=1, ignore_eos=True)

    async def use(engine):
        running = asyncio.create_task(complete(engine, prompts[0], sampling, n=2))
        await complete(engine, prompts[1], SamplingParams(60, ignore_eos=True))
        if paused:
            await engine.pause()
        await engine.abort()
        cut = await running
        await engine.resume()
        return cut, await complete(engine, prompts[0], sampling, n=2)

    for cut, whole in zip(*serve(use), strict=True):
        assert (cut.status, cut.stop_reason) == (Status.ABORTED, "abort")
        assert 1 <= len(cut.token_ids) < 200
        assert cut.token_ids.tolist() == whole.token_ids[: len(cut.token_ids)].tolist()
        assert cut.logprobs == pytest.approx(whole.logprobs[: len(cut.token_ids)], abs=1e-4)
        assert shape_is_right(cut)


@pytest.mark.parametrize("moments", range(8))
def test_an_abort_at_any_moment_leaves_a_working_engine(serve, moments, complete, make_prompts):
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


def test_abort_of_nothing_and_abort_while_paused(serve, complete, make_prompts, same):
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


def test_sleep_and_wake_change_nothing(serve, complete, make_prompts, same):
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


def test_sleep_with_samples_running_is_refused(serve, complete, make_prompts):
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


@pytest.mark.needs_bounded
@pytest.mark.parametrize("max_rows", [1, 3, 7])
def test_more_requests_than_fit_all_finish_with_the_same_samples(serve, max_rows, complete, make_prompts, same):
    prompts = make_prompts(9, seed=3)
    sampling = SamplingParams(10, seed=4)

    async def use(engine):
        return await asyncio.gather(*(complete(engine, p, sampling, n=3) for p in prompts))

    roomy, tight = serve(use), serve(use, max_rows=max_rows)
    for a, b in zip(roomy, tight, strict=True):
        assert all(same(x, y) for x, y in zip(a, b, strict=True))


def test_longer_prompts_and_responses_and_larger_n_than_before(serve, complete, make_prompts, same):
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


def test_the_whole_context_may_be_used(serve, complete, make_prompts):
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
def test_bad_requests_are_refused_and_do_no_harm(serve, prompt, new, n, message, complete):
    async def use(engine):
        with pytest.raises(EngineError, match=message):
            await complete(engine, prompt, SamplingParams(new), n)
        await engine.health()
        return await complete(engine, [5, 6], SamplingParams(3, ignore_eos=True))

    assert len(serve(use)) == 1


# Callers that leave, and the end


def test_a_caller_that_leaves_does_not_disturb_the_others(serve, complete, make_prompts, same):
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


def test_a_request_whose_caller_left_is_dropped(serve, complete, make_prompts):
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


def test_close_ends_what_is_in_flight(serve, complete, make_prompts):
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
        assert 1 <= len(completion.token_ids) < 200


def test_close_while_paused(serve, complete, make_prompts):
    prompt = make_prompts(1)[0]

    async def use(engine):
        await engine.pause()
        task = asyncio.create_task(complete(engine, prompt, SamplingParams(5)))
        await asyncio.sleep(0.02)
        await engine.close()
        return await task

    (completion,) = serve(use)
    assert (completion.status, len(completion.token_ids)) == (Status.ABORTED, 0)
