"""From prompts to scored groups, on the real engine and with real rewards."""

import asyncio
import textwrap
import time
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest

from treadle.config import RewardSection
from treadle.errors import DeadlineError, EngineError
from treadle.rollout.engines.torch_engine.engine import TorchEngine
from treadle.rollout.engines.torch_engine.scheduler import EngineLimits
from treadle.rollout.manager import Collect, RolloutManager, prompt_seed
from treadle.rollout.rewards import build_scorer
from treadle.types import Completion, Prompt, SamplingParams, Status

REWARDS = '''
import asyncio
import time
from pathlib import Path

seen = []

async def length(sample):
    return len(sample.response)

async def gated(sample):
    """The first sample waits for a file, the others do not."""
    seen.append(sample.response)
    if len(seen) == 1:
        for _ in range(1000):
            if Path(sample.columns["gate"]).exists():
                return 5.0
            await asyncio.sleep(0.01)
        raise RuntimeError("the gate never opened")
    return 1.0

async def picky(sample):
    """By what the label says."""
    if sample.label == "raise":
        raise KeyError("gone")
    if sample.label == "hang":
        await asyncio.sleep(60)
    return 1.0

def blocks(sample):
    if sample.label == "hang":
        time.sleep(60)
    return 2.0

async def never(sample):
    await asyncio.sleep(60)
'''


@pytest.fixture
def rewards(tmp_path):
    """Path of one of the rewards above."""
    file = tmp_path / "my_rewards.py"
    file.write_text(textwrap.dedent(REWARDS))
    return lambda name: f"{file}:{name}"


class CountingEngine(TorchEngine):
    """The embedded engine, which also knows how many requests were ever in flight at once."""

    in_flight = most = 0

    async def generate(self, token_ids, sampling, n=1):
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        try:
            async with aclosing(super().generate(token_ids, sampling, n)) as completions:
                async for completion in completions:
                    yield completion
        finally:
            self.in_flight -= 1


@pytest.fixture
def open_manager(tiny_model, tiny_codec):
    @asynccontextmanager
    async def make(reward, *, timeout_seconds=60.0, concurrent=None, max_rows=256, reward_seconds=30.0):
        engine = CountingEngine(tiny_model, tiny_codec, EngineLimits(max_rows, 1 << 30, fused=False))
        section = RewardSection(custom_rm_path=reward, rm_timeout_seconds=reward_seconds)
        async with build_scorer(section) as scorer:
            try:
                yield (
                    RolloutManager(
                        engine, tiny_codec, timeout_seconds=timeout_seconds, max_concurrent_prompts=concurrent
                    ),
                    scorer,
                )
            finally:
                await engine.close()

    return make


def make_prompts(count, **kwargs):
    lengths = [(i * 5) % 11 + 2 for i in range(count)]
    return [
        Prompt(
            100 + i, tuple(3 + (i * 13 + t * 7) % 90 for t in range(length)), f"p{i}", data_name="d", row=i, **kwargs
        )
        for i, length in enumerate(lengths)
    ]


def make_job(prompts, *, n=2, new=12, seed=7, temperature=0.9, stops=()):
    sampling = SamplingParams(new, temperature=temperature, ignore_eos=True, stop_token_ids=stops)
    return Collect("rollout 3", prompts, sampling, n, seed)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60.0))


def content(groups):
    return [(s.group_id, s.index, s.token_ids.tolist(), s.reward, s.status) for g in groups for s in g.samples]


def test_groups_in_prompt_order_with_what_the_engine_made(open_manager, rewards, tiny_codec):
    prompts = make_prompts(5)
    job = make_job(prompts, n=3)
    counts = []

    async def main():
        async with open_manager(rewards("length")) as (manager, scorer):
            groups = await manager.collect(job, scorer, lambda done, total: counts.append((done, total)))
            sampling = replace(job.sampling, seed=prompt_seed(7, prompts[2]))
            async with aclosing(manager.engine.generate(prompts[2].token_ids, sampling, 3)) as completions:
                direct = sorted([c async for c in completions], key=lambda c: c.index)
            return groups, direct

    groups, direct = run(main())
    assert [g.prompt for g in groups] == prompts
    assert counts == [(i + 1, 15) for i in range(15)]
    for group in groups:
        assert [s.index for s in group.samples] == [0, 1, 2]
        for sample in group.samples:
            given = len(group.prompt.token_ids)
            assert sample.group_id == group.group_id
            assert sample.token_ids[:given].tolist() == list(group.prompt.token_ids)
            assert sample.loss_mask.tolist() == [False] * given + [True] * 12
            assert sample.text == tiny_codec.response_text(sample.token_ids[given:].tolist())
            assert sample.reward == len(sample.text)
            assert sample.reward_parts == {"length": len(sample.text)}
            assert sample.temperature == 0.9
            assert sample.status is Status.TRUNCATED
    for sample, completion in zip(groups[2].samples, direct, strict=True):
        given = len(groups[2].prompt.token_ids)
        assert sample.token_ids[given:].tolist() == completion.token_ids.tolist()
        assert sample.rollout_logprobs[given:] == pytest.approx(completion.logprobs, abs=1e-4)
        assert sample.weight_versions.tolist() == [-1] * given + [0] * 12


