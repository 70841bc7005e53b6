"""What models must have to be trained together: architectures, tokens, embeddings, context."""

from __future__ import annotations

import asyncio
import json
import shutil
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest
import torch

from treadle.chat import load_codec
from treadle.config import load_config
from treadle.errors import ConfigError, ModelError
from treadle.models.load import load_config as load_model_config
from treadle.models.load import load_model
from treadle.rollout.engines.torch_engine.engine import TorchEngine
from treadle.rollout.engines.torch_engine.scheduler import EngineLimits
from treadle.run.model_files import find_model_files, longest_prompt, padding_note
from treadle.run.plan import plan_run
from treadle.training.batch import batch_of
from treadle.training.trainer import Trainer
from treadle.types import NO_VERSION, Sample, SamplingParams

CPU = torch.device("cpu")
ROWS, HOLE = 160, 100


@pytest.fixture(scope="module")
def padded(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with embeddings for 160 ids; of 98 tokens one has id 101, so 100 and 102 to 159 are no tokens."""
    from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("padded")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(AutoConfig.from_pretrained(tiny_model_dir, vocab_size=ROWS)).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    vocab |= {f"<{i}>": i for i in range(len(vocab), ROWS) if i < HOLE or i == HOLE + 1}
    file.write_text(json.dumps(content))
    return folder


@pytest.fixture
def wide_tokenizer(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """The tiny model with a tokenizer that knows two more tokens than it has embeddings for."""
    from transformers import AutoTokenizer

    folder = Path(shutil.copytree(tiny_model_dir, tmp_path / "wide"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<one>", "<two>"])
    tokenizer.save_pretrained(folder)
    return folder


def settings(folder: Path, *argv: str):
    data = ["--prompt-data", "reasoning_gym:chain_sum?size=4", "--input-key", "question", "--label-key", "answer"]
    data += ["--num-rollout", "1", "--rm-type", "math"]
    return load_config(None, ["--hf-checkpoint", str(folder), "--rollout-max-response-len", "8", *data, *argv])


def test_what_the_tokenizer_knows(padded: Path) -> None:
    codec = load_codec(str(padded))
    assert codec.largest_id == (HOLE + 1, f"<{HOLE + 1}>")
    assert codec.ids_without_token(ROWS) == [HOLE, *range(HOLE + 2, ROWS)]
    assert codec.ids_without_token(HOLE) == []
    assert codec.strangers(np.array([3, ROWS, HOLE, -1])).tolist() == [ROWS, HOLE, -1]


def test_a_tokenizer_that_is_larger_than_the_embeddings_is_refused_with_the_numbers(
    wide_tokenizer: Path, tiny_model_dir: Path
) -> None:
    codec = load_codec(str(wide_tokenizer))
    rows = codec.largest_id[0] - 1
    said = rf"--hf-checkpoint .* for {rows} ids, 0 to {rows - 1}, but .* up to id {rows + 1} \('<two>'\)"
    with pytest.raises(ModelError, match=said):
        find_model_files(settings(wide_tokenizer))
    with pytest.raises(ModelError, match=said):
        plan_run(settings(wide_tokenizer))
    find_model_files(settings(tiny_model_dir))


@pytest.mark.parametrize(
    ("flag", "used_with"),
    [("--ref-load", "--use-kl-loss --kl-loss-coef 0.1"), ("--critic-load", "--advantage-estimator ppo")],
)
def test_so_is_another_model_that_is_smaller_than_the_tokenizer(
    padded: Path, tiny_model_dir: Path, flag: str, used_with: str
) -> None:
    argv = [flag, str(tiny_model_dir), *used_with.split()]
    with pytest.raises(ModelError, match=rf"{flag} .* but the tokenizer of .* has tokens up to id {HOLE + 1}"):
        plan_run(settings(padded, *argv))
    find_model_files(settings(padded, flag, str(tiny_model_dir)))  # unused


def test_padding_is_told_once_and_is_no_fault(padded: Path, tiny_model_dir: Path) -> None:
    whole = settings(tiny_model_dir)
    assert padding_note(whole, find_model_files(whole)) is None
    note = padding_note(settings(padded), find_model_files(settings(padded)))
    assert note is not None
    assert note.startswith("59 of the model's 160 embeddings belong to no token")
    assert note.endswith("these ids are never sampled")


@pytest.mark.parametrize(
    ("fields", "want"),
    [
        ({"rollout_max_response_len": 200}, 256 - 200),
        ({"rollout_max_response_len": 200, "eval_max_response_len": 100}, 56),
        ({"rollout_max_response_len": 100, "eval_max_response_len": 200}, 56),
        ({"rollout_max_response_len": 200, "rollout_max_prompt_len": 10}, 10),
        ({"rollout_max_response_len": 200, "rollout_max_prompt_len": 56}, 56),
        ({"rollout_max_response_len": 255}, 1),
    ],
)
def test_the_longest_prompt_leaves_room_for_the_longest_response(make_config, tiny_model_dir, fields, want):
    assert longest_prompt(make_config(**fields), load_model_config(str(tiny_model_dir))) == want


@pytest.mark.parametrize(
    ("fields", "numbers"),
    [
        ({"rollout_max_response_len": 256}, "1 prompt and 256 response tokens do not fit the model's context of 256"),
        ({"rollout_max_response_len": 200, "rollout_max_prompt_len": 57}, "57 prompt and 200 response tokens"),
        ({"rollout_max_response_len": 10, "eval_max_response_len": 300}, "1 prompt and 300 response tokens"),
    ],
)
def test_what_does_not_fit_the_context_is_refused_with_its_numbers(make_config, tiny_model_dir, fields, numbers):
    with pytest.raises(ConfigError, match=numbers):
        longest_prompt(make_config(**fields), load_model_config(str(tiny_model_dir)))


def test_models_are_checked_if_the_run_loads_them(make_config, tiny_model_dir) -> None:
    named = {"hf_checkpoint": str(tiny_model_dir), "ref_load": "/nowhere/ref", "critic_load": "/nowhere/critic"}
    named["rollout_max_response_len"] = 8
    find_model_files(make_config(**named))
    find_model_files(make_config(**named, use_kl_loss=True, debug_rollout_only=True))
    for fields, missing in (({"use_kl_loss": True}, "ref"), ({"advantage_estimator": "ppo"}, "critic")):
        for fetch_missing in (True, False):
            with pytest.raises(ModelError, match=f"no model at '/nowhere/{missing}'"):
                find_model_files(make_config(**named, **fields), fetch_missing=fetch_missing)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_id_without_a_token_is_never_sampled_and_engine_and_trainer_agree(padded: Path, make_config, dtype) -> None:
    model, codec = load_model(str(padded), dtype, CPU), load_codec(str(padded))
    prompt = (5, 9, 20, 7)

    async def generate() -> list[Sample]:
        engine = TorchEngine(model, codec, EngineLimits(256, 1 << 28))
        sampling = SamplingParams(3, temperature=1.3, ignore_eos=True, seed=4)
        try:
            async with aclosing(engine.generate(prompt, sampling, 400)) as found:
                return [_sample(prompt, completion) async for completion in found]
        finally:
            await engine.close()

    samples = asyncio.run(generate())
    assert not any(len(codec.strangers(sample.token_ids)) for sample in samples)
    batch = batch_of(samples)
    if dtype == torch.bfloat16:  # engine and trainer round differently
        return
    config = make_config(rollout_batch_size=1, n_samples_per_prompt=400)
    from treadle.config import batch_arithmetic

    trainer = Trainer(model, config, batch_arithmetic(config), 1)
    gap = (trainer.logprobs(batch, model) - batch.rollout_logprobs)[batch.loss_mask]
    assert float(gap.abs().max()) < 1e-5
    with torch.no_grad():  # which is the model's own distribution, padding included
        logits = model.base_model(input_ids=torch.tensor([prompt]), treadle_plan=_plan(len(prompt))).last_hidden_state
        table = torch.log_softmax(model.lm_head(logits[0, -1]) / 1.3, -1)
    assert table[codec.ids_without_token(ROWS)].exp().sum() > 0.1
    for sample in samples[:20]:
        assert sample.rollout_logprobs[len(prompt)] == pytest.approx(
            float(table[sample.token_ids[len(prompt)]]), abs=1e-5
        )


def _plan(length: int):
    from treadle.models.attention import PackedAttention
    from treadle.models.layout import PackedLayout

    return PackedAttention(PackedLayout.of_lengths([length]))


def _sample(prompt, completion) -> Sample:
    size = len(completion.token_ids)
    return Sample(
        group_id=0,
        index=completion.index,
        trajectory_id=completion.index,
        token_ids=np.concatenate([prompt, completion.token_ids]).astype(np.int32),
        loss_mask=np.arange(len(prompt) + size) >= len(prompt),
        rollout_logprobs=np.concatenate([np.zeros(len(prompt)), completion.logprobs]).astype(np.float32),
        weight_versions=np.concatenate([np.full(len(prompt), NO_VERSION), completion.weight_versions]).astype(np.int32),
        temperature=1.3,
        status=completion.status,
        reward=float(completion.index % 2),
    )
