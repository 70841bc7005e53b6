"""Where a model's context ends, and that everything is exact up to there."""

import pytest
import torch
import transformers

from treadle.errors import ModelError
from treadle.models.attention import PackedAttention
from treadle.models.forward import head_of, hidden_states
from treadle.models.layout import Family, PackedLayout
from treadle.models.load import load_model
from treadle.models.model_config import check_length, context_length, context_note

CPU = torch.device("cpu")
SWITCH = 20
FACTORS = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [1.0, 4.0, 9.0, 16.0]}
LONG_ROPE = {"rope_type": "longrope", "rope_theta": 100.0, "original_max_position_embeddings": SWITCH, **FACTORS}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}


def sized(long: bool) -> dict:
    if not long:
        return {"rope_parameters": DYNAMIC, "max_position_embeddings": SWITCH}
    return {"rope_parameters": LONG_ROPE, "max_position_embeddings": 80}


@pytest.mark.parametrize("long", [True, False], ids=["longrope", "dynamic"])
def test_a_short_sample_beside_the_longest_is_as_if_alone(make_folder, long):
    folder = make_folder("llama", **sized(long))
    model = load_model(str(folder), torch.float32, CPU)
    own = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert context_length(model.config) == SWITCH
    layout = PackedLayout((Family(9, (3, SWITCH - 9)), Family(0, (4,))))
    tokens = torch.randint(3, 90, (layout.num_tokens,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        hidden = hidden_states(model, tokens, layout.position_ids, PackedAttention(layout))
        logits = head_of(model).logits(hidden)
        for rows in ([*range(12)], [*range(9), *range(12, 12 + SWITCH - 9)], [*range(12 + SWITCH - 9, len(tokens))]):
            torch.testing.assert_close(logits[rows], own(tokens[rows][None]).logits[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("long", [True, False], ids=["longrope", "dynamic"])
def test_a_sample_past_the_switch_is_refused_by_name(make_folder, long):
    model = load_model(str(make_folder("llama", **sized(long))), torch.float32, CPU)
    layout = PackedLayout.of_lengths([3, SWITCH + 1])
    kind, setting = ("longrope", "original_max_position_embeddings") if long else ("dynamic", "max_position_embeddings")
    want = rf"a sample of 21 tokens is longer than the model's context of 20 \(its {kind} positions switch beyond {setting}"
    with pytest.raises(ModelError, match=want):
        hidden_states(model, torch.zeros(24, dtype=int), layout.position_ids, PackedAttention(layout))


def test_positions_that_do_not_switch_have_no_note():
    config = transformers.LlamaConfig(max_position_embeddings=64)
    assert context_length(config) == 64
    assert context_note(config) == ""
    check_length(config, 100)  # long, but the same function of each token at every length
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    assert context_length(transformers.LlamaConfig(max_position_embeddings=64, rope_parameters=yarn)) == 64


def test_the_text_part_of_a_composite_config_counts():
    assert (
        context_length(transformers.Gemma3Config()) == transformers.Gemma3Config().text_config.max_position_embeddings
    )
