"""A server (vLLM, SGLang) gets new weights, and dies: what it then computes, and who notices. See conftest.py."""

from __future__ import annotations

import asyncio
import importlib
import json
import multiprocessing
import os
import signal
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import save_file
from torch.multiprocessing.reductions import reduce_tensor

from treadle.errors import EngineError, EngineLostError
from treadle.rollout.engines.pool import EnginePool
from treadle.rollout.engines.restarts import PoolLimits
from treadle.rollout.engines.server_client import Call
from treadle.rollout.engines.server_engine import ServerEngine
from treadle.rollout.engines.sglang_engine import updates as sglang_updates
from treadle.run.servers import server_kind as kind_of
from treadle.types import SamplingParams, Status
from treadle.weights import Offer, SentWeights, broadcast, cuda_ipc, sglang_group
from treadle.weights.disk import DiskSender
from treadle.weights.publisher import exchange
from treadle.weights.shm import ShmSender

pytestmark = pytest.mark.engines

CONTEXT, PROMPT = 256, [5, 9, 30, 7, 61]
SAMPLED, LONG = SamplingParams(24, ignore_eos=True), SamplingParams(200, ignore_eos=True)
BUCKET_BYTES = 3000  # far less than most of the weights
TRANSPORTS = ("shm", "disk", "broadcast")
TRAP = "model.layers.1.self_attn.v_proj.weight"  # sent when the queries are out


def broadcast_to(server_kind, weights, num_receivers=1):
    """The trainer's end of the broadcast in which servers of this kind take part."""
    sender = {broadcast.NAME: broadcast.open_broadcast, sglang_group.NAME: sglang_group.open_sglang_group}[
        kind_of(server_kind).broadcast
    ]
    return sender(weights, num_receivers, bucket_bytes=BUCKET_BYTES, timeout_seconds=30.0)


def sender_for(server_kind, transport):
    """`make(weights, folder)`: the trainer's end of a transport to one server of this kind."""
    return {
        "shm": lambda weights, folder: ShmSender(weights),
        "disk": lambda weights, folder: DiskSender(weights, folder, max_shard_bytes=30_000),
        "broadcast": lambda weights, folder: broadcast_to(server_kind, weights),
    }[transport]


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
    """Largest distance of a logprob, from token `start` on, to that of a plain forward pass; 0 if there is no such token."""
    tokens = completion.token_ids.tolist()
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1].double()
    want = torch.log_softmax(logits, -1)[range(len(tokens)), tokens].numpy()
    return float(np.abs(completion.logprobs - want)[start:].max(initial=0.0))


async def generate(engine, sampling=SAMPLED, n=3):
    return [completion async for completion in engine.generate(PROMPT, sampling, n)]


async def assert_serves(engine, model, version) -> None:
    for completion in await generate(engine):
        assert gap(model, completion) < 1e-4
        assert set(completion.weight_versions.tolist()) == {version}


async def push(engine, sender, version) -> None:
    """Both ends; raises what the engine says, or else the sender."""
    for error in await push_to([engine], sender, version):
        raise error


async def push_to(engines, sender, version) -> list[BaseException]:
    """What went wrong, in the order of the engines and then of the sender."""
    offer = sender.offer(version)

    async def receive() -> None:
        found = await asyncio.gather(*(engine.receive(offer) for engine in engines), return_exceptions=True)
        errors.extend(error for error in found if isinstance(error, BaseException))

    errors: list[BaseException] = []
    of_sender = await exchange(offer.transport, receive(), partial(asyncio.to_thread, sender.deliver))
    return [*errors, *of_sender]


async def push_and_compare(engine, model, sender_of, folder, base=0) -> None:
    """New weights, the same version again, a push that is refused, one more; requests are in flight all the time."""
    sender, went_on = sender_of(sent(model), folder / "weights"), 0
    try:
        for version in (base + 1, base + 1, base + 2, base + 5):
            flying = asyncio.create_task(generate(engine, LONG, 2))
            await asyncio.sleep(0.1)
            if version != engine.version:
                change(model)
            await push(engine, sender, version)
            await assert_serves(engine, model, version)
            for completion in await flying:
                went_on += bool((completion.weight_versions == version).any())
                assert gap(model, completion, int((completion.weight_versions < version).sum())) < 1e-4
            await refused(engine, model, sender_of, folder, version + 1)
            await assert_serves(engine, model, version)
        assert went_on, "every sample ended before its push"
    finally:
        sender.close()


