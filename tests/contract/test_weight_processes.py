"""Weights from a trainer that is another process: what the engine then computes, and what it does when that one dies."""

from __future__ import annotations

import asyncio
import importlib
import json
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import replace
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from treadle.errors import EngineError
from treadle.models.attention import PackedAttention
from treadle.models.forward import head_of, hidden_states
from treadle.models.layout import PackedLayout
from treadle.models.load import load_model
from treadle.rollout.engines.torch_engine.engine import TorchEngine
from treadle.rollout.engines.torch_engine.scheduler import EngineLimits
from treadle.types import SamplingParams
from treadle.weights import Offer, SentWeights, ServedWeights, WeightReceiver
from treadle.weights.broadcast import BroadcastReceiver
from treadle.weights.disk import DiskReceiver
from treadle.weights.disk_delta import DeltaReceiver
from treadle.weights.shm import ShmReceiver

RECEIVERS: Mapping[str, Callable[[ServedWeights], WeightReceiver]] = {
    "shm": ShmReceiver,
    "disk": DiskReceiver,
    "disk-delta": DeltaReceiver,
    "broadcast": BroadcastReceiver,
}
PROMPT = [5, 9, 30, 7, 61]

pytestmark = pytest.mark.parametrize("kind", RECEIVERS)


class TrainerProcess:
    """A process that runs `weight_trainer.serve`, and the channel to it."""

    def __init__(self, context: ForkServerContext, scratch: Path):
        self._scratch = scratch
        self._channel, theirs = context.Pipe()
        self.process = context.Process(target=importlib.import_module("weight_trainer").serve, args=(theirs,))
        self.process.start()
        theirs.close()

    def tell(self, do: str, **fields: Any) -> None:
        self._channel.send_bytes(json.dumps({"do": do, **fields}).encode())

    def hear(self) -> Any:
        """The answer; None where the process died instead."""
        try:
            assert self._channel.poll(30), "no answer"
            return json.loads(self._channel.recv_bytes())
        except EOFError:
            return None

    def ask(self, do: str, **fields: Any) -> Any:
        self.tell(do, **fields)
        answer = self.hear()
        assert "error" not in (answer or {}), answer
        return answer

    def start(self, kind: str, folder: Path, model, device: str = "cpu") -> None:
        self.ask("start", kind=kind, folder=str(folder), weights=self._save(model), dtype=None, device=device)

    def load(self, model) -> None:
        self.ask("load", weights=self._save(model))

    def _save(self, model) -> str:
        save_file(weights_of(model), self._scratch / "weights.safetensors")
        return str(self._scratch / "weights.safetensors")

    def end(self) -> None:
        self.process.kill()
        self.process.join(20)
        self._channel.close()


@pytest.fixture(scope="module")
def context() -> Iterator[ForkServerContext]:
    """Real processes, each forked from one that has imported torch but never used it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parent)
        found = multiprocessing.get_context("forkserver")
        found.set_forkserver_preload(["torch.distributed", "safetensors.torch", "treadle.weights"])
        yield found


@pytest.fixture(scope="module")
def processes() -> Iterator[dict[str, TrainerProcess]]:
    """By transport, so that a process that lives serves several tests."""
    started: dict[str, TrainerProcess] = {}
    yield started
    for trainer in started.values():
        trainer.end()


@pytest.fixture
def trainer(kind, context, processes, tmp_path_factory) -> TrainerProcess:
    if kind in processes and not processes[kind].process.is_alive():
        processes.pop(kind).end()
    if kind not in processes:
        processes[kind] = TrainerProcess(context, tmp_path_factory.mktemp("scratch"))
    return processes[kind]


def weights_of(model) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def perturb(model) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.05)


def reference_logprobs(model, token_ids: list[int]) -> torch.Tensor:
    """Logprob of each token after the first, from one plain forward pass."""
    layout = PackedLayout.of_lengths([len(token_ids)])
    tokens = torch.tensor(token_ids)
    with torch.no_grad():
        hidden = hidden_states(model, tokens, layout.position_ids, PackedAttention(layout))
        table = head_of(model).logits(hidden).float().log_softmax(-1)
    return table[:-1].gather(-1, tokens[1:, None])[:, 0]


async def generate(engine: TorchEngine):
    async with aclosing(engine.generate(PROMPT, SamplingParams(12, ignore_eos=True), 2)) as found:
        return [completion async for completion in found]


async def assert_generates_as(engine: TorchEngine, model, version: int) -> None:
    for completion in await generate(engine):
        expected = reference_logprobs(model, PROMPT + completion.token_ids.tolist())[len(PROMPT) - 1 :]
        assert torch.allclose(torch.from_numpy(completion.logprobs), expected, atol=1e-4)
        assert set(completion.weight_versions.tolist()) == {version}


@pytest.fixture
def untied_dir(tiny_model_dir, tmp_path_factory) -> Path:
    from transformers import AutoConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("untied")
    config = AutoConfig.from_pretrained(tiny_model_dir, tie_word_embeddings=False)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def load(folder: Path):
    return load_model(str(folder), torch.float32, torch.device("cpu"))


async def receive(trainer: TrainerProcess, engine: TorchEngine, receiver: WeightReceiver, offer: Offer) -> Any:
    """Both ends at once; the trainer's answer."""
    trainer.tell("deliver")
    await engine.receive_by(receiver, offer)
    return trainer.hear()


