"""The plan's numbers, worked out by hand, and the whole plan of a tiny model that is never loaded."""

import json
from dataclasses import replace

import pytest
import torch

from treadle.config import load_config
from treadle.errors import ConfigError, ModelError
from treadle.models.load import load_model
from treadle.observe.samples import rollout_file
from treadle.run.memory import MachineMemory, ModelShape, machine_memory, memory_of_workers, micro_batch_tokens
from treadle.run.plan import DataSizes, make_plan, plan_run
from treadle.run.session import with_saved_length

GIB = 2**30
SHAPE = ModelShape(
    name="tiny",
    parameters=2**28,
    vocab_size=1024,
    hidden_size=64,
    num_layers=4,
    kv_dim=32,
    linear_width=1000,
    context=512,
    dtype="bfloat16",
    device="cpu",
)
MACHINE = MachineMemory(total=64 * GIB, available=32 * GIB)
SOUND = [
    *["--hf-checkpoint", "tiny", "--prompt-data", "data.jsonl", "--num-rollout", "10"],
    *["--rm-type", "math", "--label-key", "answer"],
]


def plan(*argv: str, sizes: DataSizes = DataSizes(100), machine: MachineMemory = MACHINE) -> str:  # noqa: B008
    return make_plan(load_config(None, [*SOUND, *argv]), SHAPE, sizes, machine, "quick")


def row(page: str, label: str) -> str:
    (line,) = [line for line in page.splitlines() if line.startswith(label)]
    return line.removeprefix(label).strip()


def memory(*argv: str) -> dict[str, int]:
    (process,) = memory_of_workers(load_config(None, [*SOUND, *argv]), SHAPE)
    return {part.name: part.num_bytes for part in process.parts}


def test_batch_arithmetic_and_length():
    page = plan()
    assert row(page, "batches") == "16 × 8 = 128 × 1 ✓"
    assert row(page, "run   ") == "10 rollouts · 10 optimizer steps · 1280 samples · 1.60 epochs"
    assert row(page, "data") == "data.jsonl · 100 prompts"
    assert row(page, "micro-batch") == "up to 8192 tokens"
    assert "warnings" not in page


def test_a_cluster_is_said_in_a_line():
    assert "runtime" not in plan()
    page = plan("--runtime", "ray", "--rollout-num-gpus", "3", "--max-lag", "1", "--rollout-correction", "tis")
    assert row(page, "runtime") == "a Ray of its own · 1 train worker and 3 engines · weights by auto"
    assert "generation runs up to 1 rollout ahead of the weights" in page
    page = plan("--runtime", "ray", "--ray-address", "auto", "--colocate")
    assert row(page, "runtime").startswith(
        "Ray at auto · 1 train worker and 1 engine on the same devices, taking turns"
    )


def test_epochs_and_their_remainder():
    page = plan("--num-rollout", "None", "--num-epoch", "2", sizes=DataSizes(100, num_dropped=7))
    assert row(page, "run   ") == "12 rollouts · 12 optimizer steps · 1536 samples · 1.92 epochs"
    assert "the last 8 prompts of the 2 epochs are not drawn" in page
    assert "(7 dropped: too long)" in row(page, "data")


def test_schedule():
    assert row(plan("--lr", "1e-5"), "schedule").startswith("lr 1e-05: constant")
    page = plan("--lr-decay-style", "cosine", "--lr-warmup-steps", "3", "--num-steps-per-rollout", "2")
    assert "warm-up over 3 steps, then cosine decay to 0 at step 20 of 20" in row(page, "schedule")
    assert row(page, "batches") == "16 × 8 = 64 × 2 ✓"


def test_evaluation_sets_with_their_sizes():
    argv = ["--eval-prompt-data", "sums=s.jsonl", "words=w.jsonl", "--eval-interval", "5", "--eval-temperature", "0.5"]
    page = plan(*argv, sizes=DataSizes(100, eval_sets={"sums": 12}))
    assert row(page, "evaluation") == "at the start, every 5 rollouts, and at the end"
    assert "sums: s.jsonl · 12 prompts × 1 sample, temperature 0.5, at most 256 new tokens" in page
    assert "words: w.jsonl · 1 sample" in page


