"""Training on many ranks, in processes of their own, against the same training in one process.

AdamW's epsilon is 1, so a weight moves by about its gradient; every job has a deadline, so a hang is a failure. The
processes are started by `ranks/launch.py`, once for the quick jobs and once for those of four ranks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from treadle.metrics import Metric, reduce_metrics

DEADLINE_SECONDS = 90
BASE: dict[str, Any] = {"rollout_batch_size": 3, "n_samples_per_prompt": 3, "max_tokens_per_gpu": 24}
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"fields": {"clip_grad": 0.1, "weight_decay": 0.1, "gradient_checkpointing": True}},
    "ppo": {
        "fields": {
            "advantage_estimator": "ppo",
            "normalize_advantages": True,
            "calculate_per_token_loss": True,
            "num_steps_per_rollout": 3,
            "lambd": 0.9,
        }
    },
    "reinforce++": {
        "fields": {"advantage_estimator": "reinforce_plus_plus", "kl_coef": 0.05, "fsdp_sync_every_micro_batch": True}
    },
    "factors": {
        "fields": {
            "rollout_correction": "tis",
            "correction_batch_mean_one": True,
            "m2po_threshold": 9.0,
            "top_entropy_fraction": 0.5,
            "entropy_coef": 0.01,
            "use_kl_loss": True,
            "kl_loss_coef": 0.1,
            "kl_target": 0.01,
            "kl_horizon": 90,
            "ref_ema_decay": 0.9,
        }
    },
    "teacher": {"fields": {"opd_kl_coef": 0.5, "use_dynamic_batch_size": False, "micro_batch_size": 2}},
    "one-learns": {"groups": {"sizes": [2, 4, 3], "rewards": [[1, 0], [0, 0, 0, 0], [1, 1, 1]]}},
    "none-learn": {"groups": {"rewards": [[1, 1, 1], [0, 0], [0, 0, 0, 0]]}},
}
QUICK = ("grpo", "ppo", "factors", "none-learn")
"""Cases that two ranks run in the quick part; the others are run with those of four ranks."""
UNEQUAL = ("train/seconds", "train/tokens_per_second", "train/num_micro_batches")


@dataclass(frozen=True)
class Found:
    """What the ranks of a job left."""

    folder: Path

    @property
    def ended(self) -> dict[str, Any]:
        return json.loads((self.folder / "ended.json").read_text())

    @property
    def size(self) -> int:
        return len(self.ended["codes"])

    def log(self, rank: int) -> str:
        return (self.folder / f"log-{rank}").read_text()

    def check(self) -> Found:
        """Fail with what the first bad rank said."""
        for rank, code in self.ended["codes"].items():
            assert code == 0, f"rank {rank} of {self.folder.name} ended with {code}: {self.log(int(rank))[-3000:]}"
        return self

    def weights(self, rank: int = 0, what: str = "weights") -> dict[str, Tensor]:
        return load_file(self.folder / f"{what}-{rank}.safetensors")

    def measured(self, rank: int) -> dict[str, Any]:
        return json.loads((self.folder / f"metrics-{rank}.json").read_text())

    @property
    def metrics(self) -> list[dict[str, float]]:
        """Of each rollout, over all ranks."""
        rollouts = zip(*(self.measured(rank)["metrics"] for rank in range(self.size)), strict=True)
        return [reduce_metrics(Metric(*m) for rank in ranks for m in rank) for ranks in rollouts]

    @property
    def passes(self) -> list[int]:
        """Forward passes of each rank, recomputed ones among them."""
        return [self.measured(rank)["passes"] for rank in range(self.size)]


class Jobs:
    """Jobs by name, run together when the first of them is asked for."""

    def __init__(self, folder: Path, models: dict[str, Path]):
        self.folder, self.models = folder, models
        self.jobs: list[dict[str, Any]] = []

    def add(self, name: str, size: int, *, fields: dict[str, Any] | None = None, **more: Any) -> None:
        job = {"rollouts": [0, 1, 2], "groups": {"sizes": [3, 2, 4]}, "deadline": DEADLINE_SECONDS, **more}
        job["groups"] = {"sizes": [3, 2, 4], **job["groups"]}
        job["model"] = str(self.models[job.get("model", "llama")])
        job["other"] = str(self.models["other"])
        self.jobs.append({"folder": str(self.folder / name), "size": size, "fields": {**BASE, **(fields or {})}, **job})

    def run(self) -> None:
        file = self.folder / "jobs.json"
        file.write_text(json.dumps(self.jobs))
        command = [sys.executable, str(Path(__file__).parent / "ranks" / "launch.py"), str(file)]
        seconds = 60 + DEADLINE_SECONDS * len(self.jobs)
        done = subprocess.run(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            timeout=seconds,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]

    def found(self, name: str) -> Found:
        return Found(self.folder / name)


@pytest.fixture(scope="module")
def models(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny Llama, another one with the same shapes, and a Qwen 3, which has norms inside its heads."""
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("models")
    other = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    config = Qwen3Config(**{**other.config.to_dict(), "head_dim": 8, "tie_word_embeddings": False, "layer_types": None})
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        for param in other.parameters():
            param.add_(torch.randn(param.shape), alpha=0.02)
        qwen = Qwen3ForCausalLM(config)
    other.save_pretrained(folder / "other")
    qwen.save_pretrained(folder / "qwen3")
    return {"llama": tiny_model_dir, "other": folder / "other", "qwen3": folder / "qwen3"}


