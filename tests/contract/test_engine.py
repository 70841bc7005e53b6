"""What every rollout engine generates: tokens, logprobs, versions, and how a sample ends. See conftest.py."""

import asyncio
import dataclasses
import itertools
from contextlib import aclosing

import numpy as np
import pytest
import torch

from treadle.chat import Codec
from treadle.types import SamplingParams, Status


@pytest.fixture(scope="module")
def plain_model(wide_model_dir):
    """The same model as transformers runs it by itself."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(wide_model_dir, dtype=torch.float32, attn_implementation="eager")


def tokens_of(completions):
    return [c.token_ids.tolist() for c in completions]


# Against transformers


def test_greedy_tokens_are_those_of_transformers_generate(serve, plain_model, complete, make_prompts, shape_is_right):
    prompts = make_prompts(50)
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


@pytest.mark.samples
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 1.4])
def test_logprobs_are_those_of_a_plain_forward_at_the_temperature(
    serve, plain_model, temperature, complete, make_prompts
):
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


@pytest.mark.samples
def test_logprobs_are_of_the_cut_distribution(serve, plain_model, complete, make_prompts):
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


@pytest.mark.samples
def test_n_samples_have_indices_and_differ(serve, complete, make_prompts, shape_is_right):
    prompt = make_prompts(1)[0]
    completions = serve(lambda engine: complete(engine, prompt, SamplingParams(20, seed=3, ignore_eos=True), n=8))
    assert [c.index for c in completions] == list(range(8))
    assert all(shape_is_right(c) and len(c.token_ids) == 20 for c in completions)
    assert len({tuple(t) for t in tokens_of(completions)}) == 8


@pytest.mark.needs_seeded
def test_seeds_and_prompts_make_other_samples(serve, complete, make_prompts):
    one, two = make_prompts(2, shortest=10)

    async def use(engine):
        return [
            tokens_of(await complete(engine, prompt, SamplingParams(20, seed=seed, ignore_eos=True), 2))
            for prompt, seed in ((one, 0), (one, 1), (two, 0))
        ]

    found = serve(use)
    assert all(x != y for x, y in itertools.combinations([*found[0], *found[1], *found[2]], 2))


@pytest.mark.needs_seeded
def test_a_sample_depends_on_seed_and_index_only(serve, complete, make_prompts, same):
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


def test_different_settings_run_side_by_side(serve, complete, make_prompts, same):
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


@pytest.mark.needs_seeded
def test_completions_come_as_they_finish(serve, complete, make_prompts):
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


def test_length_limit(serve, complete, make_prompts):
    prompt = make_prompts(1)[0]
    for limit in (1, 2, 65):
        (completion,) = serve(lambda engine, n=limit: complete(engine, prompt, SamplingParams(n, ignore_eos=True)))
        assert len(completion.token_ids) == limit
        assert (completion.status, completion.stop_reason) == (Status.TRUNCATED, "length")


@pytest.mark.needs_seeded
def test_eos_of_the_codec_ends_a_sample_unless_ignored(serve, tiny_codec, complete, make_prompts, same):
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


def test_an_end_at_the_limit_is_an_end(serve, complete, make_prompts):
    """A sample whose last allowed token ends it was not cut."""
    prompt = make_prompts(1)[0]

    async def use(engine):
        (free,) = await complete(engine, prompt, SamplingParams(8, ignore_eos=True))
        last = int(free.token_ids[free.token_ids.tolist().index(int(free.token_ids[7]))])
        limit = free.token_ids.tolist().index(last) + 1
        return await complete(engine, prompt, SamplingParams(limit, ignore_eos=True, stop_token_ids=(last,)))

    (completion,) = serve(use)
    assert completion.status is Status.COMPLETED


def test_stop_token_ids_end_a_sample_also_where_eos_is_ignored(serve, complete, make_prompts):
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


def test_stop_strings_end_a_sample_where_they_appear_and_are_kept(serve, tiny_codec, complete, make_prompts):
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


@pytest.mark.needs_seeded
def test_a_special_token_may_be_a_stop_string(serve, tiny_codec, complete, make_prompts):
    prompt = make_prompts(1)[0]
    (user,) = tiny_codec.encode_rendered("<user>")
    params = SamplingParams(60, seed=4, ignore_eos=True)

    async def use(engine):
        stopped = SamplingParams(60, seed=4, ignore_eos=True, stop=("<user>",))
        return await complete(engine, prompt, params, 8), await complete(engine, prompt, stopped, 8)

    pairs = [(f.token_ids.tolist(), e) for f, e in zip(*serve(use), strict=True)]
    assert any(user in free for free, _ in pairs), "choose another seed"
    for free, ended in pairs:
        end = free.index(user) + 1 if user in free else 60
        assert ended.token_ids.tolist() == free[:end]
        assert ended.status is (Status.COMPLETED if user in free else Status.TRUNCATED)


def test_a_stop_string_in_the_prompt_does_not_count(serve, tiny_codec, complete):
    prompt = tiny_codec.encode_text("stop here")
    (completion,) = serve(lambda engine: complete(engine, prompt, SamplingParams(5, ignore_eos=True, stop=("here",))))
    assert completion.status is Status.TRUNCATED


# Versions


def test_every_token_has_the_version_it_was_sampled_with(serve, engine_case, complete, make_prompts):
    long, short = make_prompts(2)

    async def use(engine):
        await engine_case.set_version(engine, 3)
        assert engine.version == 3
        task = asyncio.create_task(complete(engine, long, SamplingParams(150, ignore_eos=True), n=2))
        await complete(engine, short, SamplingParams(5, ignore_eos=True))
        await engine.pause()
        await engine_case.set_version(engine, 4)
        await engine.resume()
        return await task

    for completion in serve(use):
        versions = completion.weight_versions.tolist()
        assert versions == sorted(versions)
        assert set(versions) == {3, 4}
        assert versions.count(3) >= 1


@pytest.mark.samples
def test_samples_have_the_frequencies_of_the_distribution(serve, plain_model, complete, make_prompts):
    prompt, n = make_prompts(1, seed=3)[0], 500
    found = serve(lambda engine: complete(engine, prompt, SamplingParams(1, temperature=0.7, ignore_eos=True), n))
    with torch.no_grad():
        want = (plain_model(torch.tensor([prompt])).logits[0, -1].double() / 0.7).softmax(-1).numpy()
    counts = np.bincount([c.token_ids[0] for c in found], minlength=len(want))
    spread = np.sqrt(n * want * (1 - want))
    assert (np.abs(counts - n * want) < 5 * spread + 1).all()
