"""What a folder's weights must be before anything is computed with them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config

from treadle.errors import ModelError
from treadle.models.load import check_finite, load_model
from treadle.models.value import ValueModel, load_value_head, save_value_head

CPU = torch.device("cpu")


@pytest.fixture
def folder(tiny_model_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))


def refusal(folder: Path, dtype: torch.dtype = torch.float32) -> str:
    with pytest.raises(ModelError) as error:
        load_model(str(folder), dtype, CPU)
    return str(error.value)


def set_config(folder: Path, **fields: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("number", "kind"), [("nan", "NaN"), ("-inf", "infinite")])
def test_a_weight_that_is_not_finite_is_named(folder: Path, dtype, number, kind) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = float(number)
    save_file(weights, file, {"format": "pt"})
    said = refusal(folder, dtype)
    assert f"1 of 2048 numbers in weight 'model.layers.1.mlp.up_proj.weight' are {kind}" in said
    assert "packed" not in said
    assert "\n" not in said


def test_a_stored_buffer_that_is_not_finite_is_named(tmp_path: Path) -> None:
    """The bias of a router is no parameter, and a choice of experts by NaN has finite logits."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "moe_intermediate_size": 16, "num_attention_heads": 2}
    heads = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    experts = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
    }
    config = DeepseekV3Config(num_hidden_layers=1, num_key_value_heads=2, **sizes, **heads, **experts)
    model = AutoModelForCausalLM.from_config(config)
    model.model.layers[0].mlp.gate.e_score_correction_bias.fill_(float("nan"))
    model.save_pretrained(tmp_path)
    said = refusal(tmp_path)
    assert "4 of 4 numbers in weight 'model.layers.0.mlp.gate.e_score_correction_bias' are NaN" in said


def test_large_weights_whose_sum_overflows_are_finite() -> None:
    check_finite("x", [("w", torch.full((4,), 3e38))])
    with pytest.raises(ModelError, match=r"2 of 4 numbers in weight 'w' are infinite"):
        check_finite("x", [("w", torch.tensor([3e38, 3e38, float("inf"), float("inf")]))])


def test_a_folder_with_more_layers_than_its_config_is_refused(folder: Path) -> None:
    set_config(folder, num_hidden_layers=1)
    said = refusal(folder)
    assert re.search(
        r"holds 9 weights that its config\.json has no place for \('model\.layers\.1\.input_layernorm", said
    )
    assert said.count("model.layers.1.") == 3


def test_a_folder_with_fewer_layers_than_its_config_is_refused_in_one_line(folder: Path, caplog, capfd) -> None:
    set_config(folder, num_hidden_layers=3)
    said = refusal(folder)
    assert "LOAD REPORT" not in caplog.text + "".join(capfd.readouterr())
    assert "lacks 9 of the weights that its config.json describes ('model.layers.2.input_layernorm" in said


def test_what_an_architecture_says_it_does_not_need_is_no_fault(folder: Path) -> None:
    """Old Llama folders hold the frequencies of rotary positions layer by layer, tied ones their head a second time."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, file, {"format": "pt"})
    load_model(str(folder), torch.float32, CPU)


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.masked_bias", "model.embeddings.position_ids"])
def test_what_old_folders_hold_and_a_model_computes_by_itself_is_no_fault(folder: Path, name: str) -> None:
    file = folder / "model.safetensors"
    save_file({**load_file(file), name: torch.tensor(-1e4)}, file, {"format": "pt"})
    load_model(str(folder), torch.float32, CPU)


def test_a_value_head_that_is_not_finite_is_named(tiny_model, tmp_path: Path) -> None:
    model = ValueModel(tiny_model)
    save_value_head({"weight": torch.full((1, 32), float("nan")), "bias": torch.zeros(1)}, tmp_path)
    with pytest.raises(ModelError, match="32 of 32 numbers in weight 'weight' are NaN"):
        load_value_head(model, tmp_path)