def test_what_is_written():
    page = plan("--save-interval", "5", "--keep-checkpoints", "2", "--no-tensorboard")
    assert row(page, "run folder").startswith("runs/quick-<time>: config.json, metrics.jsonl")
    assert "tensorboard" not in page
    expected = (
        "every 5 rollouts and at the end in runs/quick-<time>/checkpoints · the newest 2 kept · about 3.00 GiB each"
    )
    assert row(page, "checkpoints") == expected
    assert row(plan(), "checkpoints").startswith("none")


def test_warnings_are_shown_and_faults_refused():
    assert "rollout_top_p = 0.9" in plan("--rollout-top-p", "0.9").split("warnings")[1]
    with pytest.raises(ConfigError, match="kl_coef"):
        plan("--kl-coef", "0.1")


def test_memory_of_weights_by_hand():
    parts = memory()
    assert parts["weights (bfloat16)"] == GIB // 2
    assert parts["master weights (float32)"] == GIB
    assert parts["gradients (float32)"] == GIB
    assert parts["Adam (two moments)"] == 2 * GIB
    assert parts["KV cache"] == 2 * GIB
    assert "reference model" not in parts
    assert memory("--use-kl-loss", "--kl-loss-coef", "1")["reference model"] == GIB // 2


def memory_on_ray(kind: str, device: str, *argv: str) -> dict[str, int]:
    config = load_config(None, [*SOUND, "--runtime", "ray", *argv])
    (found,) = [w for w in memory_of_workers(config, replace(SHAPE, device=device)) if w.kind == kind]
    return {part.name: part.num_bytes for part in found.parts}