def test_seeds_of_prompts():
    prompt = make_prompts(1)[0]
    assert prompt_seed(7, prompt) == prompt_seed(7, replace(prompt, text="other text", label=3))
    others = [
        prompt_seed(8, prompt),
        prompt_seed(7, replace(prompt, row=1)),
        prompt_seed(7, replace(prompt, group_id=101)),
        prompt_seed(7, replace(prompt, data_name="e")),
    ]
    assert len({prompt_seed(7, prompt), *others}) == 5
    assert all(0 <= seed < 2**64 for seed in others)


def test_the_same_row_drawn_twice_gives_other_samples(open_manager, rewards):
    (prompt,) = make_prompts(1)

    async def main():
        async with open_manager(rewards("length")) as (manager, scorer):
            return await manager.collect(make_job([prompt, replace(prompt, group_id=101)]), scorer)

    first, second = run(main())
    assert first.samples[0].token_ids.tolist() != second.samples[0].token_ids.tolist()


@pytest.mark.parametrize("concurrent", [1, 3])
def test_how_many_are_in_flight_is_bounded_and_changes_nothing(open_manager, rewards, concurrent):
    prompts = make_prompts(8)
    job = make_job(prompts, n=4, stops=tuple(range(10, 20)), new=40)

    async def main(concurrent):
        async with open_manager(rewards("length"), concurrent=concurrent) as (manager, scorer):
            groups = await manager.collect(job, scorer)
            assert manager.engine.in_flight == 0
            return groups, manager.engine.most

    (free, most_free), (bounded, most_bounded) = run(main(None)), run(main(concurrent))
    assert (most_free, most_bounded) == (8, concurrent)
    assert [[s.index for s in g.samples] for g in free] == [[0, 1, 2, 3]] * 8, "whichever ended first"
    assert content(free) == content(bounded)


def test_samples_are_scored_while_others_are_generated(open_manager, rewards, tiny_model):
    passes = 0
    at = []

    def count_pass(module, args):
        nonlocal passes
        passes += 1

    tiny_model.base_model.register_forward_pre_hook(count_pass)

    async def main():
        async with open_manager(rewards("length")) as (manager, scorer):
            await manager.collect(make_job(make_prompts(1), new=1), scorer)  # starts the reward's process
            at.clear()
            job = make_job(make_prompts(8), n=4, new=200, stops=(10, 11, 12, 13))
            return await manager.collect(job, scorer, lambda done, total: at.append(passes))

    run(main())
    assert len(at) == 32
    assert at[0] < passes / 2


def test_a_slow_reward_holds_up_no_other_sample(open_manager, rewards, tmp_path):
    gate = tmp_path / "gate"

    def open_gate(done, total):
        if done == total - 1:
            gate.touch()  # only now may the first sample's reward return

    async def main():
        async with open_manager(rewards("gated")) as (manager, scorer):
            return await manager.collect(make_job(make_prompts(4, columns={"gate": str(gate)})), scorer, open_gate)

    groups = run(main())
    assert sorted(s.reward for g in groups for s in g.samples) == [1.0] * 7 + [5.0]


def test_a_failing_reward_fails_its_own_samples_only(open_manager, rewards):
    prompts = [replace(p, label=label) for p, label in zip(make_prompts(3), ("fine", "raise", "hang"), strict=True)]

    async def main():
        async with open_manager(rewards("picky"), reward_seconds=0.3) as (manager, scorer):
            return await manager.collect(make_job(prompts), scorer)

    fine, raised, hung = run(main())
    assert [(s.status, s.reward, s.failure) for s in fine.samples] == [(Status.TRUNCATED, 1.0, "")] * 2
    for group, why in ((raised, "KeyError"), (hung, "timed out after 0.3 s")):
        assert all(s.status is Status.FAILED and s.reward is None and why in s.failure for s in group.samples)
        assert all(s.response_length == 12 for s in group.samples), "what was sampled stays to be looked at"


