"""Servers on a GPU take weights from this process: by handles on the same GPU, by NCCL from another one, through host memory."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from treadle.errors import EngineError
from treadle.rollout.engines.server_engine import ServerSettings
from treadle.rollout.engines.server_kind import ServerLaunch
from treadle.run.servers import server_kind as kind_of
from treadle.types import SamplingParams
from treadle.weights import SentWeights, broadcast, sglang_group
from treadle.weights.cuda_ipc import CudaIpcSender
from treadle.weights.publisher import exchange
from treadle.weights.shm import ShmSender

pytestmark = [
    *(pytest.mark.gpu, pytest.mark.engines, pytest.mark.timeout(900)),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]

CONTEXT = 256
PROMPT = [5, 9, 30, 7, 61]
WAYS = ("cuda_ipc", "nccl", "gloo", "shm")


def sender_of(engine_kind, way, weights):
    """The trainer's end; a broadcast is the one in which servers of this kind take part."""
    if way == "cuda_ipc":
        return CudaIpcSender(weights)
    if way == "shm":
        return ShmSender(weights)
    device = torch.device("cuda:1" if way == "nccl" else "cpu")
    open_sender = {broadcast.NAME: broadcast.open_broadcast, sglang_group.NAME: sglang_group.open_sglang_group}[
        kind_of(engine_kind).broadcast
    ]
    return open_sender(weights, 1, backend=way, bucket_bytes=1 << 16, timeout_seconds=30.0, device=device)


SMALL = {
    "vllm": {"enforce-eager": True, "max-model-len": str(CONTEXT), "gpu-memory-utilization": "0.3"},
    "sglang": {"disable-cuda-graph": True, "context-length": str(CONTEXT), "mem-fraction-static": "0.3"},
}


async def push(engine, sender, version) -> None:
    offer = sender.offer(version)
    for error in await exchange(offer.transport, engine.receive(offer), lambda: asyncio.to_thread(sender.deliver)):
        raise error


async def gap(engine, model, version) -> float:
    """Largest distance of a logprob to that of a plain forward pass."""
    found = 0.0
    async for completion in engine.generate(PROMPT, SamplingParams(24, ignore_eos=True), 3):
        tokens = completion.token_ids.tolist()
        with torch.no_grad():
            logits = model(torch.tensor([PROMPT + tokens], device=model.device)).logits[0, len(PROMPT) - 1 : -1]
        want = torch.log_softmax(logits.double(), -1)[range(len(tokens)), tokens].cpu().numpy()
        assert set(completion.weight_versions.tolist()) == {version}
        found = max(found, float(np.abs(completion.logprobs - want).max()))
    return found


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", WAYS)
@pytest.mark.parametrize("engine_kind", SMALL)
def test_logprobs_after_a_push_to_a_server_on_a_gpu(engine_kind, kind, tied, request, make_wide_model, tmp_path):
    from transformers import AutoModelForCausalLM

    if kind == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs a GPU for each rank")
    folder = make_wide_model(tied=tied)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.to("cuda:1" if kind == "nccl" else "cuda:0")
    python, log = request.getfixturevalue(f"{engine_kind}_python"), tmp_path / "server.log"
    launch = ServerLaunch(python, str(folder), "float32", "cuda", log, 600, arguments=SMALL[engine_kind])
    server = kind_of(engine_kind)
    settings = ServerSettings(server.dialect(folder, torch.float32, "cuda"), {0}, CONTEXT, sleeps=True)

    async def main() -> None:
        engine = await server.start(launch, settings)
        sender = sender_of(engine_kind, kind, SentWeights(dict(model.named_parameters())))
        try:
            for version in (1, 1, 2, 5):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(torch.randn_like(parameter), alpha=0.05)
                await push(engine, sender, version)
                assert await gap(engine, model, version) < 1e-3
                await engine.sleep()
                await engine.wake("weights")
                await engine.wake("kv")
                bent = {name: weight[:-1] for name, weight in model.named_parameters()}
                other = sender_of(engine_kind, kind, SentWeights(bent))
                with pytest.raises(EngineError, match="is sent, the engine has"):
                    await push(engine, other, version + 1)
                other.close()
                assert await gap(engine, model, version) < 1e-3
        finally:
            sender.close()
            await engine.close()

    asyncio.run(asyncio.wait_for(main(), 900))