@pytest.mark.parametrize("head", ["tied", "untied"])
def test_the_engine_computes_what_the_other_process_pushed(
    kind, head, trainer, tiny_model_dir, untied_dir, tiny_codec, tmp_path
):
    folder = tiny_model_dir if head == "tied" else untied_dir
    trained, served_model = load(folder), load(folder)
    assert (trained.get_output_embeddings().weight is trained.get_input_embeddings().weight) is (head == "tied")
    trainer.start(kind, tmp_path, trained)

    async def main() -> None:
        engine = TorchEngine(served_model, tiny_codec, EngineLimits(16, 1 << 26))
        receiver = RECEIVERS[kind](ServedWeights(dict(served_model.named_parameters()), engine.hold_version))
        for version in (1, 2, 5):
            perturb(trained)
            trainer.load(trained)
            offer = Offer.from_json(trainer.ask("offer", version=version))
            assert await receive(trainer, engine, receiver, offer) is None
            await assert_generates_as(engine, trained, version)
        assert torch.equal(served_model.get_output_embeddings().weight, trained.get_output_embeddings().weight)
        receiver.close()
        await engine.close()

    asyncio.run(asyncio.wait_for(main(), 60))
    trainer.ask("close")
    assert list(tmp_path.iterdir()) == []


def test_a_trainer_killed_half_way_leaves_no_mixture(kind, trainer, tiny_model_dir, tiny_codec, tmp_path):
    """SIGKILL when half of the weights are out; then a new trainer in its place, and the same engine goes on."""
    trained, served_model = load(tiny_model_dir), load(tiny_model_dir)
    trainer.start(kind, tmp_path, trained)
    names = list(weights_of(trained))

    async def main() -> None:
        engine = TorchEngine(served_model, tiny_codec, EngineLimits(16, 1 << 26))
        served = ServedWeights(dict(served_model.named_parameters()), engine.hold_version)
        receiver = RECEIVERS[kind](served)
        offer = Offer.from_json(trainer.ask("offer", version=1))
        await receive(trainer, engine, receiver, offer)
        old = weights_of(served_model)

        perturb(trained)
        trainer.load(trained)
        trainer.ask("die_at", name=names[len(names) // 2])
        if kind == "broadcast":
            offer = Offer.from_json(trainer.ask("offer", version=2))
            with pytest.raises(EngineError) as caught:
                await receive(trainer, engine, receiver, offer)
            assert "\n" not in str(caught.value)
            found = weights_of(served_model)
            assert {torch.equal(found[name], old[name]) for name in names} == {True, False}  # a mixture indeed
            for refused in (generate(engine), engine.health()):
                with pytest.raises(EngineError, match=r"no whole weights.*version 2"):
                    await refused
        else:
            assert trainer.ask("offer", version=2) is None
            for where in (offer.where, {**offer.where, "path": str(offer.where.get("path", "")).replace("/0/", "/1/")}):
                with pytest.raises(EngineError):  # whatever an engine is told, there is no whole version 2
                    await engine.receive_by(receiver, replace(offer, version=2, where=where))
            assert all(torch.equal(now, old[name]) for name, now in weights_of(served_model).items())
            await receive_again(engine, receiver, offer)
        trainer.process.join(20)
        assert trainer.process.exitcode == -signal.SIGKILL

        sender = importlib.import_module("weight_trainer").make_sender(
            kind, SentWeights(dict(trained.named_parameters())), tmp_path
        )
        offer = sender.offer(2)
        await asyncio.gather(asyncio.to_thread(sender.deliver), engine.receive_by(receiver, offer))
        await assert_generates_as(engine, trained, 2)
        sender.close()
        assert list(tmp_path.iterdir()) == []  # what the killed one left is gone as well
        receiver.close()
        await engine.close()

    async def receive_again(engine: TorchEngine, receiver: WeightReceiver, offer: Offer) -> None:
        """Version 1 lies there whole, for an engine that comes late."""
        await engine.receive_by(receiver, offer)
        await assert_generates_as(engine, load(tiny_model_dir), 1)

    asyncio.run(asyncio.wait_for(main(), 60))
