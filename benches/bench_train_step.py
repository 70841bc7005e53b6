"""Seconds of one optimizer step: Treadle's trainer, and transformers on padded micro-batches of 16 as TRL does it.

    python benches/bench_train_step.py [--prompt-tokens 54] [--response-tokens 28 64] [--dtype bfloat16] [--repeats 5]

16 groups of 8 samples of SmolLM2-135M-Instruct: GRPO advantages, the loss a mean over tokens (a mean over samples is 0 on policy), one AdamW step on float32 weights. The peer
computes in bfloat16 by autocast, scores completions only (`logits_to_keep`), takes the same fused AdamW, and does not compute
entropies, which we do. Before the clock starts both take one step on the same samples: their losses and the cosine of their
gradients are printed, so that the same work is compared.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

from sides import Answer, Side, Work, median, report, serve, take_turns

GROUPS, SAMPLES, VOCAB, MICRO_BATCH = 16, 8, 49152, 16


def rollout_of(work: Work) -> list[tuple[list[int], list[list[int]], list[float]]]:
    """Prompt, responses and advantages of each group; lengths are drawn evenly from the given range."""
    draw = random.Random(work["seed"])

    def tokens(count: int) -> list[int]:
        return [draw.randrange(3, VOCAB) for _ in range(count)]

    low, high = work["responses"]
    groups = []
    for _ in range(work["groups"]):
        responses = [tokens(draw.randint(low, high)) for _ in range(SAMPLES)]
        rewards = [float(i % 2) for i in range(SAMPLES)]
        groups.append((tokens(work["prompt"]), responses, rewards))
    return groups


def treadle_side() -> Callable[[Work], Answer]:
    import torch
    from made_up import group_of

    from treadle.config import batch_arithmetic, load_config
    from treadle.models.load import load_model
    from treadle.training.trainer import Trainer

    dtype = getattr(torch, os.environ["BENCH_DTYPE"])
    trainers: dict[int, Trainer] = {}

    def trainer_of(groups: int) -> Trainer:
        if groups not in trainers:
            trainers.clear()
            flags = [
                "--rollout-batch-size",
                str(groups),
                "--n-samples-per-prompt",
                str(SAMPLES),
                "--num-rollout",
                "100",
            ]
            flags += ["--global-batch-size", str(groups * SAMPLES), "--lr", "1e-6", "--clip-grad", "1e9"]
            flags += ["--calculate-per-token-loss"]
            config = load_config(None, flags)
            model = load_model(os.environ["BENCH_MODEL"], dtype, torch.device("cpu"))
            trainers[groups] = Trainer(model, config, batch_arithmetic(config), 100)
        return trainers[groups]

    def run(work: Work) -> Answer:
        trainer = trainer_of(work["groups"])
        groups = [group_of(g, *parts) for g, parts in enumerate(rollout_of(work))]
        began = time.perf_counter()
        metrics = trainer.train(groups)
        answer: Answer = {"seconds": time.perf_counter() - began}
        answer["loss"] = sum(m.value for m in metrics if m.name == "train/policy_loss")
        if "gradient" in work:
            save_gradient(
                {n: trainer.optimizer.adamw.state[m]["exp_avg"] for n, m in trainer.optimizer.masters.items()}, work
            )
        return answer

    return run


def save_gradient(moments, work: Work) -> None:
    """After the first step AdamW's first moment is the gradient, up to a constant."""
    from safetensors.torch import save_file

    save_file({name: moment.float().contiguous() for name, moment in moments.items()}, work["gradient"])


