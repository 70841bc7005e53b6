"""PPO with a critic through the real loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from treadle.config import load_config
from treadle.errors import ConfigError
from treadle.run.start import train

Rows = Callable[[Path], list[dict]]
PPO = "--advantage-estimator ppo --critic-lr 3e-3 --normalize-advantages --lambd 0.95".split()


def run(flags: list[str], folder: Path, *more: str) -> None:
    train(load_config(None, [*flags, *PPO, "--run-dir", str(folder), *more]), "ppo")


def test_ppo_learns_and_its_critic_too(toy_flags: list[str], tmp_path: Path, read_rows: Rows) -> None:
    run(toy_flags, tmp_path / "run", "--num-rollout", "80", "--num-critic-only-steps", "3")
    rows = read_rows(tmp_path / "run")
    assert [("train/loss" in row) for row in rows[:5]] == [False, False, False, True, True]
    assert all("critic/loss" in row for row in rows)
    assert rows[-1]["rollout/reward_mean"] > rows[0]["rollout/reward_mean"] + 0.4
    late = rows[-5:]
    # A critic that knew nothing would be wrong by the square of the return.
    assert sum(r["critic/error_squared"] for r in late) < 0.5 * sum(r["critic/return_mean"] ** 2 for r in late)
    assert all(row["train/ratio_mean"] == pytest.approx(1.0, abs=1e-5) for row in rows if "train/ratio_mean" in row)


def test_critic_only_rollouts_leave_the_policy_as_it_is(
    toy_flags: list[str], tmp_path: Path, tiny_model_dir: Path
) -> None:
    run(toy_flags, tmp_path / "run", "--num-rollout", "3", "--num-critic-only-steps", "2", "--save-interval", "1")
    start = load_file(tiny_model_dir / "model.safetensors")
    saves = [tmp_path / "run" / "checkpoints" / f"rollout_{i:06d}" for i in (1, 2, 3)]
    policies = [load_file(save / "model" / "model.safetensors") for save in saves]
    heads = [load_file(save / "critic" / "value_head.safetensors")["bias"].item() for save in saves]
    assert all((policies[1][name] == weight).all() for name, weight in start.items())
    assert any((policies[2][name] != weight).any() for name, weight in start.items())
    assert len(set(heads)) == 3


def test_a_resumed_ppo_run_ends_with_the_same_bytes(toy_flags: list[str], tmp_path: Path) -> None:
    kl = ["--kl-coef", "0.05", "--num-steps-per-rollout", "2", "--save-interval", "1"]
    run(toy_flags, tmp_path / "whole", "--num-rollout", "4", *kl)
    run(toy_flags, tmp_path / "parts", "--num-rollout", "2", *kl, "--lr-decay-steps", "8", "--lr-decay-style", "linear")
    run(toy_flags, tmp_path / "again", "--num-rollout", "2", *kl)
    run(toy_flags, tmp_path / "again", "--num-rollout", "4", *kl, "--load", str(tmp_path / "again"))
    files = (
        "model/model.safetensors",
        "optimizer.safetensors",
        "critic/model.safetensors",
        "critic/value_head.safetensors",
        "critic/optimizer.safetensors",
    )
    for file in files:
        one, other = (tmp_path / name / "checkpoints" / "rollout_000004" / file for name in ("whole", "again"))
        assert one.read_bytes() == other.read_bytes(), file
    different = tmp_path / "parts" / "checkpoints" / "rollout_000002" / "model/model.safetensors"
    same = tmp_path / "again" / "checkpoints" / "rollout_000002" / "model/model.safetensors"
    assert different.read_bytes() != same.read_bytes()  # the comparison can fail


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--critic-lr", "1e-4"], "critic_lr = 0.0001 does nothing with grpo: only ppo has a critic"),
        (["--critic-num-nodes", "1"], "critic_num_nodes = 1 does nothing with grpo: only ppo has a critic"),
        (["--lambd", "0.9"], "lambd = 0.9 does nothing with grpo"),
        (["--advantage-estimator", "ppo", "--num-critic-only-steps", "5"], "the policy would never be trained"),
        (["--opsm-delta", "0.1"], "opsm_delta = 0.1 does nothing with one optimizer step a rollout"),
        (["--rollout-correction", "tsi"], "rollout_correction 'tsi' is unknown; did you mean 'tis'"),
        (["--correction-high", "3"], "correction_high = 3.0 does nothing without rollout_correction"),
        (["--ref-ema-decay", "0.9"], "do nothing without a reference"),
    ],
)
def test_critic_settings_that_do_nothing_are_refused(toy_flags: list[str], flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(load_config(None, [*toy_flags, "--num-rollout", "5", *flags]), "ppo")


def test_a_moving_reference_is_resumed_with_the_run(toy_flags: list[str], tmp_path: Path) -> None:
    flags = [*toy_flags, "--use-kl-loss", "--kl-loss-coef", "0.1", "--ref-ema-decay", "0.5", "--save-interval", "1"]
    for name, parts in (("whole", [("4",)]), ("again", [("2",), ("4", "--load", str(tmp_path / "again"))])):
        for part in parts:
            train(load_config(None, [*flags, "--run-dir", str(tmp_path / name), "--num-rollout", *part]), "ema")
    for file in ("model/model.safetensors", "optimizer.safetensors", "reference.safetensors"):
        one, other = (tmp_path / name / "checkpoints" / "rollout_000004" / file for name in ("whole", "again"))
        assert one.read_bytes() == other.read_bytes(), file
