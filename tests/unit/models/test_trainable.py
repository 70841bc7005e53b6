"""What is trained, published and saved of a model."""

import pytest
import torch
from torch import nn

from treadle.models.trainable import FULL
from treadle.models.value import ValueModel


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.router = nn.Linear(3, 2, dtype=torch.bfloat16)
        self.register_buffer("bias", torch.ones(2))
        self.register_buffer("positions", torch.ones(2), persistent=False)


def test_tied_weights_are_one_parameter_and_frozen_ones_are_saved_only():
    model = Tied()
    FULL.freeze(model, lambda name: name.startswith("router"))
    assert list(FULL.trained(model)) == ["embed.weight"]
    assert list(FULL.published(model)) == ["embed.weight", "router.weight", "router.bias"]
    saved = FULL.untrained(model)
    assert sorted(saved) == ["bias", "router.bias", "router.weight"]
    assert saved["router.weight"].dtype == torch.float32


@pytest.mark.parametrize("tied", [True, False])
def test_a_value_model_does_not_train_an_output_layer_of_its_own(tiny_model, tied):
    if not tied:
        tiny_model.lm_head.weight = nn.Parameter(tiny_model.lm_head.weight.detach().clone())
    trained = FULL.trained(ValueModel(tiny_model))
    assert "model.lm_head.weight" not in trained
    assert "model.model.embed_tokens.weight" in trained
    assert {"value_head.weight", "value_head.bias"} <= trained.keys()
