"""Seconds and memory of a whole GRPO step: roll out, score, train, hand the weights back; against TRL's GRPOTrainer.

    python benches/bench_grpo_step.py [--repeats 3]

16 prompts of the chain_sum task (reasoning-gym) × 8 samples of at most 64 tokens of SmolLM2-135M-Instruct, temperature 1, reward 1 for
the right last number, no KL, one AdamW step on float32 weights with bfloat16 compute. TRL runs as its users run it here:
`bf16=True`, micro-batches of 16, its own `generate`. A turn of each is two steps from the same starting weights, the second one counts.
Needs `pip install trl==1.16.0` beside Treadle (the `peers` extra).
"""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sides import Answer, Side, Work, median, report, serve, take_turns

PROMPTS, SAMPLES, NEW_TOKENS, MICRO_BATCH = 16, 8, 64, 16
TASK = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
SUFFIX = " Give only the final answer."


def treadle_side() -> Callable[[Work], Answer]:
    import json
    import tempfile

    from treadle.config import load_config
    from treadle.run.start import train

    task = "&".join(f"{name}={value}" for name, value in TASK.items())

    def run(work: Work) -> Answer:
        with tempfile.TemporaryDirectory() as folder:
            flags = {
                "hf-checkpoint": os.environ["BENCH_MODEL"],
                "prompt-data": f"reasoning_gym:chain_sum?size=500&seed={work['seed']}&{task}",
                "input-key": "question",
                "label-key": "answer",
                "prompt-suffix": SUFFIX,
                "rm-type": "last_number",
                "rollout-batch-size": PROMPTS,
                "n-samples-per-prompt": SAMPLES,
                "rollout-max-response-len": NEW_TOKENS,
                "num-rollout": 2,
                "global-batch-size": PROMPTS * SAMPLES,
                "dtype": "bfloat16",
                "run-dir": f"{folder}/run",
                "progress": "off",
            }
            argv = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
            train(load_config(None, [*argv, "--apply-chat-template"]), "bench")
            rows = [json.loads(line) for line in Path(f"{folder}/run/metrics.jsonl").read_text().splitlines()]
        row = next(row for row in rows if row["rollout_id"] == 1)
        names = {
            "seconds": "perf/step_seconds",
            "rollout_seconds": "rollout/seconds",
            "tokens": "rollout/num_tokens",
            "skipped": "train/num_skipped_samples",
        }
        return {key: row[name] for key, name in names.items()}

    return run


def score(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """TRL's reward: 1 where the last number of the answer is the wanted one."""
    numbers = [re.findall(r"-?\d+", completion[0]["content"]) for completion in completions]
    return [float(bool(found) and found[-1] == wanted) for found, wanted in zip(numbers, answer, strict=True)]


def trl_settings(folder: str) -> Any:
    """How TRL is set up to do the same work."""
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=True,
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=PROMPTS * SAMPLES // MICRO_BATCH,
        num_generations=SAMPLES,
        max_completion_length=NEW_TOKENS,
        temperature=1.0,
        beta=0.0,
        learning_rate=1e-6,
        max_steps=2,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=100,
    )


def trl_side() -> Callable[[Work], Answer]:
    import tempfile

    import torch
    from datasets import Dataset
    from reasoning_gym import create_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(os.environ["BENCH_MODEL"])
    counted: dict[str, int] = {}

    def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        counted["tokens"] = sum(len(ids) for ids in completion_ids)
        return score(**columns)

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.began: list[float] = []
            self.took: list[float] = []

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.began.append(time.perf_counter())

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.took.append(time.perf_counter() - self.began[-1])

    def run(work: Work) -> Answer:
        rows = create_dataset("chain_sum", size=500, seed=work["seed"], **TASK)
        prompts = [[{"role": "user", "content": row["question"] + SUFFIX}] for row in rows]
        data = Dataset.from_dict({"prompt": prompts, "answer": [row["answer"] for row in rows]})
        clock = Clock()
        with tempfile.TemporaryDirectory() as folder:
            args = trl_settings(folder)
            model = AutoModelForCausalLM.from_pretrained(os.environ["BENCH_MODEL"], dtype=torch.float32)
            trainer = GRPOTrainer(
                model=model,
                reward_funcs=reward,
                args=args,
                train_dataset=data,
                processing_class=tokenizer,
                callbacks=[clock],
            )
            trainer.train()
        return {"seconds": clock.took[1], **counted}

    return run


SIDES: dict[str, Callable[[], Callable[[Work], Answer]]] = {"treadle": treadle_side, "trl": trl_side}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", choices=SIDES, help="be one of the programs (used by the bench itself)")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="bundled name or model folder")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if args.side:
        serve(SIDES[args.side])
        return
    from treadle.models.bundled import resolve

    env = {"BENCH_MODEL": str(resolve(args.model))}
    sides = [Side(name, Path(__file__), env=env) for name in SIDES]
    answers = take_turns(sides, [{"seed": seed} for seed in range(args.repeats)])
    for side in sides:
        side.close()
    keys = ("seconds", "peak_gib", "tokens")
    results = {name: {key: median(found, key) for key in keys} for name, found in answers.items()}
    for name, values in results.items():
        print(
            f"{name:10} {values['seconds']:6.1f} s a step   {values['tokens']:.0f} tokens   peak {values['peak_gib']:.1f} GiB"
        )
    ours = results.pop("treadle")
    found = answers["treadle"]
    ours |= {"rollout_seconds": median(found, "rollout_seconds"), "skipped": median(found, "skipped")}
    memory = {f"memory share of {name}": ours["peak_gib"] / peer["peak_gib"] for name, peer in results.items()}
    report(
        "grpo_step", f"{PROMPTS} prompts × {SAMPLES} samples, at most {NEW_TOKENS} tokens", {**ours, **memory}, results
    )


if __name__ == "__main__":
    main()
