"""Generation, a train step and a whole step on one GPU with a random Qwen-like model: tokens per second and share of the peak.

    bash benches/gpu.sh            # all of it, under six minutes
    python benches/bench_gpu.py --device cpu --size tiny     # the same code on a CPU, to see that it runs

Needs torch and transformers only, no download. The peaks it compares with are measured in the same run: a large bfloat16 matmul for
FLOP, a copy for bytes. Model FLOP are 2 a parameter and token for a forward pass, 6 for forward and backward (recomputation
is not counted); bytes of a decode step are the weights and the keys and values read.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from typing import Any

import torch

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden": 64, "layers": 2, "heads": 4, "kv": 2, "inner": 128, "vocab": 512},
    "0.5b": {"hidden": 896, "layers": 24, "heads": 14, "kv": 2, "inner": 4864, "vocab": 151_936},
    "1.5b": {"hidden": 1536, "layers": 28, "heads": 12, "kv": 2, "inner": 8960, "vocab": 151_936},
}


def build_model(size: str, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM, Qwen2Config

    from treadle.models.attention import register_attention
    from treadle.models.cpu.norm import fuse_norms

    shape = SIZES[size]
    config = Qwen2Config(
        vocab_size=shape["vocab"],
        hidden_size=shape["hidden"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv"],
        intermediate_size=shape["inner"],
        tie_word_embeddings=True,
        max_position_embeddings=8192,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, attn_implementation=register_attention(), dtype=torch.bfloat16)
    fuse_norms(model)
    return model.eval()


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds_of(run: Callable[[], object], device: torch.device, repeats: int = 3) -> float:
    """The fastest of several runs after one to warm up."""
    run()
    times = []
    for _ in range(repeats):
        settle(device)
        began = time.perf_counter()
        run()
        settle(device)
        times.append(time.perf_counter() - began)
    return min(times)


def peaks(device: torch.device) -> dict[str, float]:
    """FLOP a second of a large matmul and bytes a second of a copy (read and write)."""
    n = 8192 if device.type == "cuda" else 512
    a, b = torch.randn(2, n, n, device=device, dtype=torch.bfloat16)
    big = torch.empty((1 << 30) if device.type == "cuda" else (1 << 22), dtype=torch.uint8, device=device)
    other = torch.empty_like(big)
    return {
        "flops": 2 * n**3 / seconds_of(lambda: a @ b, device),
        "bytes": 2 * big.numel() / seconds_of(lambda: other.copy_(big), device),
    }


def bench_generate(model: Any, work: dict[str, int], peak: dict[str, float], device: torch.device) -> dict[str, float]:
    from treadle.rollout.engines.torch_engine.engine import generate_step
    from treadle.rollout.engines.torch_engine.model_runner import ModelRunner
    from treadle.rollout.engines.torch_engine.scheduler import EngineLimits, Request, Scheduler
    from treadle.types import SamplingParams

    draw = random.Random(0)
    rows = work["prompts"] * work["samples"]

    def run() -> int:
        runner = ModelRunner(model, EngineLimits(rows, 16 << 30))
        line = Scheduler(runner.store, frozenset({0}), lambda ids: "")
        for seed in range(work["prompts"]):
            prompt = [draw.randrange(1, model.config.vocab_size) for _ in range(work["prompt"])]
            sampling = SamplingParams(work["new"], temperature=1.0, ignore_eos=True, seed=seed)
            line.waiting.append(Request(prompt, sampling, work["samples"]))
        done = 0
        while line.has_work:
            done += sum(len(completion.token_ids) for _, completion in generate_step(line, runner))
        return done

    seconds = seconds_of(run, device, repeats=1)
    tokens = rows * work["new"]
    parameters = sum(p.numel() for p in model.parameters())
    config = model.config
    token_bytes = (
        2
        * config.num_hidden_layers
        * config.num_key_value_heads
        * (config.hidden_size // config.num_attention_heads)
        * 2
    )
    per_step = 2 * parameters + token_bytes * (work["prompts"] * work["prompt"] + rows * work["new"] / 2)
    return {
        "tokens_per_second": tokens / seconds,
        "mfu": 2 * parameters * tokens / seconds / peak["flops"],
        "share_of_bandwidth": per_step * work["new"] / seconds / peak["bytes"],
    }


def bench_train(model: Any, work: dict[str, int], peak: dict[str, float], device: torch.device) -> dict[str, float]:
    from made_up import group_of

    from treadle.config import batch_arithmetic, load_config
    from treadle.training.trainer import Trainer

    flags = ["--rollout-batch-size", str(work["prompts"]), "--n-samples-per-prompt", str(work["samples"])]
    flags += ["--num-rollout", "10", "--global-batch-size", str(work["prompts"] * work["samples"])]
    flags += ["--max-tokens-per-gpu", "16384", "--device", device.type]
    config = load_config(None, flags)
    trainer = Trainer(model, config, batch_arithmetic(config), 10)
    draw = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(1, model.config.vocab_size) for _ in range(count)]

    groups = []
    for g in range(work["prompts"]):
        responses = [tokens(draw.randint(work["new"] // 2, work["new"])) for _ in range(work["samples"])]
        groups.append(group_of(g, tokens(work["prompt"]), responses, [float(i % 2) for i in range(work["samples"])]))
    seconds = seconds_of(lambda: trainer.train(groups), device, repeats=2)
    tokens = sum(len(s.token_ids) for group in groups for s in group.samples)
    fed = sum(len(g.prompt.token_ids) + sum(s.response_length for s in g.samples) for g in groups)
    parameters = sum(p.numel() for p in model.parameters())
    return {
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "mfu": 6 * parameters * fed / seconds / peak["flops"],  # of the tokens really fed: a prompt once a group
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--size", default="0.5b", choices=SIZES)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=256)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no GPU here; --device cpu --size tiny runs the same code on a CPU")
    device = torch.device(args.device)
    work = {"prompts": args.prompts, "samples": args.samples, "prompt": args.prompt_tokens, "new": args.new_tokens}
    peak = peaks(device)
    print(f"peak: matmul {peak['flops'] / 1e12:.1f} TFLOP/s, copy {peak['bytes'] / 1e9:.0f} GB/s", flush=True)
    model = build_model(args.size, device)
    found: dict[str, dict[str, float]] = {"generate": bench_generate(model, work, peak, device)}
    print("generate", found["generate"], flush=True)
    model.requires_grad_(True)
    found["train_step"] = bench_train(model, work, peak, device)
    print("train step", found["train_step"], flush=True)
    rolled = args.prompts * args.samples * args.new_tokens / found["generate"]["tokens_per_second"]
    found["whole_step"] = {"seconds": rolled + found["train_step"]["seconds"], "rollout_seconds": rolled}
    if device.type == "cuda":
        found["memory"] = {"peak_gib": torch.cuda.max_memory_allocated() / 2**30}
    numbers = {name: {k: round(v, 4) for k, v in values.items()} for name, values in found.items()}
    print(
        json.dumps(
            {"bench": "gpu", "work": f"{args.size}, {work}", "ours": numbers, "peak": peak, "peers": {}, "ratios": {}}
        )
    )


if __name__ == "__main__":
    main()
