"""What every weight transport must do. To try your own, add it to `TRANSPORTS`."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from treadle.errors import EngineError
from treadle.models.attention import PackedAttention
from treadle.models.forward import head_of, hidden_states
from treadle.models.layout import PackedLayout
from treadle.weights import InprocTransport, WeightSpec, WeightTransport, check_specs

Build = Callable[[nn.Module, nn.Module, Callable[[int], None]], WeightTransport]
TRANSPORTS: dict[str, Build] = {"inproc": InprocTransport}

pytestmark = pytest.mark.parametrize("build", TRANSPORTS.values(), ids=TRANSPORTS)
TOKENS = torch.tensor([5, 9, 30, 7, 61])


def logits(model) -> torch.Tensor:
    layout = PackedLayout.of_lengths([len(TOKENS)])
    with torch.no_grad():
        return head_of(model).logits(hidden_states(model, TOKENS, layout.position_ids, PackedAttention(layout)))


def perturb(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape).to(parameter.dtype), alpha=0.1)


def test_after_a_push_the_engine_computes_what_the_trainer_does(build, tiny_model):
    served = copy.deepcopy(tiny_model)
    versions: list[int] = []
    transport = build(tiny_model, served, versions.append)
    assert versions == []
    for version in (1, 2, 7):
        perturb(tiny_model)
        stale = logits(served)
        assert not torch.allclose(stale, logits(tiny_model), atol=1e-3)
        transport.push(version)
        assert torch.equal(logits(served), logits(tiny_model))
        assert versions[-1] == version
    assert versions == [1, 2, 7]


def test_a_push_leaves_the_trainer_alone(build, tiny_model):
    served = copy.deepcopy(tiny_model)
    perturb(tiny_model)
    before = {name: p.detach().clone() for name, p in tiny_model.named_parameters()}
    places = {name: p.data_ptr() for name, p in served.named_parameters()}
    build(tiny_model, served, lambda version: None).push(1)
    for name, parameter in tiny_model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.requires_grad
    assert {name: p.data_ptr() for name, p in served.named_parameters()} == places  # written in place
    perturb(tiny_model)  # the engine's weights are its own
    assert not torch.allclose(logits(served), logits(tiny_model), atol=1e-3)


def test_tied_weights_stay_tied(build, tiny_model):
    served = copy.deepcopy(tiny_model)
    perturb(tiny_model)
    build(tiny_model, served, lambda version: None).push(1)
    assert served.get_output_embeddings().weight is served.get_input_embeddings().weight
    assert torch.equal(served.get_output_embeddings().weight, tiny_model.get_input_embeddings().weight)


def test_shared_memory_is_not_copied(build, tiny_model):
    served = copy.deepcopy(tiny_model)
    for mine, theirs in zip(served.parameters(), tiny_model.parameters(), strict=True):
        mine.data = theirs.data
    written = [p._version for model in (tiny_model, served) for p in model.parameters()]
    versions: list[int] = []
    transport = build(tiny_model, served, versions.append)
    transport.push(4)
    assert [p._version for model in (tiny_model, served) for p in model.parameters()] == written
    assert versions == [4]
    perturb(tiny_model)
    assert torch.equal(logits(served), logits(tiny_model))


def test_the_engine_on_the_trainer_s_own_module(build, tiny_model):
    versions: list[int] = []
    written = {name: p._version for name, p in tiny_model.named_parameters()}
    build(tiny_model, tiny_model, versions.append).push(3)
    assert versions == [3]
    assert {name: p._version for name, p in tiny_model.named_parameters()} == written


class Three(nn.Module):
    def __init__(self, last: str = "c", shape: tuple[int, ...] = (2,), dtype: torch.dtype = torch.float32, fill=0.0):
        super().__init__()
        self.a = nn.Parameter(torch.full((2, 3), fill))
        self.b = nn.Parameter(torch.full((2,), fill))
        if last:
            self.register_parameter(last, nn.Parameter(torch.full(shape, fill, dtype=dtype)))


MISMATCHES = {
    "a weight too many": (Three(fill=1.0), Three(""), "weight 'c' is sent, but the engine has no such weight"),
    "a weight too few": (Three("", fill=1.0), Three(), "the engine's weight 'c' is not sent"),
    "another name": (Three("d", fill=1.0), Three(), "the engine's weight 'c' is not sent"),
    "another shape": (Three(shape=(3,), fill=1.0), Three(), r"weight 'c': .*\(3,\).* is sent, the engine has .*\(2,\)"),
    "a shape that would broadcast": (Three(shape=(1,), fill=1.0), Three(), "weight 'c': .* is sent, the engine has"),
    "another dtype": (
        Three(dtype=torch.bfloat16, fill=1.0),
        Three(),
        "weight 'c': .*bfloat16.* the engine has .*float32",
    ),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_what_differs_is_named_before_anything_moves(build, case):
    trained, served, message = MISMATCHES[case]
    versions: list[int] = []
    with pytest.raises(EngineError, match=message) as caught:
        build(trained, served, versions.append).push(1)
    assert "\n" not in str(caught.value)
    assert versions == []
    assert all((parameter == 0).all() for parameter in served.parameters())


def test_specs_that_agree_pass(build):
    specs = {name: WeightSpec.of(p) for name, p in Three().named_parameters()}
    assert specs["a"] == WeightSpec((2, 3), torch.float32)
    check_specs(specs, dict(reversed(specs.items())))
