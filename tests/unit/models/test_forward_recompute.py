"""Gradient checkpointing changes memory, and nothing else."""

import copy

import pytest
import torch

from treadle.errors import ModelError
from treadle.models.attention import PackedAttention
from treadle.models.forward import head_of, hidden_states, recompute_layers
from treadle.models.layout import Family, PackedLayout
from treadle.models.load import load_model

LAYOUT = PackedLayout((Family(5, (3, 7)), Family(0, (6,))))
NOISY = {
    "mixtral": {"router_jitter_noise": 0.5},
    "phimoe": {"router_jitter_noise": 0.3, "input_jitter_noise": 0.3},
    "llama": {},
    "opt": {"dropout": 0.5, "layerdrop": 0.9},
}


def gradients(model) -> dict[str, torch.Tensor]:
    tokens = torch.randint(3, 90, (LAYOUT.num_tokens,), generator=torch.Generator().manual_seed(1))
    hidden = hidden_states(model, tokens, LAYOUT.position_ids, PackedAttention(LAYOUT))
    loss = torch.logsumexp(head_of(model).logits(hidden), -1).sum()
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, materialize_grads=True)
    return {"loss": loss.detach(), **dict(zip(names, found, strict=True))}


@pytest.mark.parametrize("name", NOISY)
def test_recomputed_gradients_are_those_of_eval_mode_bit_for_bit(make_folder, name):
    model = load_model(str(make_folder(name, **NOISY[name])), torch.float32, torch.device("cpu"))
    plain = gradients(copy.deepcopy(model))
    recompute_layers(model)
    calls, before = [], torch.get_rng_state()
    layers = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    layers[0].register_forward_pre_hook(lambda *_: calls.append(1))
    for _ in range(2):
        found = gradients(model)
        assert all(torch.equal(found[key], plain[key]) for key in plain)
    assert len(calls) == 4  # forward and again in backward, twice
    assert torch.equal(torch.get_rng_state(), before)
    calls.clear()
    with torch.no_grad():
        model.base_model(torch.tensor([[3, 4]]), treadle_plan=PackedAttention(PackedLayout.of_lengths([2])))
    assert len(calls) == 1


def test_a_model_without_layers_that_recompute_is_refused_in_one_line():
    with pytest.raises(
        ModelError, match=r"^Linear has no layers that can recompute .* remove --gradient-checkpointing$"
    ):
        recompute_layers(torch.nn.Linear(2, 2))
