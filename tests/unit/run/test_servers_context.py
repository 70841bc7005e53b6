"""The context that a server is started with."""

import json
import shutil

import pytest

from treadle.errors import ConfigError
from treadle.run.servers import arguments_for


@pytest.fixture
def long_rope_dir(tiny_model_dir, tmp_path):
    folder = shutil.copytree(tiny_model_dir, tmp_path / "long")
    config = json.loads((folder / "config.json").read_text())
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, **factors}
    (folder / "config.json").write_text(json.dumps({**config, "rope_parameters": rope}))
    return str(folder)


@pytest.mark.parametrize(("engine", "name"), [("vllm", "max_model_len"), ("sglang", "context_length")])
def test_a_model_whose_positions_switch_is_served_up_to_there(make_config, long_rope_dir, tiny_model_dir, engine, name):
    plain = make_config(rollout_engine=engine, **{engine: {"x": "1"}})
    assert arguments_for(plain, long_rope_dir) == {"x": "1", name: "64"}
    assert arguments_for(plain, str(tiny_model_dir)) == {"x": "1"}
    shorter = make_config(rollout_engine=engine, **{engine: {name: "32"}})
    assert arguments_for(shorter, long_rope_dir) == {name: "32"}
    longer = make_config(rollout_engine=engine, **{engine: {name: "128"}})
    with pytest.raises(
        ConfigError, match=r"128 is past the model's context of 64 \(its longrope positions switch beyond"
    ):
        arguments_for(longer, long_rope_dir)
    assert arguments_for(longer, str(tiny_model_dir)) == {name: "128"}