async def refused(engine, model, sender_of, folder, version) -> None:
    """A weight too few, one of another shape, and a trainer that is gone: the old weights stay whole."""
    names = dict(model.named_parameters())
    lacking = {name: weight for name, weight in names.items() if "layers.1.mlp.up" not in name}
    bent = {name: weight[:-1] if name.endswith("q_proj.weight") else weight for name, weight in names.items()}
    for i, (weights, message) in enumerate(((lacking, "up_proj.*not sent"), (bent, "q_proj.*is sent, the engine has"))):
        sender = sender_of(SentWeights(weights), folder / f"refused-{version}-{i}")
        with pytest.raises(EngineError, match=message):
            await push(engine, sender, version)
        sender.close()
    sender = sender_of(sent(model), folder / f"gone-{version}")
    offer = sender.offer(version)
    sender.close()
    quick = replace(offer, where={**offer.where, "timeout_seconds": 2.0})
    with pytest.raises(EngineError, match=r"is the trainer gone|is not in|refused|timed out"):
        await engine.receive(quick)
    await engine.health()


def run(main, seconds=240.0):
    return asyncio.run(asyncio.wait_for(main, seconds))


@pytest.fixture
def with_shared(server_kind, settings_of, shared_server, wide_model_dir):
    """`with_shared(use, seconds=240)`: run `use(engine, model)` on the server of all tests, whose first weights then come back."""

    settings = settings_of(server_kind, wide_model_dir)
    address, _ = shared_server(server_kind)

    def run_it(use, seconds=240.0):
        async def main():
            model = load(wide_model_dir)
            engine = ServerEngine(address, server_kind, settings)
            await engine.set_version(0)
            try:
                await use(engine, model)
            finally:
                await engine.close()
                after = ServerEngine(address, server_kind, settings)
                sender = ShmSender(sent(load(wide_model_dir)))
                await after.receive(sender.offer(0))
                sender.close()
                await after.close()

        run(main(), seconds)

    return run_it


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_after_every_push_logprobs_are_those_of_the_new_weights(kind, server_kind, with_shared, tmp_path):
    """With a head tied to the embeddings, of which a CPU server may keep a copy."""
    sender_of = sender_for(server_kind, kind)
    with_shared(lambda engine, model: push_and_compare(engine, model, sender_of, tmp_path))


