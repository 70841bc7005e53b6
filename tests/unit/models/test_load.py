"""Loading and saving model folders, and what a wrong folder says."""

import json
import os
import shutil

import pytest
import torch

from treadle.errors import ModelError
from treadle.models.load import compute_dtype, load_model, load_parameters, pick_device
from treadle.models.model_config import context_length, load_config
from treadle.models.saving import save_model, write_model_config

CPU = torch.device("cpu")


def refusal(path) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(str(path), torch.float32, CPU)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def test_no_such_folder(tmp_path):
    assert "no such folder" in refusal(tmp_path / "nowhere")


def test_a_file_is_not_a_folder(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"0")
    refusal(tmp_path / "model.bin")


def test_a_folder_without_config(tmp_path):
    assert "has no config.json" in refusal(tmp_path)


def test_a_config_that_is_not_json(tmp_path):
    (tmp_path / "config.json").write_text("{")
    refusal(tmp_path)


def test_a_model_that_is_not_a_causal_one(tmp_path):
    from transformers import T5Config

    T5Config(d_model=16, num_layers=1).save_pretrained(tmp_path)
    assert "can't load a causal language model" in refusal(tmp_path)


def test_a_folder_without_weights(tiny_model_dir, tmp_path):
    shutil.copy(tiny_model_dir / "config.json", tmp_path)
    assert "can't load a causal language model" in refusal(tmp_path)


def test_a_cut_weight_file(tiny_model_dir, tmp_path):
    folder = shutil.copytree(tiny_model_dir, tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    refusal(folder)


def test_missing_weights_are_not_filled_with_random_ones(tiny_model_dir, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(tiny_model_dir, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert "lacks 1 of the weights that its config.json describes ('model.layers.1.mlp.up_proj.weight')" in refusal(
        folder
    )


@pytest.mark.parametrize("trainable", [True, False])
def test_parameters_need_gradients_as_asked(tiny_model_dir, trainable):
    model = load_model(str(tiny_model_dir), torch.bfloat16, CPU, trainable=trainable)
    assert {p.requires_grad for p in model.parameters()} == {trainable}
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not model.training


def test_dropout_stays_off_in_training_mode(make_folder):
    gpt2 = {"attn_pdrop": 0.5, "embd_pdrop": 0.5, "resid_pdrop": 0.5}
    opt = {"dropout": 0.5, "attention_dropout": 0.5, "layerdrop": 0.9}
    for name, rates in (("gpt2", gpt2), ("opt", opt)):
        model = load_model(str(make_folder(name, **rates)), torch.float32, CPU)
        model.set_attn_implementation("eager")
        tokens = torch.tensor([[5, 9, 3, 60]])
        calm = model(tokens).logits
        model.train()
        for _ in range(3):
            assert torch.equal(model(tokens).logits, calm)


def test_load_parameters_names_them_as_the_module_does(tiny_model, tiny_model_dir):
    found = load_parameters(tiny_model_dir)
    expected = dict(tiny_model.named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not any(tensor.requires_grad for tensor in found.values())


def test_load_parameters_of_a_folder_without_a_model(tmp_path):
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_parameters(tmp_path)


@pytest.mark.parametrize("name", ["qwen2", "gpt-neox", "mixtral"])  # tied; untied; weights fused in the module
def test_saved_weights_load_with_transformers(make_folder, tmp_path, name):
    from transformers import AutoModelForCausalLM

    model = load_model(str(make_folder(name)), torch.bfloat16, CPU)
    masters = {n: torch.randn(p.shape) for n, p in model.named_parameters()}
    save_model(model, masters, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"
    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "out").named_parameters())
    assert loaded.keys() == masters.keys()
    assert all(torch.equal(loaded[n], masters[n]) for n in masters)
    assert all(torch.equal(load_parameters(tmp_path / "out")[n], masters[n]) for n in masters)


@pytest.mark.parametrize("name", ["deepseek-v3, values narrower than keys", "ernie, a frozen bias"])
def test_what_is_not_trained_is_saved_as_it_is(make_folder, tmp_path, name):
    from safetensors.torch import load_file, save_file

    folder = make_folder(name)
    stored = load_file(folder / "model.safetensors")
    biases = [key for key in stored if key.endswith("e_score_correction_bias")]
    assert biases
    stored |= {key: torch.rand_like(stored[key]) for key in biases}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    model = load_model(str(folder), torch.float32, CPU)
    trained = {n: p.detach() + 1 for n, p in model.named_parameters() if p.requires_grad}
    assert not [n for n in trained if n.endswith("e_score_correction_bias")]
    save_model(model, trained, tmp_path / "out")
    again = load_file(tmp_path / "out" / "model.safetensors")
    assert again.keys() == stored.keys()
    assert all(torch.equal(again[key], stored[key]) for key in biases)
    load_model(str(tmp_path / "out"), torch.float32, CPU)


def test_tied_weights_are_written_once(tiny_model, tmp_path):
    from safetensors import safe_open

    save_model(tiny_model, {n: p.detach() for n, p in tiny_model.named_parameters()}, tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
        assert "model.embed_tokens.weight" in file.keys()  # noqa: SIM118


def test_context_length(tiny_model_dir):
    from transformers import MambaConfig

    assert context_length(load_config(str(tiny_model_dir))) == 256
    assert context_length(MambaConfig()) == 2**30


def test_a_missing_gpu_is_refused():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert pick_device("auto") == CPU
    with pytest.raises(ModelError, match="--device cuda: torch sees no GPU"):
        pick_device("cuda")


def test_compute_dtype_is_as_asked_or_one_of_two():
    assert compute_dtype("bfloat16", "cpu") is torch.bfloat16
    assert compute_dtype("float32", "cpu") is torch.float32
    assert compute_dtype("auto", "cpu") in (torch.float32, torch.bfloat16)


def test_files_beside_the_weights_are_the_same_from_one_process_and_from_many(tiny_model, tmp_path):
    """Also of a generation config that transformers refuses to save."""
    tiny_model.generation_config.update(temperature=0.7, eos_token_id=[0, 2])
    save_model(tiny_model, {n: p.detach() for n, p in tiny_model.named_parameters()}, tmp_path / "one")
    (tmp_path / "many").mkdir()
    write_model_config(tiny_model, tmp_path / "many")
    assert tiny_model.generation_config.temperature == 0.7
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "one" / name).read_text() == (tmp_path / "many" / name).read_text()
    found = json.loads((tmp_path / "one" / "generation_config.json").read_text())
    assert (found["temperature"], found["eos_token_id"]) == (0.7, [0, 2])


def test_a_pipe_in_place_of_a_config_is_not_waited_for(tmp_path):
    from treadle.models.model_config import is_model_folder

    os.mkfifo(tmp_path / "config.json")
    assert not is_model_folder(tmp_path)
