"""Model folders for others."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from treadle.errors import ConfigError, ModelError
from treadle.models.saving import export_model, model_info


def weights_of(folder):
    from transformers import AutoModelForCausalLM

    return dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_exported_folder_loads_and_generates(tiny_model_dir, tmp_path, dtype):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = export_model(tiny_model_dir, tmp_path / "new" / "out", dtype)
    assert json.loads((out / "config.json").read_text())["dtype"] == dtype
    before, after = weights_of(tiny_model_dir), weights_of(out)
    assert before.keys() == after.keys()
    for name, weight in before.items():
        assert torch.equal(after[name], weight.to(getattr(torch, dtype)))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    ids = tokenizer("1+2=", return_tensors="pt")["input_ids"]
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, min_new_tokens=5, do_sample=False)
    assert made.shape == (1, 9)
    assert made[0, :4].tolist() == ids[0].tolist()


def test_an_empty_folder_is_filled(tiny_model_dir, tmp_path):
    (tmp_path / "out").mkdir()
    export_model(tiny_model_dir, tmp_path / "out", "float32")
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_folder_with_something_in_it_is_left_alone(tiny_model_dir, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty; choose another folder"):
        export_model(tiny_model_dir, tmp_path, "float32")
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_an_unknown_dtype_is_refused(tiny_model_dir, tmp_path):
    with pytest.raises(ConfigError, match="--dtype 'fp8' is unknown; choose float32 or bfloat16"):
        export_model(tiny_model_dir, tmp_path / "out", "fp8")


def test_no_model_to_export(tmp_path):
    with pytest.raises(ModelError, match=r"it has no config\.json"):
        export_model(tmp_path, tmp_path / "out", "float32")


@pytest.mark.parametrize("missing", ["model.safetensors", "tokenizer.json"])
def test_half_a_model_leaves_nothing_behind(tiny_model_dir, tmp_path, missing):
    source = shutil.copytree(tiny_model_dir, tmp_path / "source")
    (source / missing).unlink()
    with pytest.raises(ModelError) as caught:
        export_model(source, tmp_path / "out", "float32")
    assert repr(str(source)) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_model_info_counts_what_is_there(tiny_model_dir, tiny_model):
    lines = dict(
        line.split(None, 1) for line in model_info(str(tiny_model_dir)).replace("hidden size", "hidden").splitlines()
    )
    assert lines["class"] == "LlamaForCausalLM"
    assert lines["layers"] == "2"
    assert lines["hidden"] == "32"
    assert lines["context"] == "256 tokens"
    assert lines["vocabulary"] == str(tiny_model.config.vocab_size)
    assert lines["parameters"] == "0.0 M"


ODD_GENERATION_CONFIG = {"temperature": 0.7, "top_p": 0.9, "eos_token_id": [0, 2], "note": {"kept": [1]}}


@pytest.fixture
def odd_model_dir(tiny_model_dir, tmp_path):
    """A model whose generation config transformers loads and refuses to save."""
    folder = shutil.copytree(tiny_model_dir, tmp_path / "odd")
    (folder / "generation_config.json").write_text(json.dumps(ODD_GENERATION_CONFIG))
    return folder


def test_a_generation_config_that_transformers_refuses_is_written_as_it_was(odd_model_dir, tmp_path):
    out = export_model(odd_model_dir, tmp_path / "out", "float32")
    found = json.loads((out / "generation_config.json").read_text())
    assert {name: found[name] for name in ODD_GENERATION_CONFIG} == ODD_GENERATION_CONFIG
    assert export_model(out, tmp_path / "again", "float32").is_dir()


def test_a_usual_generation_config_is_written_as_transformers_writes_it(tiny_model_dir, tmp_path):
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(tiny_model_dir).save_pretrained(tmp_path / "theirs")
    out = export_model(tiny_model_dir, tmp_path / "ours", "float32")
    for name in ("config.json", "generation_config.json"):
        assert (out / name).read_text() == (tmp_path / "theirs" / name).read_text()


def test_an_out_that_can_not_be_written_is_one_line(tiny_model_dir, tmp_path):
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "out", Path("/proc/out"), tmp_path / ("x" * 300)):
        with pytest.raises(ConfigError) as caught:
            export_model(tiny_model_dir, out, "float32")
        assert repr(str(out)) in str(caught.value)
        assert "\n" not in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "mine"
