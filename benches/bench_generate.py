"""Tokens per second of generation: the embedded engine, transformers' `generate`, and vLLM on the CPU.

    python benches/bench_generate.py [--prompts 16] [--samples 8] [--vllm-python PATH] [--repeats 5]

SmolLM2-135M-Instruct in bfloat16, prompts of 54 tokens, a fixed number of new tokens (the end token is ignored), sampling at
temperature 1. vLLM needs an environment of its own; without `--vllm-python` it is left out.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

from sides import Answer, Side, Work, median, report, serve, take_turns

PROMPT_TOKENS, VOCAB = 54, 49152


def prompts_of(work: Work) -> list[list[int]]:
    """Prompts no earlier turn has seen, so that no prefix cache can help."""
    draw = random.Random(work["seed"])
    return [[draw.randrange(3, VOCAB) for _ in range(PROMPT_TOKENS)] for _ in range(work["prompts"])]


def model_path() -> str:
    return os.environ["BENCH_MODEL"]


def treadle_side() -> Callable[[Work], Answer]:
    import asyncio

    import torch

    from treadle.chat import load_codec
    from treadle.models.load import load_model
    from treadle.rollout.engines.torch_engine.engine import TorchEngine
    from treadle.rollout.engines.torch_engine.scheduler import EngineLimits
    from treadle.run.compute import ComputeThread
    from treadle.types import SamplingParams

    compute = ComputeThread()
    model = compute.executor.submit(load_model, model_path(), torch.bfloat16, torch.device("cpu")).result()
    engine = TorchEngine(model, load_codec(model_path()), EngineLimits(1024, 4 << 30), compute.executor)

    async def generate(work: Work) -> int:
        sampling = SamplingParams(max_new_tokens=work["new"], temperature=1.0, ignore_eos=True, seed=work["seed"])

        async def one(prompt: list[int]) -> int:
            return sum([len(c.token_ids) async for c in engine.generate(prompt, sampling, work["samples"])])

        return sum(await asyncio.gather(*[one(prompt) for prompt in prompts_of(work)]))

    loop = asyncio.new_event_loop()

    def run(work: Work) -> Answer:
        began = time.perf_counter()
        tokens = loop.run_until_complete(generate(work))
        return {"seconds": time.perf_counter() - began, "tokens": tokens}

    return run


def transformers_side() -> Callable[[Work], Answer]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.bfloat16).eval()

    def run(work: Work) -> Answer:
        prompts = torch.tensor(prompts_of(work)).repeat_interleave(work["samples"], 0)
        torch.manual_seed(work["seed"])
        began = time.perf_counter()
        with torch.no_grad():
            out = model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=True,
                top_k=0,
                top_p=1.0,
                temperature=1.0,
                min_new_tokens=work["new"],
                max_new_tokens=work["new"],
                pad_token_id=2,
            )
        return {"seconds": time.perf_counter() - began, "tokens": (out.shape[1] - PROMPT_TOKENS) * out.shape[0]}

    return run


def vllm_side(eager: bool) -> Callable[[Work], Answer]:
    os.environ.update(VLLM_CPU_NUM_OF_RESERVED_CPU="0", VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1")
    from vllm import LLM, SamplingParams

    llm = LLM(model=model_path(), dtype="bfloat16", enforce_eager=eager, max_model_len=512, max_num_seqs=256)

    def run(work: Work) -> Answer:
        params = SamplingParams(n=work["samples"], temperature=1.0, max_tokens=work["new"], ignore_eos=True, logprobs=0)
        began = time.perf_counter()
        outs = llm.generate([{"prompt_token_ids": p} for p in prompts_of(work)], params, use_tqdm=False)
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "tokens": sum(len(o.token_ids) for out in outs for o in out.outputs)}

    return run


SIDES: dict[str, Callable[[], Callable[[Work], Answer]]] = {
    "treadle": treadle_side,
    "transformers": transformers_side,
    "vllm-eager": lambda: vllm_side(True),
    "vllm-compiled": lambda: vllm_side(False),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", choices=SIDES, help="be one of the programs (used by the bench itself)")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="bundled name or model folder")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--vllm-python", help="Python of an environment with vLLM")
    parser.add_argument("--no-transformers", action="store_true")
    args = parser.parse_args()
    if args.side:
        serve(SIDES[args.side])
        return
    from treadle.models.bundled import resolve

    env = {"BENCH_MODEL": str(resolve(args.model))}
    here = Path(__file__)
    sides = [Side("treadle", here, env=env)]
    if not args.no_transformers:
        sides.append(Side("transformers", here, env=env))
    if args.vllm_python:
        sides += [Side(name, here, args.vllm_python, env) for name in ("vllm-eager", "vllm-compiled")]
    works = [
        {"prompts": args.prompts, "samples": args.samples, "new": args.new_tokens, "seed": seed}
        for seed in range(args.repeats + 1)
    ]
    answers = {name: found[1:] for name, found in take_turns(sides, works).items()}  # the first turn warms up
    results = {}
    for name, found in answers.items():
        rate = median([{"seconds": a["tokens"] / a["seconds"]} for a in found])
        results[name] = {"seconds": median(found), "tokens_per_second": rate, "peak_gib": median(found, "peak_gib")}
        print(f"{name:14} {rate:8.1f} tokens/s   peak {results[name]['peak_gib']:.1f} GiB")
    for side in sides:
        side.close()
    ours = results.pop("treadle")
    report("generate", f"{args.prompts} prompts × {args.samples} samples × {args.new_tokens} tokens", ours, results)


if __name__ == "__main__":
    main()
