"""The real loop on a tiny random model: it learns, and each half of it can be run by itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from treadle.config import load_config
from treadle.errors import ConfigError, DataError
from treadle.run.start import evaluate, export, train

Rows = Callable[[Path], list[dict]]


def run(flags: list[str], *more: str) -> None:
    train(load_config(None, [*flags, *more]), "toy")


def test_a_tiny_random_model_learns_a_toy_task(toy_flags: list[str], tmp_path: Path, read_rows: Rows) -> None:
    folder = tmp_path / "run"
    data = toy_flags[toy_flags.index("--prompt-data") + 1]
    eval_flags = ["--eval-prompt-data", f"toy={data}", "--eval-interval", "10", "--n-samples-per-eval-prompt", "2"]
    run(toy_flags, *eval_flags, "--eval-temperature", "1", "--num-rollout", "30", "--run-dir", str(folder))
    rows = read_rows(folder)
    rewards = [row["rollout/reward_mean"] for row in rows if "rollout/reward_mean" in row]
    assert len(rewards) == 30
    assert sum(rewards[:3]) / 3 < 0.1
    assert sum(rewards[-3:]) / 3 > 0.6
    steps = [row for row in rows if "train/loss" in row]
    assert all(
        row["train/ratio_mean"] == pytest.approx(1.0, abs=1e-6) for row in steps
    )  # one step a rollout: on-policy
    assert all(row["train/clip_fraction"] == 0 for row in steps)
    assert all(row["train/rollout_logprob_abs_diff"] <= 1e-5 for row in steps)
    assert all(row["train/rollout_logprob_abs_diff_max"] <= 1e-4 for row in steps)
    evals = [(row["rollout_id"], row["eval/toy/accuracy"]) for row in rows if "eval/toy/accuracy" in row]
    assert [done for done, _ in evals] == [0, 10, 20, 30]
    assert evals[-1][1] > evals[0][1] + 0.4
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["num_rollout"] == 30
    assert summary["eval_before"] == {"toy": evals[0][1]}
    assert summary["eval_after"] == {"toy": evals[-1][1]}
    assert (folder / "curve.png").stat().st_size > 10_000
    assert len(list((folder / "samples").iterdir())) == 30


def test_several_steps_a_rollout_and_kl_learn_as_well(toy_flags: list[str], tmp_path: Path, read_rows: Rows) -> None:
    folder = tmp_path / "run"
    extra = "--num-steps-per-rollout 2 --use-kl-loss --kl-loss-coef 0.01 --entropy-coef 0.001".split()
    run(toy_flags, *extra, "--num-rollout", "45", "--run-dir", str(folder))
    rows = [row for row in read_rows(folder) if "train/loss" in row]
    assert all(row["train/num_steps"] == 2 for row in rows)
    assert rows[0]["train/kl"] < rows[-1]["train/kl"]  # away from the reference
    assert rows[-1]["rollout/reward_mean"] > rows[0]["rollout/reward_mean"] + 0.2


def test_training_from_saved_rollouts_gives_the_weights_of_the_whole_run(toy_flags: list[str], tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    common = ["--num-rollout", "2", "--save-interval", "2"]
    run(toy_flags, *common, "--save-debug-rollout-data", str(saved), "--run-dir", str(tmp_path / "whole"))
    halves = ["--debug-train-only", "--load-debug-rollout-data", str(saved)]
    run(toy_flags, *common, *halves, "--run-dir", str(tmp_path / "half"))
    whole, half = (
        load_file(tmp_path / name / "checkpoints/rollout_000002/model/model.safetensors") for name in ("whole", "half")
    )
    assert whole.keys() == half.keys()
    assert all((whole[name] == half[name]).all() for name in whole)


def test_rollout_only_never_trains(toy_flags: list[str], tmp_path: Path, read_rows: Rows) -> None:
    folder = tmp_path / "run"
    run(toy_flags, "--num-rollout", "2", "--debug-rollout-only", "--run-dir", str(folder))
    rows = read_rows(folder)
    assert len(rows) == 2
    assert not any(name.startswith("train/") for row in rows for name in row)


def test_rollout_only_from_a_checkpoint_generates_with_its_weights(toy_flags: list[str], tmp_path: Path) -> None:
    """The third rollout of a run, made again from its checkpoint after two."""
    run(toy_flags, "--num-rollout", "3", "--save-interval", "2", "--run-dir", str(tmp_path / "whole"))
    load = ["--debug-rollout-only", "--load", str(tmp_path / "whole/checkpoints/rollout_000002")]
    run(toy_flags, "--num-rollout", "3", *load, "--run-dir", str(tmp_path / "half"))
    name = "samples/rollout_000002.jsonl"
    assert (tmp_path / "half" / name).read_text() == (tmp_path / "whole" / name).read_text()


def test_saved_rollouts_of_another_size_are_refused(toy_flags: list[str], tmp_path: Path) -> None:
    saved = str(tmp_path / "saved")
    run(toy_flags, "--num-rollout", "1", "--save-debug-rollout-data", saved, "--run-dir", str(tmp_path / "one"))
    other = ["--rollout-batch-size", "8", "--debug-train-only", "--load-debug-rollout-data", saved]
    with pytest.raises(DataError, match="has 32 samples, rollout_batch_size × n_samples_per_prompt is 64"):
        run(toy_flags, "--num-rollout", "1", *other, "--run-dir", str(tmp_path / "two"))


def test_eval_never_touches_the_folder_of_a_run(toy_flags: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(toy_flags, "--num-rollout", "2", "--save-interval", "1", "--run-dir", str(folder))
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    data = toy_flags[toy_flags.index("--prompt-data") + 1]
    load = ["--load", str(folder / "checkpoints/rollout_000001"), "--eval-prompt-data", f"toy={data}"]
    with pytest.raises(ConfigError, match="already holds a run"):
        evaluate(load_config(None, [*toy_flags, *load, "--run-dir", str(folder)]), "toy")
    assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == before


def test_a_failing_reward_is_counted_and_never_ends_the_run(
    toy_flags: list[str], tmp_path: Path, read_rows: Rows
) -> None:
    bad = tmp_path / "bad_reward.py"
    bad.write_text("def reward(sample):\n    return 1 / (len(sample.response) % 2)\n")  # raises for even lengths
    flags = [*toy_flags, "--custom-rm-path", f"{bad}:reward"]
    flags += ["--max-failed-fraction", "0.9"]
    run(flags, "--num-rollout", "2", "--rollout-stop", "a", "b", "c", "d", "e", "--run-dir", str(tmp_path / "run"))
    for row in read_rows(tmp_path / "run"):
        assert 0 < row["rollout/failed_count"] < 32
        assert row["rollout/dropped/failed"] == row["rollout/failed_count"]
        assert row["train/num_samples"] == 32 - row["rollout/failed_count"]


def test_eval_and_export_take_a_checkpoint(toy_flags: list[str], tmp_path: Path, read_rows: Rows) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path / "run"
    run(toy_flags, "--num-rollout", "3", "--save-interval", "3", "--run-dir", str(folder))
    saves = folder / "checkpoints"
    out = export(folder, tmp_path / "exported", "float32")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    saved = load_file(saves / "rollout_000003/model/model.safetensors")
    assert all((saved[name] == p).all() for name, p in model.named_parameters())
    for source in (saves, saves / "rollout_000003", saves / "rollout_000003" / "model", out):
        half = export(source, tmp_path / f"half of {source.name}", "bfloat16")
        assert next(iter(load_file(half / "model.safetensors").values())).dtype == torch.bfloat16
    assert model.generate(**tokenizer("say 1", return_tensors="pt"), max_new_tokens=3).shape[1] == 8
    data = toy_flags[toy_flags.index("--prompt-data") + 1]
    flags = [*toy_flags, "--load", str(saves), "--eval-prompt-data", f"toy={data}"]
    evaluate(load_config(None, [*flags, "--run-dir", str(tmp_path / "eval")]), "toy")
    (row,) = read_rows(tmp_path / "eval")
    assert row["rollout_id"] == 3
    assert row["eval/toy/num_samples"] == 10
