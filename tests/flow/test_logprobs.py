"""The trainer and the engine give a token the same logprob: what every importance ratio rests on."""

import asyncio

import numpy as np
import pytest

from treadle.config import RewardSection
from treadle.metrics import reduce_metrics
from treadle.rollout.engines.torch_engine.engine import TorchEngine
from treadle.rollout.engines.torch_engine.scheduler import EngineLimits
from treadle.rollout.manager import Collect, RolloutManager
from treadle.rollout.rewards import build_scorer
from treadle.training.batch import batch_of
from treadle.types import Prompt, SamplingParams
from treadle.weights import SentWeights
from treadle.weights.in_process import publish_in_process

SECONDS = 60.0
PROMPTS = [
    Prompt(i, tuple(3 + (i * 17 + t * 29) % 90 for t in range(length)), "", label="1", row=i)
    for i, length in enumerate((1, 30, 4, 17, 70))
]


def collect(engine, codec, sampling, n, seed=3):
    async def main():
        async with build_scorer(RewardSection(rm_type=("exact",))) as scorer:
            manager = RolloutManager(engine, codec, timeout_seconds=SECONDS)
            return await manager.collect(Collect("rollout", PROMPTS, sampling, n, seed), scorer)

    return asyncio.run(main())


def gaps(trainer, samples):
    """|trainer − engine| of every sampled token."""
    batch = batch_of(samples)
    logprobs = trainer.logprobs(batch, trainer.model)
    assert (logprobs[~batch.loss_mask] == 0).all()
    return (logprobs - batch.rollout_logprobs)[batch.loss_mask].abs().numpy()


def assert_same(found, tokens):
    assert len(found) == tokens
    assert found.mean() <= 1e-5
    assert found.max() <= 1e-4


@pytest.mark.parametrize("backend", ["batched", "sdpa"])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_engine_and_trainer_agree(make_trainer, tiny_codec, temperature, backend):
    trainer = make_trainer(attention_backend=backend, max_tokens_per_gpu=300)
    engine = TorchEngine(trainer.model, tiny_codec, EngineLimits(max_rows=7, kv_bytes=1 << 30))  # several waves
    groups = collect(engine, tiny_codec, SamplingParams(40, temperature=temperature, stop_token_ids=(20, 21)), n=3)
    samples = [s for g in groups for s in g.samples]
    assert len({len(s.token_ids) for s in samples}) > 5
    assert_same(gaps(trainer, samples), sum(s.response_length for s in samples))


def test_they_differ_where_the_temperature_is_forgotten(make_trainer, tiny_codec):
    """The check above can fail: a trainer at temperature 1 is far from an engine at 0.7."""
    trainer = make_trainer()
    engine = TorchEngine(trainer.model, tiny_codec, EngineLimits(64, 1 << 30))
    groups = collect(engine, tiny_codec, SamplingParams(20, temperature=0.7), n=2)
    for sample in (s for g in groups for s in g.samples):
        object.__setattr__(sample, "temperature", 1.0)
    assert gaps(trainer, [s for g in groups for s in g.samples]).mean() > 0.05


def test_they_agree_again_after_a_step(make_trainer, tiny_codec):
    """On the same module: what the optimizer wrote is what the engine samples with, under the new version."""
    trainer = make_trainer(rollout_batch_size=5, n_samples_per_prompt=4, lr=0.05)
    engine = TorchEngine(trainer.model, tiny_codec, EngineLimits(64, 1 << 30))
    publisher = publish_in_process(SentWeights(dict(trainer.model.named_parameters())), engine.receive, print)
    sampling = SamplingParams(12, temperature=0.9, ignore_eos=True)
    seen = []
    for version in range(3):
        asyncio.run(publisher.publish(version))
        groups = collect(engine, tiny_codec, sampling, n=4)
        samples = [s for g in groups for s in g.samples]
        assert {int(v) for s in samples for v in s.weight_versions[s.loss_mask]} == {version}
        assert_same(gaps(trainer, samples), 5 * 4 * 12)
        for sample, reward in zip(samples, np.linspace(0.0, 1.0, 20), strict=True):
            object.__setattr__(sample, "reward", float(reward))
        metrics = reduce_metrics(trainer.train(groups))
        assert metrics["train/rollout_logprob_abs_diff"] <= 1e-5
        assert metrics["train/rollout_logprob_abs_diff_max"] <= 1e-4
        assert metrics["train/ratio_mean"] == pytest.approx(1.0, abs=1e-6)
        assert gaps(trainer, samples).mean() > 1e-3, "the step changed the policy"
        seen.append([s.token_ids.tolist() for s in samples])
    assert seen[0] != seen[1] != seen[2]
