"""Several rewards, a teacher, and what moves over a run beside the weights, through the real loop."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from treadle.config import EvalSection, load_config
from treadle.errors import ConfigError
from treadle.run.plan import plan_run
from treadle.run.start import evaluate, train

Rows = Callable[[Path], list[dict]]
SHORT = '''
def short(sample):
    """100 for an answer of at most four tokens: a scale that would drown the other reward."""
    return 100.0 * (sample.num_tokens <= 4)
'''


def without_reward(flags: list[str]) -> list[str]:
    at = flags.index("--custom-rm-path")
    return flags[:at] + flags[at + 2 :]


@pytest.fixture
def teacher(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """The tiny model with noise on its weights, and the same tokenizer."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "teacher"
    shutil.copytree(tiny_model_dir, folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.05)
    model.save_pretrained(folder)
    return folder


def test_gdpo_learns_from_two_rewards_of_different_size(toy_flags: list[str], tmp_path: Path, read_rows: Rows) -> None:
    (tmp_path / "short.py").write_text(SHORT)
    flags = [*toy_flags, "--rm-type", f"{tmp_path}/short.py:short", "--advantage-estimator", "gdpo"]
    train(load_config(None, [*flags, "--num-rollout", "30", "--run-dir", str(tmp_path / "run")]), "gdpo")
    rows = read_rows(tmp_path / "run")
    first, last = (sum(row["rollout/reward/reward"] for row in part) / 5 for part in (rows[:5], rows[-5:]))
    assert last > first + 0.2
    assert not any("rollout/dropped/missing_part" in row for row in rows)


def test_a_policy_is_distilled_without_any_reward(
    toy_flags: list[str], teacher: Path, tmp_path: Path, read_rows: Rows
) -> None:
    flags = [*without_reward(toy_flags), "--opd-teacher-load", str(teacher), "--opd-kl-coef", "1"]
    flags += ["--n-samples-per-prompt", "1", "--rollout-batch-size", "32", "--num-rollout", "40"]
    train(load_config(None, [*flags, "--run-dir", str(tmp_path / "run")]), "opd")
    rows = read_rows(tmp_path / "run")
    gaps = [row["train/teacher_kl"] for row in rows]
    assert sum(gaps[-5:]) < 0.7 * sum(gaps[:5])
    assert all(row["rollout/reward_mean"] == 0 for row in rows)
    assert "teacher" in plan_run(load_config(None, flags))


def test_a_teacher_of_another_vocabulary_or_too_short_a_context_is_refused(
    toy_flags: list[str], teacher: Path, tmp_path: Path
) -> None:
    flags = [*toy_flags, "--num-rollout", "1", "--opd-teacher-load", str(teacher), "--opd-kl-coef", "1"]
    run = load_config(None, [*flags, "--run-dir", str(tmp_path / "run")])
    config = json.loads((teacher / "config.json").read_text())

    def with_config(**values: int) -> None:
        (teacher / "config.json").write_text(json.dumps({**config, **values}))

    with_config(max_position_embeddings=100)
    with pytest.raises(ConfigError, match="has a context of 100, samples may have 256 tokens"):
        train(run, "opd")
    with_config(vocab_size=config["vocab_size"] - 1)
    with pytest.raises(ConfigError, match=r"another vocabulary than .* \(embeddings for \d+ of \d+ ids\)"):
        train(run, "opd")
    with_config()
    tokenizer = json.loads((teacher / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (teacher / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=r"another vocabulary than .*'[ab]' differs"):
        train(run, "opd")
    assert not (tmp_path / "run").exists()


def test_a_steered_run_with_running_rewards_is_resumed_bit_for_bit(toy_flags: list[str], tmp_path: Path) -> None:
    flags = [*toy_flags, "--advantage-estimator", "rloo", "--normalize-rewards-running", "--save-interval", "1"]
    flags += ["--use-kl-loss", "--kl-loss-coef", "0.1", "--kl-target", "0.001", "--kl-horizon", "100"]
    for name, parts in (("whole", [("4",)]), ("again", [("2",), ("4", "--load", str(tmp_path / "again"))])):
        for part in parts:
            train(load_config(None, [*flags, "--run-dir", str(tmp_path / name), "--num-rollout", *part]), "kl")
    saves = [tmp_path / name / "checkpoints" / "rollout_000004" for name in ("whole", "again")]
    for file in ("model/model.safetensors", "optimizer.safetensors"):
        assert (saves[0] / file).read_bytes() == (saves[1] / file).read_bytes(), file
    whole, again = (json.loads((save / "state.json").read_text()) for save in saves)
    assert whole["kl_weight"] == again["kl_weight"] != 0.1
    assert whole["reward_moments"] == again["reward_moments"]
    assert whole["reward_moments"][0] == 4 * 32


def test_evaluation_sets_with_rewards_of_their_own_need_no_other(
    toy_flags: list[str], tmp_path: Path, read_rows: Rows
) -> None:
    data = toy_flags[toy_flags.index("--prompt-data") + 1]
    flags = [*without_reward(toy_flags), "--eval-prompt-data", f"toy={data}", "--run-dir", str(tmp_path / "run")]
    base = load_config(None, flags)
    own = EvalSection(eval_prompt_data=base.eval.eval_prompt_data, eval_overrides={"toy": {"rm_type": ("exact",)}})
    evaluate(base.model_copy(update={"eval": own}), "toy")
    assert read_rows(tmp_path / "run")[0]["eval/toy/num_samples"] == 10
