"""The same tiny model on a GPU: what it generates and learns is what the CPU does, to float32 rounding."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from treadle.chat import Codec
from treadle.config import Config, ModelSection, OptimSection, TrainSection, batch_arithmetic
from treadle.models.load import load_model
from treadle.rollout.engines.torch_engine.engine import TorchEngine
from treadle.rollout.engines.torch_engine.scheduler import EngineLimits
from treadle.training.trainer import Trainer
from treadle.types import Completion, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")]


def generate(folder: Path, codec: Codec, device: str) -> list[Completion]:
    async def main() -> list[Completion]:
        engine = TorchEngine(
            load_model(str(folder), torch.float32, torch.device(device)), codec, EngineLimits(16, 1 << 26)
        )
        prompt = codec.encode_text("say something")
        found = [c async for c in engine.generate(prompt, SamplingParams(12, temperature=0.0), 2)]
        await engine.close()
        return found

    return asyncio.run(main())


def test_greedy_tokens_and_their_logprobs_are_those_of_the_cpu(tiny_model_dir: Path, tiny_codec: Codec) -> None:
    for ours, theirs in zip(*(generate(tiny_model_dir, tiny_codec, d) for d in ("cuda", "cpu")), strict=True):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert abs(ours.logprobs - theirs.logprobs).max() < 1e-4


def test_a_step_of_training_gives_the_weights_of_the_cpu(tiny_model_dir: Path, make_groups) -> None:
    groups = make_groups()
    after = {}
    for device in ("cuda", "cpu"):
        model = load_model(str(tiny_model_dir), torch.float32, torch.device(device))
        section = ModelSection(device=device, dtype="float32")
        config = Config(model=section, optim=OptimSection(lr=1e-3), train=TrainSection(num_rollout=1))
        Trainer(model, config, batch_arithmetic(config), 1).train(groups)
        after[device] = {name: p.detach().cpu() for name, p in model.named_parameters()}
    for name, weight in after["cpu"].items():
        torch.testing.assert_close(after["cuda"][name], weight, atol=1e-4, rtol=1e-3)


def test_optimizer_state_resumes_on_the_gpu_bit_for_bit(tiny_model_dir: Path, make_groups) -> None:
    """As a checkpoint does it: state through CPU tensors into a fresh optimizer, then the same step."""
    section = ModelSection(device="cuda", dtype="float32")
    config = Config(model=section, optim=OptimSection(lr=1e-3), train=TrainSection(num_rollout=2))
    trainers = []
    for _ in range(2):
        model = load_model(str(tiny_model_dir), torch.float32, torch.device("cuda"))
        trainers.append(Trainer(model, config, batch_arithmetic(config), 2))
    one, other = trainers
    one.train(make_groups())
    masters = {name: p.detach().cpu().clone() for name, p in one.optimizer.masters.items()}
    state = {name: tensor.cpu().clone() for name, tensor in one.optimizer.state_tensors().items()}
    other.optimizer.load_masters(masters)
    other.optimizer.load_state_tensors(state)
    other.optimizer.num_steps = one.optimizer.num_steps
    for trainer in trainers:
        trainer.train(make_groups(seed=1))
    for name, weight in one.model.named_parameters():
        assert torch.equal(other.model.get_parameter(name), weight), name
