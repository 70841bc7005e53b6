"""A model folder that brings code along: it is never run, and nobody is asked whether it may be."""

import io
import json
import shutil
import sys

import pytest
import torch

from treadle.chat import load_codec
from treadle.cli import main
from treadle.errors import ModelError
from treadle.models.load import empty_model, load_model, load_parameters
from treadle.models.model_config import load_config
from treadle.models.saving import export_model

REFUSED = "code from its own folder"


@pytest.fixture
def make_folder(tiny_model_dir, tmp_path, monkeypatch):
    """`make_folder(model_type=…)`: a model folder whose code leaves the file `ran`; stdin says yes to everything."""
    marker = tmp_path / "ran"
    code = f"open({str(marker)!r}, 'w').close()\nclass Own: pass\nOwnModel = OwnTokenizer = Own\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 20))

    def make(model_type="own", tokenizer=False):
        folder = shutil.copytree(tiny_model_dir, tmp_path / "model")
        config = json.loads((folder / "config.json").read_text())
        config["model_type"] = model_type
        config["auto_map"] = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.OwnModel"}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "own.py").write_text(code)
        if tokenizer:
            found = json.loads((folder / "tokenizer_config.json").read_text())
            found |= {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}
            (folder / "tokenizer_config.json").write_text(json.dumps(found))
        return folder

    yield make
    assert not marker.exists(), "the folder's code ran"
    assert sys.stdin.read() == "y\n" * 20, "an answer was read from stdin"


@pytest.mark.parametrize("command", [("model", "info"), ("plan", "--hf-checkpoint"), ("train", "--hf-checkpoint")])
def test_a_command_refuses_it_in_one_line(make_folder, tmp_path, monkeypatch, capsys, command):
    (tmp_path / "a.jsonl").write_text('{"prompt": "1", "label": "1"}\n')
    monkeypatch.chdir(tmp_path)
    run = (
        "--prompt-data",
        str(tmp_path / "a.jsonl"),
        "--rm-type",
        "exact",
        "--label-key",
        "label",
        "--num-rollout",
        "1",
    )
    code = main([*command, str(make_folder()), *(run if command[0] != "model" else ())])
    err = capsys.readouterr().err
    assert (code, err.count("\n")) == (2, 1)
    assert REFUSED in err


def test_every_loader_refuses_it(make_folder, tmp_path):
    folder = make_folder()
    for load in (
        lambda: load_config(str(folder)),
        lambda: load_model(str(folder), torch.float32, torch.device("cpu")),
        lambda: empty_model(str(folder), torch.float32),
        lambda: load_parameters(folder),
        lambda: export_model(folder, tmp_path / "out", "float32"),
    ):
        with pytest.raises(ModelError, match=REFUSED):
            load()


def test_a_tokenizer_with_code_is_not_run(make_folder):
    folder = make_folder("llama", tokenizer=True)
    with pytest.raises(ModelError, match=REFUSED):
        load_codec(str(folder))


def test_a_known_architecture_loads_without_the_code_beside_it(make_folder, tiny_model):
    loaded = load_model(str(make_folder("llama")), torch.float32, torch.device("cpu"))
    assert type(loaded).__name__ == "LlamaForCausalLM"
