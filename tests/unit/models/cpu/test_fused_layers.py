"""Fused attention projections and MLP against the modules they replace."""

import pytest
import torch

from treadle.models.attention import PackedAttention
from treadle.models.cpu.fused_layers import (
    FusedAttention,
    FusedMLP,
    _GatedMLP,
    _Rotation,
    _StackedLinear,
    fuse_layers,
    signed_halves,
)
from treadle.models.forward import head_of, hidden_states
from treadle.models.layout import Family, PackedLayout
from treadle.models.load import load_model

FUSED = ["llama", "llama, a key head for each query head, biases", "qwen2", "qwen3", "mistral, sliding window"]
LEFT = ["gemma2, soft caps", "gpt2", "granite, scaled logits", "cohere, scaled logits", "mixtral"]
ROW = PackedLayout((Family(5, (3, 7)), Family(0, (6,)), Family(9, ()), Family(2, (0, 1))))
TOKENS = torch.randint(3, 90, (ROW.num_tokens,), generator=torch.Generator().manual_seed(1))


def load(folder, *, fused, dtype=torch.float32):
    return load_model(str(folder), dtype, torch.device("cpu"), fused=fused)


def logits_and_gradients(model):
    hidden = hidden_states(model, TOKENS, ROW.position_ids, PackedAttention(ROW))
    logits = head_of(model).logits(hidden).float()
    toward = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    (logits * toward).sum().backward()
    return logits.detach(), {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", FUSED)
def test_logits_and_gradients_are_the_modules_own(make_folder, name):
    folder = make_folder(name)
    plain, fused = load(folder, fused=False), load(folder, fused=True)
    assert isinstance(fused.base_model.layers[0].self_attn, FusedAttention)
    assert [n for n, _ in fused.named_parameters()] == [n for n, _ in plain.named_parameters()]
    wanted, found = logits_and_gradients(plain), logits_and_gradients(fused)
    torch.testing.assert_close(found[0], wanted[0], atol=2e-5, rtol=2e-5)
    assert found[1].keys() == wanted[1].keys()
    for key, gradient in wanted[1].items():
        torch.testing.assert_close(found[1][key], gradient, atol=2e-4, rtol=2e-4, msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.parametrize("name", FUSED)
def test_bfloat16_is_no_further_from_exact_than_the_modules_own(make_folder, name):
    folder = make_folder(name)
    exact = logits_and_gradients(load(folder, fused=False))
    gaps = []
    for fused in (False, True):
        found = logits_and_gradients(load(folder, fused=fused, dtype=torch.bfloat16))
        gap = sum(float((found[1][key] - gradient).square().sum()) for key, gradient in exact[1].items())
        gaps.append((float((found[0] - exact[0]).square().sum()), gap))
    assert gaps[1][0] <= 1.5 * gaps[0][0]
    assert gaps[1][1] <= 1.5 * gaps[0][1]


@pytest.mark.parametrize("name", LEFT)
def test_another_architecture_is_left_alone(make_folder, name):
    model = load(make_folder(name), fused=True)
    assert not any(isinstance(module, FusedAttention | FusedMLP) for module in model.modules())
    assert fuse_layers(model) == 0


def test_another_call_than_ours_goes_to_the_module_itself(make_folder):
    """Without a plan (transformers' own `generate`, say) attention is as transformers has it."""
    folder = make_folder("llama")
    plain, fused = load(folder, fused=False), load(folder, fused=True)
    for model in (plain, fused):
        model.set_attn_implementation("eager")
    torch.testing.assert_close(fused(TOKENS[None]).logits, plain(TOKENS[None]).logits, atol=1e-5, rtol=1e-5)


def test_gradients_by_finite_differences():
    draw = torch.Generator().manual_seed(0)

    def numbers(*shape):
        return torch.randn(shape, generator=draw, dtype=torch.float64, requires_grad=True)

    x = numbers(5, 3)
    assert torch.autograd.gradcheck(_GatedMLP.apply, (x, numbers(4, 3), numbers(4, 3), numbers(3, 4)))
    layers = numbers(2, 3), numbers(4, 3), numbers(2), numbers(4)
    assert torch.autograd.gradcheck(lambda x, *rest: _StackedLinear.apply(x, 2, *rest), (x, *layers))
    assert torch.autograd.gradcheck(lambda x, *rest: _StackedLinear.apply(x, 2, *rest), (x, *layers[:2]))
    cos, sin = (numbers(1, 5, 2).detach().repeat(1, 1, 2) for _ in range(2))  # both halves alike, as angles are
    cos, sin = signed_halves(cos, sin)
    assert torch.autograd.gradcheck(lambda heads: _Rotation.apply(heads, cos, sin), (numbers(5, 2, 4),))


def test_no_tokens_at_all():
    weights = [torch.ones(shape, requires_grad=True) for shape in ((4, 3), (4, 3), (3, 4))]
    nothing = torch.zeros(0, 3, requires_grad=True)
    out = _GatedMLP.apply(nothing, *weights)
    out.sum().backward()
    assert out.shape == nothing.grad.shape == (0, 3)
    assert all(w.grad.count_nonzero() == 0 for w in weights)
    angles = torch.zeros(0, 1, 2)
    assert _Rotation.apply(torch.zeros(0, 2, 2), angles, angles).shape == (0, 2, 2)