@pytest.fixture(scope="module")
def quick(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    jobs = Jobs(tmp_path_factory.mktemp("quick"), models)
    for name in QUICK:
        for size in (1, 2):
            jobs.add(f"{name}-{size}", size, **CASES[name])
    saves = {**CASES["ppo"], "rollouts": [0, 1], "saves": True}
    for size in (1, 2):
        jobs.add(f"first-half-{size}", size, **saves)
    for saved, size in ((2, 1), (1, 2)):
        load = str(jobs.folder / f"first-half-{saved}" / "saves")
        jobs.add(f"second-half-{size}", size, **{**CASES["ppo"], "rollouts": [2], "load": load})
    jobs.add("dies", 2, dies=[1, 1], fields={"distributed_timeout_seconds": 60})
    jobs.add("late", 2, late=[1, 1, 12], fields={"distributed_timeout_seconds": 8})
    jobs.add("asleep", 2, sleeps=True, fields=CASES["grpo"]["fields"])
    jobs.add("bfloat16", 2, fields={"dtype": "bfloat16"})
    jobs.add("tensor", 2, fields={"tensor_parallel_size": 2, **CASES["grpo"]["fields"]})
    still = {"dtype": "bfloat16", "lr": 1e-20, "weight_decay": 0.0, "num_steps_per_rollout": 3}
    steps = {"rollout_batch_size": 4, "n_samples_per_prompt": 6, "max_tokens_per_gpu": 4096}
    long = {"sizes": [6, 6, 6, 6], "response_lengths": [5, 40]}
    jobs.add("still", 2, rollouts=[0], groups=long, fields={**still, **steps})
    jobs.run()
    return jobs


@pytest.fixture(scope="module")
def four(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    jobs = Jobs(tmp_path_factory.mktemp("four"), models)
    for name, case in CASES.items():
        for size in (4,) if name in QUICK else (1, 2, 4):
            jobs.add(f"{name}-{size}", size, **case)
    for name, fields in (
        ("replicas", {"fsdp_replicate_size": 2}),
        ("tensor", {"tensor_parallel_size": 2}),
    ):
        jobs.add(name, 4, fields={**CASES["grpo"]["fields"], **fields})
    for size, fields in ((1, {}), (4, {"tensor_parallel_size": 2})):
        jobs.add(f"qwen3-{size}", size, model="qwen3", fields={"clip_grad": 0.1, **fields})
    jobs.add("first-half-1", 1, **{**CASES["ppo"], "rollouts": [0, 1], "saves": True})
    load = str(jobs.folder / "first-half-1" / "saves")
    jobs.add("second-half-4", 4, **{**CASES["ppo"], "rollouts": [2], "load": load})
    jobs.run()
    return jobs


def assert_same(one: Found, many: Found) -> None:
    """Same weights on every rank, same measurements, and the weights did move."""
    one.check()
    many.check()
    kinds = ["weights", *(["critic"] if (one.folder / "critic-0.safetensors").is_file() else [])]
    for what in kinds:
        expected = one.weights(what=what)
        for rank in range(many.size):
            found = many.weights(rank, what)
            assert found.keys() == expected.keys()
            for name, weight in expected.items():
                torch.testing.assert_close(found[name], weight, atol=1e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
    for expected_metrics, metrics in zip(one.metrics, many.metrics, strict=True):
        kept = [{k: v for k, v in m.items() if k not in UNEQUAL} for m in (expected_metrics, metrics)]
        assert kept[1] == pytest.approx(kept[0], rel=1e-4, abs=1e-5)


def assert_moved(found: Found, models: dict[str, Path], at_least: float = 1e-3) -> None:
    start = load_file(models["llama"] / "model.safetensors")
    assert max(float((start[name] - w).abs().max()) for name, w in found.weights().items()) > at_least


@pytest.mark.parametrize("case", QUICK)
def test_two_ranks_train_as_one(quick: Jobs, models: dict[str, Path], case: str) -> None:
    check_two(quick.found(f"{case}-1"), quick.found(f"{case}-2"), models)


@pytest.mark.slow
@pytest.mark.parametrize("case", [name for name in CASES if name not in QUICK])
def test_two_ranks_train_as_one_in_other_ways(four: Jobs, models: dict[str, Path], case: str) -> None:
    check_two(four.found(f"{case}-1"), four.found(f"{case}-2"), models)


def check_two(one: Found, two: Found, models: dict[str, Path]) -> None:
    assert_same(one, two)
    assert len(set(two.passes)) == 1  # as many on each, whatever they had to do
    if "none" not in one.folder.name:
        assert_moved(one, models)
    if "learn" not in one.folder.name:  # there one pass is all there is
        assert two.passes[0] < one.passes[0]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_four_ranks_train_as_one(quick: Jobs, four: Jobs, case: str) -> None:
    many = four.found(f"{case}-4")
    assert_same((quick if case in QUICK else four).found(f"{case}-1"), many)
    assert len(set(many.passes)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("grid", ["replicas", "tensor"])
def test_a_grid_of_two_by_two_trains_as_one(quick: Jobs, four: Jobs, grid: str) -> None:
    assert_same(quick.found("grpo-1"), four.found(grid))


def test_two_ranks_that_split_each_layer_train_as_one(quick: Jobs) -> None:
    assert_same(quick.found("grpo-1"), quick.found("tensor"))


@pytest.mark.slow
def test_norms_inside_heads_are_summed_over_the_ranks_that_have_the_heads(four: Jobs) -> None:
    assert_same(four.found("qwen3-1"), four.found("qwen3-4"))


def test_a_rank_without_a_sample_that_learns_still_takes_part(quick: Jobs) -> None:
    """The one group to run is whole on one rank; the other runs a pass without a target in every rollout."""
    found = quick.found("none-learn-2").check()
    passes = [
        [m[1] for m in found.measured(rank)["metrics"][0] if m[0] == "train/num_micro_batches"] for rank in (0, 1)
    ]
    assert sorted(passes) == [[0.0], [1.0]]
    assert found.passes == [3, 3]


def test_in_bfloat16_shards_are_float32_and_what_is_handed_out_is_not(quick: Jobs, models: dict[str, Path]) -> None:
    found = quick.found("bfloat16").check()
    assert_moved(found, models)
    assert all(weight.dtype == torch.float32 for weight in found.weights().values())
    wanted = quick.found("grpo-1").metrics[0]["train/entropy"]
    assert found.metrics[0]["train/entropy"] == pytest.approx(wanted, rel=0.02)


def test_in_bfloat16_the_ratio_stays_exactly_one_where_no_weight_moves(quick: Jobs) -> None:
    (found,) = quick.found("still").check().metrics
    assert found["train/ratio_max"] == found["train/ratio_mean"] == 1.0
    assert found["train/clip_fraction"] == 0.0


# Checkpoints


@pytest.mark.parametrize(("saved", "loaded"), [(2, 1), (1, 2)])
def test_what_some_ranks_saved_others_go_on_with(quick: Jobs, saved: int, loaded: int) -> None:
    check_resumed(quick.found("ppo-1"), quick.found(f"second-half-{loaded}").check())


@pytest.mark.slow
def test_four_ranks_go_on_with_what_one_saved(quick: Jobs, four: Jobs) -> None:
    check_resumed(quick.found("ppo-1"), four.found("second-half-4").check())


def check_resumed(whole: Found, resumed: Found) -> None:
    for what in ("weights", "critic"):
        for name, weight in whole.weights(what=what).items():
            found = resumed.weights(what=what)[name]
            torch.testing.assert_close(found, weight, atol=1e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def test_the_model_of_a_sharded_checkpoint_is_a_hugging_face_folder(quick: Jobs) -> None:
    from transformers import AutoModelForCausalLM

    found = quick.found("first-half-2").check()
    folder = found.folder / "saves" / "rollout_000002"
    assert len(list((folder / "model").glob("model-*.safetensors"))) > 1
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    expected = found.weights()
    assert all(torch.equal(p, expected[name]) for name, p in model.named_parameters())
    assert model.config.dtype == torch.float32
    whole = AutoModelForCausalLM.from_pretrained(
        quick.found("first-half-1").folder / "saves" / "rollout_000002" / "model"
    )
    assert model.config.to_dict() == whole.config.to_dict() | {"_name_or_path": model.config._name_or_path}
    assert model.generation_config.to_dict() == whole.generation_config.to_dict()


# What goes wrong


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


@pytest.mark.parametrize(("job", "rank"), [("dies", 0), ("late", 0)])
def test_a_lost_rank_ends_the_others_with_one_clear_error(quick: Jobs, job: str, rank: int) -> None:
    ended = quick.found(job).ended
    assert ended["codes"][str(rank)] == 1
    assert ended["seconds"] < 45
    said = last_line(quick.found(job).log(rank))
    assert said.startswith("RankError: rank 0 of 2 lost the others while scoring a rollout (")
    assert said.endswith("or the work takes longer than --distributed-timeout-seconds")


def test_weights_go_to_the_host_and_back_bit_for_bit(quick: Jobs) -> None:
    """The ranks check it after every rollout; training then goes on as if nothing had been."""
    found, plain = quick.found("asleep").check(), quick.found("grpo-2").check()
    assert all(torch.equal(weight, found.weights()[name]) for name, weight in plain.weights().items())