@pytest.fixture
def trainer(monkeypatch):
    """`trainer(do, **fields)`: ask a trainer in a process of its own; what it answers, None where it dies instead."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    context = multiprocessing.get_context("spawn")
    channel, theirs = context.Pipe()
    process = context.Process(target=importlib.import_module("weight_trainer").serve, args=(theirs,))
    process.start()
    theirs.close()

    def ask(do, **fields):
        channel.send_bytes(json.dumps({"do": do, **fields}).encode())
        try:
            assert channel.poll(60), "no answer"
            return json.loads(channel.recv_bytes())
        except EOFError:
            return None

    yield ask
    process.kill()
    process.join(20)
    channel.close()


def test_a_trainer_killed_while_it_broadcasts_leaves_a_server_that_refuses(server_kind, trainer, with_shared, tmp_path):
    """SIGKILL when the queries of a layer are out and its values are not; the next whole push makes it serve again."""
    file = tmp_path / "weights.safetensors"

    async def use(engine, model):
        change(model)
        save_file({name: weight.detach().clone() for name, weight in model.named_parameters()}, file)
        kind = kind_of(server_kind).broadcast
        given = {"kind": kind, "folder": str(tmp_path), "weights": str(file), "dtype": None, "device": "cpu"}
        assert trainer("start", **given) is None
        assert trainer("die_at", name=TRAP) is None
        offer = Offer.from_json(trainer("offer", version=1))
        flying = asyncio.create_task(generate(engine, LONG, 2))
        await asyncio.sleep(0.1)
        died, caught = await asyncio.gather(
            asyncio.to_thread(trainer, "deliver"), engine.receive(offer), return_exceptions=True
        )
        assert died is None
        assert isinstance(caught, EngineError)
        assert "\n" not in str(caught)
        assert {completion.stop_reason for completion in await flying} == {"abort"}
        for refused in (generate(engine), engine.health()):
            with pytest.raises(EngineError, match=r"no whole weights.*version 1"):
                await refused
        change(model)
        sender = broadcast_to(server_kind, sent(model))
        try:
            for version in (2, 3):
                await push(engine, sender, version)
                await assert_serves(engine, model, version)
                change(model)
        finally:
            sender.close()

    with_shared(use)


class Trapped(dict[str, torch.Tensor]):
    """Weights, of which one springs a trap when it is read."""

    def __init__(self, weights, name, spring):
        super().__init__(weights)
        self._name, self._spring = name, spring

    def __getitem__(self, name):
        if name == self._name:
            self._spring()
        return super().__getitem__(name)


def test_every_worker_of_a_divided_server_receives(
    server_kind, launch_server, settings_of, make_wide_model, monkeypatch
):
    """Tensor parallel over two workers: two ranks of one broadcast, each of which keeps its part; neither hangs in one that
    breaks off."""
    for name, value in (("VLLM_CPU_OMP_THREADS_BIND", "nobind"), ("SGLANG_CPU_OMP_THREADS_BIND", "0|0")):
        monkeypatch.setenv(name, value)  # else each worker wants a NUMA node of its own

    async def breaks_off(engine, model) -> None:
        def lose() -> None:
            raise RuntimeError("the trainer lost its weights")

        weights = Trapped(dict(model.named_parameters()), TRAP, lose)
        sender = broadcast_to(server_kind, SentWeights(weights), 2)
        with pytest.raises(EngineError):
            await push(engine, sender, 3)
        with pytest.raises(EngineError, match=r"no whole weights.*version 3"):
            await engine.health()
        sender.close()

    folder = make_wide_model(tied=False, num_key_value_heads=2)
    launch = launch_server(server_kind, folder)
    own = {"vllm": {"distributed-executor-backend": "mp"}, "sglang": {}}[server_kind]
    launch = replace(launch, gpus=2, arguments={**launch.arguments, **own})

    async def main():
        model = load(folder)
        engine = await kind_of(server_kind).start(launch, settings_of(server_kind, folder))
        try:
            assert await engine.num_receivers() == 2
            sender = broadcast_to(server_kind, sent(model), 2)
            for version in (1, 2):
                change(model)
                await push(engine, sender, version)
                await assert_serves(engine, model, version)
            if (
                server_kind == "sglang"
            ):  # the next request to vLLM would get the answer of its other worker, which failed too
                await breaks_off(engine, model)
                await push(engine, sender, 3)
                await assert_serves(engine, model, 3)
            sender.close()
        finally:
            await engine.close()

    run(main(), 600)


def test_several_servers_take_one_broadcast_and_the_loss_of_one_tears_the_others(
    server_kind, settings_of, launch_server, shared_server, with_shared, wide_model_dir
):
    """kill -9 of one when the queries of a layer are out and its values are not; the next whole push heals the other."""

    async def use(one, model):
        launch = launch_server(server_kind, wide_model_dir)
        two = await kind_of(server_kind).start(launch, settings_of(server_kind, wide_model_dir), "engine 2")
        await two.set_version(0)
        weights = dict(model.named_parameters())

        def kill() -> None:
            server = server_of(two)
            for process in (*server.children(recursive=True), server):
                process.kill()

        sender = broadcast_to(server_kind, sent(model), 2)
        for version in (1, 2):
            change(model)
            assert not await push_to([one, two], sender, version)
            await asyncio.gather(*(assert_serves(engine, model, version) for engine in (one, two)))
        lacking = {name: weight for name, weight in weights.items() if "layers.1.mlp.up" not in name}
        other = broadcast_to(server_kind, SentWeights(lacking), 2)
        assert len(await push_to([one, two], other, 3)) == 3
        await asyncio.gather(*(assert_serves(engine, model, 2) for engine in (one, two)))
        deadly = broadcast_to(server_kind, SentWeights(Trapped(weights, TRAP, kill)), 2)
        change(model)
        assert any(isinstance(error, EngineLostError) for error in await push_to([one, two], deadly, 3))
        with pytest.raises(EngineError, match=r"no whole weights.*version 3"):
            await one.health()
        alone = broadcast_to(server_kind, sent(model))
        await push(one, alone, 3)
        await assert_serves(one, model, 3)
        for ended in (sender, other, deadly, alone):
            ended.close()
        await two.close()

    with_shared(use, 600)


def test_sglang_copies_tensors_that_are_pickled_for_it(settings_of, shared_server, wide_model_dir, monkeypatch):
    """The way of GPU handles, with memory of the CPU that is shared by name in the place of the GPU's."""
    address, _ = shared_server("sglang")
    strategy = torch.multiprocessing.get_sharing_strategy()

    def offered(model, version, **bent):
        tensors = {name: weight.detach().clone() for name, weight in {**dict(model.named_parameters()), **bent}.items()}
        monkeypatch.setattr(cuda_ipc, "reduced", lambda shared, gpus, spec: reduce_tensor(tensors[shared["name"]]))
        where = {"gpus": {}, "handles": {name: {"name": name} for name in tensors}}
        return Offer("cuda_ipc", version, SentWeights(tensors).specs, where)

    async def main():
        model = load(wide_model_dir)
        engine = ServerEngine(address, "sglang", settings_of("sglang", wide_model_dir))
        await engine.set_version(0)
        await engine.client.ask(Call("/begin_weight_update", {}))  # as a client that was lost in an update left it
        for version in (1, 2):
            change(model)
            flying = asyncio.create_task(generate(engine, LONG, 2))
            await asyncio.sleep(0.1)
            await engine.receive(offered(model, version))
            await assert_serves(engine, model, version)
            for completion in await flying:
                assert gap(model, completion, int((completion.weight_versions < version).sum())) < 1e-4
        with pytest.raises(EngineError, match=r"norm.weight.*is sent, the engine has"):
            await engine.receive(offered(model, 3, **{"model.norm.weight": torch.zeros(3)}))
        await assert_serves(engine, model, 2)
        first = load(wide_model_dir)
        await engine.receive(offered(first, 3))
        await assert_serves(engine, first, 3)
        await engine.close()

    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        run(main())
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)