def transformers_side() -> Callable[[Work], Answer]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(os.environ["BENCH_MODEL"], dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    half = os.environ["BENCH_DTYPE"] == "bfloat16"

    def run(work: Work) -> Answer:
        rows, advantages = [], []
        for prompt, responses, rewards in rollout_of(work):
            scores = torch.tensor(rewards)
            rows += [(prompt, response) for response in responses]
            advantages.append((scores - scores.mean()) / (scores.std() + 1e-6))
        began = time.perf_counter()
        width = max(len(response) for _, response in rows)  # TRL pads the whole rollout to one width
        ids = torch.tensor([p + r + [2] * (width - len(r)) for p, r in rows])
        lengths = torch.tensor([len(r) for _, r in rows])
        mask = torch.arange(width)[None, :] < lengths[:, None]
        attention = torch.cat([torch.ones(len(rows), ids.shape[1] - width, dtype=torch.long), mask.long()], 1)
        advantage = torch.cat(advantages)
        total = 0.0
        for start in range(0, len(rows), MICRO_BATCH):
            part = slice(start, start + MICRO_BATCH)
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                out = model(ids[part], attention_mask=attention[part], logits_to_keep=width + 1, use_cache=False)
            logits = out.logits[:, :-1].float()
            targets = ids[part, -width:]
            logprobs = logits.gather(2, targets[..., None])[..., 0] - logits.logsumexp(-1)
            ratio = torch.exp(logprobs - logprobs.detach())
            clipped = ratio.clamp(0.8, 1.2)
            per_token = -torch.minimum(ratio * advantage[part, None], clipped * advantage[part, None])
            loss = (per_token * mask[part]).sum() / lengths.sum()
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        if "gradient" in work:
            state = {name: optimizer.state[p]["exp_avg"] for name, p in model.named_parameters()}
            save_gradient(state, work)
        optimizer.zero_grad()
        return {"seconds": time.perf_counter() - began, "loss": total}

    return run


SIDES: dict[str, Callable[[], Callable[[Work], Answer]]] = {
    "treadle": treadle_side,
    "transformers": transformers_side,
}


def cosine(one: Path, other: Path) -> float:
    from safetensors.torch import load_file

    left, right = load_file(one), load_file(other)
    assert left.keys() == right.keys()
    dot = sum(float((left[n].double() * right[n].double()).sum()) for n in left)
    sizes = [sum(float(t.double().square().sum()) for t in side.values()) ** 0.5 for side in (left, right)]
    return dot / (sizes[0] * sizes[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", choices=SIDES, help="be one of the programs (used by the bench itself)")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="bundled name or model folder")
    parser.add_argument("--groups", type=int, default=GROUPS)
    parser.add_argument("--prompt-tokens", type=int, default=54)
    parser.add_argument("--response-tokens", type=int, nargs=2, default=(28, 64), help="shortest and longest")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    if args.side:
        serve(SIDES[args.side])
        return
    import tempfile

    from treadle.models.bundled import resolve

    env = {"BENCH_MODEL": str(resolve(args.model)), "BENCH_DTYPE": args.dtype}
    sides = [Side(name, Path(__file__), env=env) for name in SIDES]
    shape = {"groups": args.groups, "prompt": args.prompt_tokens, "responses": list(args.response_tokens)}
    with tempfile.TemporaryDirectory() as folder:
        files = {side.name: Path(folder) / side.name for side in sides}
        first = {s.name: s.run({**shape, "seed": 0, "gradient": str(files[s.name])}) for s in sides}
        gradients = cosine(*files.values())
    losses = [first[side.name]["loss"] for side in sides]
    gap = abs(losses[0] - losses[1]) / (abs(losses[1]) or 1.0)  # equal lengths: both are 0
    print(f"loss {losses[0]:.6f} and {losses[1]:.6f} (relative gap {gap:.2g}), gradient cosine {gradients:.6f}")
    answers = take_turns(sides, [{**shape, "seed": seed} for seed in range(1, args.repeats + 1)])
    for side in sides:
        side.close()
    results = {n: {"seconds": median(found), "peak_gib": median(found, "peak_gib")} for n, found in answers.items()}
    for name, values in results.items():
        print(f"{name:14} {values['seconds']:7.2f} s a step   peak {values['peak_gib']:.1f} GiB")
    ours = {**results.pop("treadle"), "loss_gap": gap, "gradient_cosine": gradients}
    low, high = args.response_tokens
    work = (
        f"{args.groups} groups × {SAMPLES}, prompts of {args.prompt_tokens}, responses of {low} to {high}, {args.dtype}"
    )
    report("train_step", work, ours, results)


if __name__ == "__main__":
    main()
