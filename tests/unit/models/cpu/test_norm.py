"""Our RMSNorm against the one written out, and which norms of a model are replaced by it."""

import pytest
import torch

from treadle.models.cpu.norm import FusedRMSNorm, _RMSNorm, fuse_norms
from treadle.models.load import load_model

REPLACED = {"llama": 5, "qwen2": 5, "qwen3": 9, "mistral, sliding window": 5, "granite, scaled logits": 5, "mixtral": 5}
LEFT = ["gemma2, soft caps", "gpt2", "opt", "gpt-neox", "phi, biased head", "cohere, scaled logits"]


def written_out(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def test_a_norm_by_hand():
    norm = FusedRMSNorm(torch.nn.Parameter(torch.tensor([1.0, 2.0])), eps=0.5)
    # mean of squares 12.5 + 0.5 = 13
    assert norm(torch.tensor([[3.0, 4.0]]))[0].tolist() == pytest.approx([3 / 13**0.5, 8 / 13**0.5])


def test_gradients_are_those_of_the_formula():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 5, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(5, dtype=torch.float64, generator=generator))
    norm = FusedRMSNorm(weight, 0.1)
    torch.testing.assert_close(norm(x), written_out(x, weight, 0.1))
    assert torch.autograd.gradcheck(lambda a, b: _RMSNorm.apply(a, b, 0.1), (x, weight))


def test_bfloat16_is_rounded_once():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 64, generator=generator).bfloat16()
    weight = torch.nn.Parameter(torch.rand(64, generator=generator).bfloat16())
    exact = written_out(x.float(), weight.float(), 1e-5)
    torch.testing.assert_close(FusedRMSNorm(weight, 1e-5)(x), exact.bfloat16(), rtol=0, atol=0)


def test_inputs_are_left_alone():
    x = torch.randn(3, 8, requires_grad=True)
    weight = torch.nn.Parameter(torch.rand(8))
    grad = torch.randn(3, 8)
    before = [t.detach().clone() for t in (x, weight, grad)]
    FusedRMSNorm(weight, 1e-5)(x).backward(grad)
    for tensor, was in zip((x, weight, grad), before, strict=True):
        assert torch.equal(tensor, was)


@pytest.mark.parametrize("name", REPLACED)
def test_norms_of_known_models_are_replaced_and_keep_their_parameters(make_folder, name):
    folder = str(make_folder(name))
    plain = load_model(folder, torch.float32, torch.device("cpu"), fused=False)
    names = [key for key, _ in plain.named_parameters()]
    parameters = [id(p) for p in plain.parameters()]
    assert fuse_norms(plain) == REPLACED[name]
    assert [key for key, _ in plain.named_parameters()] == names
    assert [id(p) for p in plain.parameters()] == parameters
    assert fuse_norms(plain) == 0


@pytest.mark.parametrize("name", LEFT)
def test_a_norm_that_computes_something_else_is_left_alone(make_folder, name):
    model = load_model(str(make_folder(name)), torch.float32, torch.device("cpu"), fused=False)
    assert fuse_norms(model) == 0