def test_a_push_that_sglang_can_not_load_ends_what_runs_and_the_next_one_heals(
    settings_of, shared_server, wide_model_dir, tmp_path, monkeypatch
):
    address, _ = shared_server("sglang")

    async def main():
        model = load(wide_model_dir)
        engine = ServerEngine(address, "sglang", settings_of("sglang", wide_model_dir))
        await engine.set_version(0)
        sender = ShmSender(sent(model))
        flying = asyncio.create_task(generate(engine, LONG, 2))
        await asyncio.sleep(0.1)
        with monkeypatch.context() as patch:
            patch.setattr(sglang_updates, "folder_of", lambda offer: tmp_path / "gone")
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


def test_a_server_of_somebody_else_is_reached_and_left_running(server_kind, settings_of, shared_server, wide_model_dir):
    address, _ = shared_server(server_kind)

    async def main():
        for _ in range(2):
            engine = await kind_of(server_kind).connect(address, settings_of(server_kind, wide_model_dir), seconds=20)
            await engine.set_version(0)
            assert len(await generate(engine, n=2)) == 2
            await engine.close()

    run(main())


def server_of(engine):
    """The server's process: of the guard's children the one that is not its watcher."""
    children = psutil.Process(engine.process.process.pid).children()
    (server,) = (p for p in children if not any("process_guard" in word for word in p.cmdline()))
    return server


def test_the_life_of_a_server(server_kind, settings_of, launch_server, make_wide_model, tmp_path):
    """One server and its successor: pushes of an untied model, kill -9 with requests in flight, a hang, the end."""
    folder = make_wide_model(tied=False)
    launch = launch_server(server_kind, folder)
    notes: list[str] = []

    def start(name):
        return kind_of(server_kind).start(launch, settings_of(server_kind, folder, answer_seconds=20), name)

    async def main():
        model = load(folder)
        first = await start("engine 0")
        await first.set_version(0)
        await assert_serves(first, model, 0)
        for i, kind in enumerate(TRANSPORTS):
            await push_and_compare(first, model, sender_for(server_kind, kind), tmp_path / kind, 10 * i)

        sender = ShmSender(sent(model))
        offer = sender.offer(60)
        await first.receive(offer)

        async def again(index):
            engine = await start(f"engine {index}")
            await engine.receive(offer)
            return engine

        pool = EnginePool([first], again, PoolLimits(1.0, 25.0, 2), notes.append)
        flying = [asyncio.create_task(generate(pool, LONG, 2)) for _ in range(3)]
        await asyncio.sleep(0.1)
        server_of(first).kill()
        for completions in await asyncio.gather(*flying):
            assert sorted(c.index for c in completions) == [0, 1]
            assert all(len(c.token_ids) == 200 and gap(model, c) < 1e-4 for c in completions)
            assert all(set(c.weight_versions.tolist()) == {60} for c in completions)
        assert any("engine 0 died" in note for note in notes)
        assert any("back with the weights of version 60" in note for note in notes)
        await pool_hangs(pool)
        await pool.close()
        sender.close()

    async def pool_hangs(pool):
        (slot,) = pool._slots.slots
        engine = slot.engine
        group = engine.process.process.pid
        quick = ServerEngine(
            engine.client.address, "engine 0", settings_of(server_kind, folder, answer_seconds=2), engine.process
        )
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
