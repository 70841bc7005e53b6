"""A server (vLLM, SGLang) gets new weights, and dies: what it then computes, and who notices. See conftest.py."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress

import numpy as np
import psutil
import pytest
import torch

from treadle.errors import EngineError, EngineLostError
from treadle.rollout.engines.pool import EnginePool, PoolLimits
from treadle.rollout.engines.sglang_engine import dialect as sglang_dialect
from treadle.types import SamplingParams, Status
from treadle.weights import SentWeights
from treadle.weights.broadcast import BroadcastSender
from treadle.weights.disk import DiskSender
from treadle.weights.shm import ShmSender

pytestmark = pytest.mark.engines

CONTEXT = 256
PROMPT = [5, 9, 30, 7, 61]
SAMPLED = SamplingParams(24, ignore_eos=True)
SENDERS = {
    "shm": lambda weights, folder: ShmSender(weights),
    "disk": lambda weights, folder: DiskSender(weights, folder),
}


def load(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def sent(model) -> SentWeights:
    return SentWeights(dict(model.named_parameters()))


def change(model) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.05)


def gap(model, completion, start=0) -> float:
    """Largest distance of a logprob, from token `start` on, to that of a plain forward pass."""
    tokens = completion.token_ids.tolist()
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1].double()
    want = torch.log_softmax(logits, -1)[range(len(tokens)), tokens].numpy()
    return float(np.abs(completion.logprobs - want)[start:].max())


async def generate(engine, sampling=SAMPLED, n=3):
    return [completion async for completion in engine.generate(PROMPT, sampling, n)]


async def assert_serves(engine, model, version) -> None:
    for completion in await generate(engine):
        assert gap(model, completion) < 1e-4
        assert set(completion.weight_versions.tolist()) == {version}


async def push_and_compare(engine, model, sender_of, folder) -> None:
    """New weights, the same version again, a push that is refused, one more; requests are in flight all the time."""
    sender = sender_of(sent(model), folder / "weights")
    try:
        for version in (1, 1, 2, 5):
            flying = asyncio.create_task(generate(engine, SamplingParams(200, ignore_eos=True), 2))
            await asyncio.sleep(0.3)
            if version != engine.version:
                change(model)
            await engine.receive(sender.offer(version))
            await assert_serves(engine, model, version)
            for completion in await flying:
                first_new = int((completion.weight_versions < version).sum())
                assert gap(model, completion, first_new) < 1e-4
            await refused(engine, model, folder, version + 1)
            await assert_serves(engine, model, version)
    finally:
        sender.close()


async def refused(engine, model, folder, version) -> None:
    """A weight too few, one of another shape, and a file that is gone: the old weights stay whole."""
    names = dict(model.named_parameters())
    lacking = {name: weight for name, weight in names.items() if "layers.1.mlp.up" not in name}
    bent = {name: weight[:-1] if name.endswith("q_proj.weight") else weight for name, weight in names.items()}
    for weights, message in ((lacking, "up_proj.*not sent"), (bent, "q_proj.*is sent, the engine has")):
        sender = ShmSender(SentWeights(weights))
        with pytest.raises(EngineError, match=message):
            await engine.receive(sender.offer(version))
        sender.close()
    sender = ShmSender(sent(model))
    offer = sender.offer(version)
    sender.close()
    with pytest.raises(EngineError, match="is the trainer gone"):
        await engine.receive(offer)
    await engine.health()


def run(main, seconds=240.0):
    return asyncio.run(asyncio.wait_for(main, seconds))


@pytest.mark.parametrize("transport", SENDERS)
def test_after_every_push_logprobs_are_those_of_the_new_weights(
    transport, server_kind, client_of, shared_server, wide_model_dir, tmp_path
):
    """With a head tied to the embeddings, of which a CPU server may keep a copy."""
    address, _ = shared_server(server_kind)
    client = client_of(server_kind, wide_model_dir)

    async def main():
        model = load(wide_model_dir)
        engine = client.engine(address, server_kind)
        await engine.set_version(0)
        try:
            await push_and_compare(engine, model, SENDERS[transport], tmp_path)
        finally:
            await engine.close()
        after = client.engine(address, server_kind)
        sender = ShmSender(sent(load(wide_model_dir)))
        await after.receive(sender.offer(0))  # as the other tests want it
        sender.close()
        await after.close()

    run(main())


def test_a_broadcast_reaches_an_sglang_server(client_of, shared_server, wide_model_dir):
    """By way of its client, which is the rank of the group."""
    address, _ = shared_server("sglang")

    async def main():
        model, before = load(wide_model_dir), load(wide_model_dir)
        change(model)
        engine = client_of("sglang", wide_model_dir).engine(address, "sglang")
        await engine.set_version(0)
        for version, weights in ((1, model), (2, before)):  # the last one as the other tests want it
            sender = BroadcastSender(sent(weights), 1, timeout_seconds=60)
            offer = sender.offer(version)
            await asyncio.gather(engine.receive(offer), asyncio.to_thread(sender.deliver))
            await assert_serves(engine, weights, version)
            sender.close()
        await engine.close()

    run(main())


def test_a_push_that_sglang_can_not_load_ends_what_runs_and_the_next_one_heals(
    client_of, shared_server, wide_model_dir, tmp_path, monkeypatch
):
    address, _ = shared_server("sglang")

    async def main():
        model = load(wide_model_dir)
        engine = client_of("sglang", wide_model_dir).engine(address, "sglang")
        await engine.set_version(0)
        sender = ShmSender(sent(model))
        flying = asyncio.create_task(generate(engine, SamplingParams(200, ignore_eos=True), 2))
        await asyncio.sleep(0.3)
        with monkeypatch.context() as patch:
            patch.setattr(sglang_dialect, "folder_of", lambda offer: tmp_path / "gone")
            with pytest.raises(EngineError, match=r"update_weights_from_disk"):
                await engine.receive(sender.offer(1))
        assert {completion.status for completion in await flying} == {Status.ABORTED}
        with pytest.raises(EngineError, match=r"no whole weights: the update to version 1 broke off"):
            await generate(engine)
        await engine.receive(sender.offer(1))
        await assert_serves(engine, model, 1)
        await engine.close()
        sender.close()

    run(main())


def test_a_server_of_somebody_else_is_reached_and_left_running(
    server_kind, client_of, connect_server, shared_server, wide_model_dir
):
    address, _ = shared_server(server_kind)

    async def main():
        for _ in range(2):
            engine = await connect_server(server_kind)(address, client_of(server_kind, wide_model_dir), seconds=20)
            await engine.set_version(0)
            assert len(await generate(engine, n=2)) == 2
            await engine.close()

    run(main())


def test_the_life_of_a_server(server_kind, client_of, start_server, launch_server, make_wide_model, tmp_path):
    """One server and its successor: pushes of an untied model, kill -9 with requests in flight, a hang, the end."""
    folder = make_wide_model(tied=False)
    launch = launch_server(server_kind, folder)
    notes: list[str] = []

    def start(name):
        return start_server(server_kind)(launch, client_of(server_kind, folder, answer_seconds=20), name)

    async def main():
        model = load(folder)
        first = await start("engine 0")
        await first.set_version(0)
        await assert_serves(first, model, 0)
        await push_and_compare(first, model, SENDERS["shm"], tmp_path)

        sender = ShmSender(sent(model))
        offer = sender.offer(6)
        await first.receive(offer)

        async def again(index):
            engine = await start(f"engine {index}")
            await engine.receive(offer)
            return engine

        pool = EnginePool([first], again, PoolLimits(1.0, 25.0, 2), notes.append)
        flying = [asyncio.create_task(generate(pool, SamplingParams(200, ignore_eos=True), 2)) for _ in range(3)]
        await asyncio.sleep(0.3)
        of_guard = psutil.Process(first.process.process.pid).children()
        (server,) = (p for p in of_guard if not any("process_guard" in word for word in p.cmdline()))
        server.kill()
        for completions in await asyncio.gather(*flying):
            assert sorted(c.index for c in completions) == [0, 1]
            for completion in completions:
                assert len(completion.token_ids) == 200
                assert gap(model, completion) < 1e-4
                assert set(completion.weight_versions.tolist()) == {6}
        assert any("engine 0 is lost" in note for note in notes)
        assert any("back with the weights of version 6" in note for note in notes)
        await pool_hangs(pool)
        await pool.close()
        sender.close()

    async def pool_hangs(pool):
        (seat,) = pool._seats
        engine = seat.engine
        group = engine.process.process.pid
        quick = client_of(server_kind, folder, answer_seconds=2).engine(engine.address, "engine 0", engine.process)
        os.killpg(group, signal.SIGSTOP)
        with pytest.raises(EngineLostError, match=r"engine 0 did not answer /\w+ within 2 s"):
            await quick.health()
        os.killpg(group, signal.SIGCONT)
        engine.process.close()
        with suppress(ProcessLookupError):
            for _ in range(100):
                os.killpg(group, 0)
                await asyncio.sleep(0.1)
            pytest.fail("processes of the server are left")

    run(main(), 900)
