"""Odd numbers in a config.json are refused in one line before a module is built from them."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from treadle.errors import ModelError
from treadle.models.load import load_model
from treadle.models.saving import export_model, model_info


@pytest.fixture
def changed(tiny_model_dir: Path, tmp_path: Path):
    """`changed(num_hidden_layers=0)`: the tiny model with another config.json."""

    def make(**changes) -> str:
        folder = tmp_path / "model"
        shutil.copytree(tiny_model_dir, folder)
        values = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(values | changes))
        return str(folder)

    return make


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 0},
        {"num_hidden_layers": 100_000},
        {"num_hidden_layers": True},
        {"hidden_size": 2**40},
        {"vocab_size": 0},
        {"max_position_embeddings": -5},
        {"text_config": "x"},
        {"num_labels": 2**64},
        {"text_config": -1},
        {"attn_implementation": "nope"},
        {"dtype": 2**64},
    ],
    ids=str,
)
def test_odd_sizes_are_one_line(changed, changes):
    with pytest.raises(ModelError) as caught:
        model_info(changed(**changes))
    assert "\n" not in str(caught.value)


def test_weights_of_other_shapes_are_named(changed, capfd):
    with pytest.raises(
        ModelError, match=r"'model.embed_tokens.weight' has shape \(98, 32\), but .* asks for \(98, 64\)"
    ):
        load_model(changed(hidden_size=64), torch.float32, torch.device("cpu"))
    assert capfd.readouterr().err == ""


def test_a_pipe_among_the_files_is_refused(changed):
    folder = Path(changed())
    (folder / "tokenizer.json").unlink()
    os.mkfifo(folder / "tokenizer.json")
    with pytest.raises(ModelError, match="a pipe or a device"):
        model_info(str(folder))


def test_a_model_without_all_its_weights_is_not_exported(changed, tmp_path):
    with pytest.raises(ModelError, match="lacks 9 of the weights"):
        export_model(Path(changed(num_hidden_layers=3)), tmp_path / "out", "float32")
    assert not (tmp_path / "out").exists()
