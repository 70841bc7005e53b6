"""A miniature is small, and has what its model has."""

import pytest
import torch
import transformers

from treadle.models.architecture import check_architecture
from treadle.models.miniature import CONTEXT, SWITCH, WINDOW, miniature, miniature_model


def test_every_kind_of_layer_and_window_stays():
    config = transformers.Qwen2Config(use_sliding_window=True, sliding_window=4096, max_window_layers=20)
    small = miniature(config)
    assert small.layer_types == ["full_attention"] * 2 + ["sliding_attention"] * 2
    assert (small.num_hidden_layers, small.sliding_window, small.max_position_embeddings) == (4, WINDOW, CONTEXT)
    model = miniature_model(small, "eager")
    assert [layer.self_attn.sliding_window for layer in model.model.layers] == [None, None, WINDOW, WINDOW]
    assert sum(p.numel() for p in model.parameters()) < 200_000
    assert (config.num_hidden_layers, config.sliding_window) == (32, 4096)  # the config itself is left alone


def test_positions_that_switch_do_so_early():
    factors = {"short_factor": [1.0 + i for i in range(48)], "long_factor": [2.0 + i for i in range(48)]}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 4096, **factors}
    small = miniature(transformers.Phi3Config(rope_parameters=rope, max_position_embeddings=131072))
    assert small.rope_parameters["original_max_position_embeddings"] == SWITCH
    assert small.rope_parameters["short_factor"] == [1.0, 7.0, 13.0, 19.0, 25.0, 31.0, 37.0, 43.0]


def test_parts_of_a_composite_config_shrink_too():
    small = miniature(transformers.Gemma3Config())
    assert small.text_config.sliding_window == WINDOW
    assert set(small.text_config.layer_types) == {"full_attention", "sliding_attention"}
    assert small.vision_config.hidden_size == 64


def test_layers_with_other_heads_keep_other_heads():
    model = miniature_model(miniature(transformers.Gemma4TextConfig()), "eager")
    assert {layer.self_attn.head_dim for layer in model.model.layers} == {16, 32}


@pytest.mark.parametrize("heads", [1, 2])
def test_a_model_with_few_heads_is_checked(heads):
    sizes = {"num_attention_heads": heads, "num_key_value_heads": heads, "hidden_size": 32, "pad_token_id": 0}
    check_architecture(transformers.Qwen2Config(**sizes))
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 40}
    factors = {name: [1.0] * (16 // heads) for name in ("short_factor", "long_factor")}
    check_architecture(transformers.Phi3Config(rope_parameters={**rope, **factors}, **sizes))


def test_random_numbers_go_on_as_if_nothing_had_been_built():
    config = transformers.LlamaConfig(num_attention_heads=3, hidden_size=96, head_dim=32)
    before = torch.get_rng_state()
    first, again = (miniature_model(miniature(config), "eager").state_dict() for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert torch.equal(torch.get_rng_state(), before)