def test_a_blocking_reward_in_a_worker_process(open_manager, rewards):
    prompts = [replace(p, label=label) for p, label in zip(make_prompts(2), ("fine", "hang"), strict=True)]

    async def main():
        async with open_manager(rewards("blocks"), reward_seconds=0.5) as (manager, scorer):
            return await manager.collect(make_job(prompts, n=1), scorer)

    fine, hung = run(main())
    assert fine.samples[0].reward == 2.0
    assert "timed out after 0.5 s" in hung.samples[0].failure


def test_a_deadline_in_generation_names_what_is_missing_and_leaves_a_working_engine(open_manager, rewards, tiny_model):
    slow = tiny_model.base_model.register_forward_pre_hook(lambda module, args: time.sleep(0.02))

    async def main():
        async with open_manager(rewards("length"), timeout_seconds=0.3) as (manager, scorer):
            with pytest.raises(DeadlineError) as caught:
                await manager.collect(make_job(make_prompts(3), n=4, new=200), scorer)
            assert str(caught.value) == (
                "rollout 3: waited 0.3 s for 12 samples and 12 are missing; raise --rollout-timeout-seconds"
            )
            assert manager.engine.in_flight == 0
            slow.remove()
            await manager.engine.health()
            await manager.engine.sleep()
            manager.timeout_seconds = 60.0
            return await manager.collect(make_job(make_prompts(3)), scorer)

    assert len(run(main())) == 3


def test_a_deadline_in_scoring_counts_what_is_done(open_manager, rewards):
    async def main():
        async with open_manager(rewards("picky"), timeout_seconds=1.0) as (manager, scorer):
            prompts = [replace(p, label=label) for p, label in zip(make_prompts(2), ("hang", ""), strict=True)]
            manager.timeout_seconds = 60.0
            await manager.collect(make_job(prompts[1:]), scorer)  # starts the reward's process
            manager.timeout_seconds = 1.0
            with pytest.raises(DeadlineError, match="waited 1 s for 6 samples and 3 are missing"):
                await manager.collect(make_job(prompts, n=3), scorer)

    run(main())


def test_a_failed_engine_ends_the_collection(open_manager, rewards, tiny_model):
    calls = 0

    def fail(module, args):
        nonlocal calls
        calls += 1
        if calls == 5:
            raise RuntimeError("out of memory, say")

    async def main():
        async with open_manager(rewards("length")) as (manager, scorer):
            tiny_model.base_model.register_forward_pre_hook(fail)
            await manager.collect(make_job(make_prompts(3)), scorer)

    with pytest.raises(EngineError, match="out of memory, say"):
        run(main())


def test_a_prompt_without_room_ends_the_collection_by_name(open_manager, rewards):
    async def main():
        async with open_manager(rewards("length")) as (manager, scorer):
            with pytest.raises(EngineError, match="200 new ones do not fit the model's context of 256"):
                await manager.collect(make_job([*make_prompts(2), Prompt(1, (5,) * 60, "")], new=200), scorer)
            return await manager.collect(make_job(make_prompts(2)), scorer)

    assert len(run(main())) == 2


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("reward", ["length", "never"])
def test_a_cancelled_collection_leaves_nothing_behind(open_manager, rewards, reward):
    async def main():
        async with open_manager(rewards(reward)) as (manager, scorer):
            before = asyncio.all_tasks()
            task = asyncio.create_task(manager.collect(make_job(make_prompts(3), n=4, new=30), scorer))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert manager.engine.in_flight == 0
            await asyncio.sleep(0.05)
            assert asyncio.all_tasks() <= before
            await manager.engine.sleep()

    run(main())


def test_a_sample_with_an_id_that_is_no_token_fails(open_manager, rewards, tiny_codec):
    """As a server gives it, whose model has padded embeddings."""
    stray = 1000

    class Server:
        async def generate(self, token_ids, sampling, n=1):
            for i in range(n):
                tokens = np.array([5, stray if i == 1 else 6], dtype=np.int32)
                versions = np.zeros(2, dtype=np.int32)
                yield Completion(i, tokens, np.zeros(2, np.float32), versions, Status.COMPLETED, "eos")

    async def main():
        async with open_manager(rewards("length")) as (_, scorer):
            manager = RolloutManager(Server(), tiny_codec, timeout_seconds=60.0)
            return await manager.collect(make_job(make_prompts(1), n=3), scorer)

    (group,) = run(main())
    assert [sample.status for sample in group.samples] == [Status.COMPLETED, Status.FAILED, Status.COMPLETED]
    assert group.samples[1].failure == "the engine sampled id 1000, which is no token of the tokenizer"
    assert group.samples[1].reward is None
