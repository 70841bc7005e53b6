"""What a run costs beside its work: the way to the first token, writing and showing a step, and memory over 300 steps.

    python benches/bench_overhead.py

The first token: seconds from the start of `treadle train` to the end of a rollout of one token, model cached. A step: samples, metric line,
TensorBoard and display of a rollout of 128 samples × 64 tokens, as a share of `--step-seconds`. Memory: resident size after
rollouts 100 and 300 of a run with a tiny random model.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SAMPLES, PROMPT, NEW = 128, 54, 64


def first_token_seconds(model: str, folder: Path) -> float:
    """Seconds from the command to its first finished rollout of one token a sample."""
    command = [sys.executable, "-m", "treadle", "train", "--hf-checkpoint", model, "--run-dir", str(folder)]
    command += ["--prompt-data", "reasoning_gym:chain_sum?size=100&seed=1", "--input-key", "question"]
    command += [
        "--label-key",
        "answer",
        "--rm-type",
        "last_number",
        "--num-rollout",
        "1",
        "--rollout-max-response-len",
        "1",
    ]
    command += ["--rollout-batch-size", "1", "--progress", "plain", "--debug-rollout-only"]
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    samples = folder / "samples"
    while process.poll() is None and not (samples.is_dir() and any(samples.iterdir())):
        time.sleep(0.02)
    seconds = time.perf_counter() - began
    process.communicate(timeout=300)
    if process.returncode:
        raise SystemExit("the run failed; run it by hand: " + " ".join(command))
    return seconds


def shown_step_seconds(folder: Path) -> float:
    """Seconds to write and show one rollout, the median of ten."""
    import statistics

    from made_up import group_of

    from treadle.config import load_config
    from treadle.observe.progress import Progress
    from treadle.observe.run_folder import RunFolder
    from treadle.observe.samples import write_groups
    from treadle.observe.sinks import open_sinks
    from treadle.types import Group

    draw = random.Random(0)

    def group(group_id: int) -> Group:
        responses = [[draw.randrange(49152) for _ in range(NEW)] for _ in range(8)]
        return group_of(group_id, range(PROMPT), responses, [1.0] * 8, "some words of an answer " * 10)

    groups = [group(g) for g in range(SAMPLES // 8)]
    run = RunFolder.create(folder, "overhead")
    config = load_config(None, ["--num-rollout", "100"])
    values = {f"train/made_up_{i}": float(i) for i in range(40)} | {
        "rollout/reward_mean": 0.5,
        "perf/step_seconds": 9.0,
    }
    times = []
    with Progress("plain", title="overhead") as progress:
        sink = open_sinks(run, config.observe, progress.warn, 0, config.model_dump(mode="json"))
        progress.start(100, 0)
        for rollout in range(11):
            began = time.perf_counter()
            write_groups(folder / "samples" / f"{rollout}.jsonl", groups)
            sink.write(rollout, values)
            progress.step(rollout, values)
            times.append(time.perf_counter() - began)
        sink.close()
    return statistics.median(times[1:])


def memory_growth(folder: Path) -> dict[str, float]:
    """Resident memory in MiB after rollouts 100 and 300 of a run that samples, scores, trains, dumps and logs."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from treadle.chat import load_codec
    from treadle.config import load_config
    from treadle.models.bundled import resolve
    from treadle.run.start import train

    source = str(resolve("smollm2-135m-instruct"))
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=49152, num_key_value_heads=2, tie_word_embeddings=True, **small))
    model.save_pretrained(folder / "model")
    load_codec(source).save(folder / "model")
    flags = ["--hf-checkpoint", str(folder / "model"), "--prompt-data", "reasoning_gym:chain_sum?size=500&seed=1"]
    flags += ["--input-key", "question", "--label-key", "answer", "--rm-type", "last_number", "--num-rollout", "300"]
    flags += ["--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--rollout-max-response-len", "24"]
    flags += ["--no-skip-zero-advantage", "--run-dir", str(folder / "run"), "--progress", "off", "--dtype", "float32"]
    train(load_config(None, flags), "memory")
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    at: dict[int, Any] = {row["rollout_id"]: row["perf/memory_gib"] * 1024 for row in rows}
    return {"mib_after_100": at[99], "mib_after_300": at[299]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="bundled name or model folder")
    parser.add_argument("--step-seconds", type=float, default=9.0, help="a step of the quick start on this machine")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        first = first_token_seconds(args.model, folder / "first")
        shown = shown_step_seconds(folder / "shown")
        memory = memory_growth(folder)
    share = shown / args.step_seconds
    print(f"first token after {first:.1f} s; writing and showing a step: {shown * 1e3:.1f} ms ({share:.2%} of a step)")
    print(
        f"resident memory after 100 rollouts {memory['mib_after_100']:.0f} MiB, after 300 {memory['mib_after_300']:.0f} MiB"
    )
    line = {"first_token_seconds": round(first, 2), "shown_ms": round(shown * 1e3, 2), "share_of_step": round(share, 5)}
    print(json.dumps({"bench": "overhead", **line, **{k: round(v, 1) for k, v in memory.items()}}))


if __name__ == "__main__":
    main()