def test_memory_of_shards_by_hand():
    eight = ("--actor-num-gpus-per-node", "8", "--fsdp-replicate-size", "2", "--tensor-parallel-size", "2")
    parts = memory_on_ray("train worker", "cuda", *eight, "--use-kl-loss", "--kl-loss-coef", "1")
    # 8 ranks hold 2 replicas of 4 pieces; a whole gradient is split between 2 neighbours only
    assert parts["master weights (float32)"] == GIB // 4
    assert parts["Adam (two moments)"] == GIB // 2
    assert parts["gradients (float32)"] == GIB // 2
    # embeddings, and two of four layers, each split between 2 neighbours
    assert parts["weights (bfloat16)"] == 2 * (1024 * 64 + 2 * (2**28 - 1024 * 64) // 4 // 2)
    # linear widths of 1000 are less than the sides that are whole: 7 × 4 layers × 64
    assert parts["activations"] == 8192 * 2400
    assert "reference model" not in parts  # on the host
    joined = memory_on_ray("train worker", "cuda", *eight, "--fsdp-sync-every-micro-batch")
    assert joined["gradients (float32)"] == GIB // 4
    offloaded = memory_on_ray("train worker", "cuda", *eight, "--fsdp-cpu-offload")
    assert not {"master weights (float32)", "Adam (two moments)"} & set(offloaded)
    assert set(memory_on_ray("engine", "cuda", *eight)) == {"weights (bfloat16)", "KV cache"}


def test_memory_of_a_critic_by_hand():
    ppo = ("--advantage-estimator", "ppo")
    assert memory(*ppo)["critic"] == memory_on_ray("train worker", "cpu", *ppo)["critic"] == 9 * GIB // 2
    own = (*ppo, "--critic-num-nodes", "2")
    assert "critic" not in memory_on_ray("train worker", "cpu", *own)
    parts = memory_on_ray("critic worker", "cpu", *own)
    assert (parts["master weights (float32)"], parts["Adam (two moments)"]) == (GIB // 2, GIB)
    page = plan("--runtime", "ray", *own)
    assert row(page, "runtime") == "a Ray of its own · 1 train worker, 2 critic workers and 1 engine · weights by auto"
    assert "memory of each critic worker (estimate)" in page
    assert "memory of the engine (estimate)" in page
    (verdict,) = [line for line in page.splitlines() if "this machine has" in line]
    assert verdict.startswith("  all workers")


def test_activations_by_hand():
    # 8192 tokens × 1.2 × 2 bytes × width 1000, whatever attends
    assert memory()["activations"] == 8192 * 2400
    assert memory("--attention-backend", "sdpa")["activations"] == 8192 * 2400
    # one layer's activations and the input of each of the 4 layers
    with_checkpoints = memory("--gradient-checkpointing")["activations"]
    assert with_checkpoints == 8192 * (600 + 4 * 64 * 2)


@pytest.mark.parametrize(
    ("argv", "tokens"),
    [
        ([], 8192),
        (["--rollout-max-response-len", "9000"], 9000),
        (["--rollout-batch-size", "1", "--n-samples-per-prompt", "2"], 512),
        (["--no-use-dynamic-batch-size", "--micro-batch-size", "4"], 1024),
        (["--no-use-dynamic-batch-size", "--micro-batch-size", "4", "--rollout-max-prompt-len", "44"], 1200),
    ],
)
def test_micro_batch_tokens(argv, tokens):
    assert micro_batch_tokens(load_config(None, [*SOUND, *argv])) == tokens


def test_halves_of_the_loop_hold_less():
    assert set(memory("--debug-rollout-only")) == {"weights (bfloat16)", "KV cache"}
    parts = memory("--debug-train-only", "--load-debug-rollout-data", "x")
    assert "KV cache" not in parts
    assert "Adam (two moments)" in parts


def test_a_teacher_and_a_steered_kl_are_in_the_plan():
    flags = ["--opd-teacher-load", "big", "--opd-kl-coef", "0.5", "--rm-type", "--label-key", "None"]
    flags += ["--use-kl-loss", "--kl-loss-coef", "0.1", "--kl-target", "0.05", "--kl-horizon", "5000"]
    config = load_config(None, [*SOUND, *flags])
    shape = replace(SHAPE, teacher_parameters=2**30)
    page = make_plan(config, shape, DataSizes(100), MACHINE)
    assert "KL loss 0.1 × low_var_kl, steered to 0.05 nats a token over 5000 samples" in page
    assert "distilled from big × 0.5" in page
    assert row(page, "sampling").endswith("reward none")
    (process,) = memory_of_workers(config, shape)
    parts = {part.name: part.num_bytes for part in process.parts}
    assert parts["teacher"] == 2**31  # bfloat16
    assert "teacher" not in memory()


def test_training_from_saved_rollouts_takes_all_of_them(tmp_path):
    for rollout_id in range(3):
        rollout_file(tmp_path, rollout_id).touch()
    argv = [*SOUND, "--debug-train-only", "--load-debug-rollout-data", str(tmp_path), "--num-rollout", "None"]
    page = make_plan(with_saved_length(load_config(None, argv)), SHAPE, DataSizes(None), MACHINE, "quick")
    assert row(page, "data") == f"saved rollouts from {tmp_path}"
    assert row(page, "run   ") == "3 rollouts · 3 optimizer steps · 384 samples"


def test_verdict_compares_the_total_with_the_machine():
    assert "✓ this machine has 64.00 GiB, 32.00 GiB of it free" in plan()
    small = MachineMemory(total=8 * GIB, available=4 * GIB)
    assert "✗ this machine has 8.00 GiB, 4.00 GiB of it free: lower max_tokens_per_gpu" in plan(machine=small)


def test_machine_memory_is_sane():
    found = machine_memory("cpu")
    assert 0 < found.available <= found.total


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    """A folder with a config and a tokenizer, and no weights at all."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    ).save_pretrained(folder)
    words = Tokenizer(WordLevel({"<unk>": 0, "</s>": 1, "one": 2}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>").save_pretrained(folder)
    return folder


def test_plan_of_a_model_that_is_never_loaded(tiny_model, tmp_path):
    data = tmp_path / "data.jsonl"
    prompts = ["one two three"] * 5 + ["one " * 60]
    data.write_text("".join(json.dumps({"input": text, "answer": "1"}) + "\n" for text in prompts))
    argv = [*SOUND, "--hf-checkpoint", str(tiny_model), "--prompt-data", str(data), "--rollout-max-response-len", "32"]
    argv += [
        "--dtype",
        "float32",
        "--device",
        "cpu",
        "--eval-prompt-data",
        f"held={data}@[0:3]",
        "--eval-interval",
        "5",
    ]
    page = plan_run(load_config(None, argv), "quick")
    # embeddings 32×16, per layer q and o 16×16, k and v 16×8, three of 16×24, two norms of 16; one last norm
    parameters = 32 * 16 + 2 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 24 + 2 * 16) + 16
    assert f"{parameters / 1e6:.1f} M parameters · 2 layers · vocabulary 32 · context 64 tokens" in row(page, "model")
    assert "5 prompts (1 dropped: too long)" in row(page, "data")
    assert "3 prompts × 1 sample, greedy, at most 32 new tokens" in page
    assert row(page, "compute").startswith("float32 on cpu")
    assert "master weights (float32)" not in page.split("memory (estimate)")[1]


def test_response_that_leaves_no_room_is_refused(tiny_model):
    argv = [*SOUND, "--hf-checkpoint", str(tiny_model), "--rollout-max-response-len", "64"]
    with pytest.raises(ConfigError, match=r"64 response tokens do not fit the model's context of 64"):
        plan_run(load_config(None, argv))


def test_bundled_model_that_is_not_here_names_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="treadle model fetch smollm2-135m-instruct"):
        plan_run(load_config(None, [*SOUND, "--hf-checkpoint", "smollm2-135m-instruct"]))


REFUSED = {
    "a window in the mask": ("PhimoeConfig", {"sliding_window": 2047}, "Phimoe (phimoe) models are not supported: "),
    "attention of its own": ("FalconConfig", {}, "Falcon (falcon) models are not supported: "),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_plan_refuses_the_architectures_that_loading_refuses(kind, tmp_path):
    import transformers

    name, settings, said = REFUSED[kind]
    getattr(transformers, name)(**settings).save_pretrained(tmp_path)
    messages = []
    for check in (
        lambda: plan_run(load_config(None, [*SOUND, "--hf-checkpoint", str(tmp_path)])),
        lambda: load_model(str(tmp_path), torch.float32, torch.device("cpu")),
    ):
        with pytest.raises(ModelError) as caught:
            check()
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert messages[0].startswith(f"{str(tmp_path)!r}: {said}")


@pytest.mark.parametrize("name", ["Gemma3Config", "Gemma4TextConfig", "DeepseekV3Config"])
def test_a_plan_for_configs_of_parts_and_of_unlike_layers(name, tiny_model, tmp_path):
    """Its numbers are the text part's; the model loads, too."""
    import shutil

    import transformers

    from treadle.models.miniature import miniature, miniature_model

    folder = shutil.copytree(tiny_model, tmp_path / "model")
    config = miniature(getattr(transformers, name)())
    miniature_model(config, "eager").save_pretrained(folder)
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "aa", "answer": "1"}\n')
    argv = [*SOUND, "--hf-checkpoint", str(folder), "--prompt-data", str(data), "--input-key", "prompt"]
    page = plan_run(load_config(None, [*argv, "--rollout-max-response-len", "8"]))
    assert f"{config.get_text_config().num_hidden_layers} layers · vocabulary 96 · context 64 tokens" in page
    load_model(str(folder), torch.float32, torch.device("cpu"))


def test_a_model_of_another_role_is_checked_too(tiny_model, tmp_path):
    import transformers

    transformers.PhimoeConfig(sliding_window=2047).save_pretrained(tmp_path)
    argv = [*SOUND, "--hf-checkpoint", str(tiny_model), "--rollout-max-response-len", "8"]
    with pytest.raises(ModelError, match=r"Phimoe \(phimoe\) models are not supported"):
        plan_run(load_config(None, [*argv, "--use-kl-loss", "--ref-load", str(tmp_path)]))


def test_the_reason_for_a_short_context_is_given(tiny_model, tmp_path):
    import shutil

    folder = shutil.copytree(tiny_model, tmp_path / "long")
    config = json.loads((folder / "config.json").read_text())
    factors = {"short_factor": [1.0] * 2, "long_factor": [2.0] * 2}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16, **factors}
    (folder / "config.json").write_text(json.dumps({**config, "rope_parameters": rope}))
    argv = [*SOUND, "--hf-checkpoint", str(folder), "--rollout-max-response-len", "16"]
    with pytest.raises(
        ConfigError, match=r"context of 16 \(its longrope positions switch beyond original_max_position_emb"
    ):
        plan_run(load_config(None, argv))
