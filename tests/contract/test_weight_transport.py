"""What every weight transport must do, both ends in one process. To try your own, add it to `TRANSPORTS`.

`test_weight_processes.py` holds those between processes to the same with a real second process.
"""

from __future__ import annotations

import copy
import json
import os
import runpy
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

from treadle.errors import EngineError
from treadle.models.attention import PackedAttention
from treadle.models.forward import head_of, hidden_states
from treadle.models.layout import PackedLayout
from treadle.weights import (
    Offer,
    SentWeights,
    ServedWeights,
    WeightReceiver,
    WeightSender,
    WeightSpec,
    check_specs,
)
from treadle.weights.broadcast import BroadcastReceiver
from treadle.weights.disk import DiskReceiver
from treadle.weights.disk_delta import DeltaReceiver
from treadle.weights.in_process import InProcessReceiver, InProcessSender
from treadle.weights.shm import ShmReceiver

make_sender = runpy.run_path(str(Path(__file__).with_name("weight_trainer.py")))["make_sender"]
RECEIVERS: Mapping[str, Callable[[ServedWeights], WeightReceiver]] = {
    "shm": ShmReceiver,
    "disk": DiskReceiver,
    "disk-delta": DeltaReceiver,
    "broadcast": BroadcastReceiver,
}
TRANSPORTS = ("inproc", *RECEIVERS)


Build = Callable[[nn.Module, nn.Module, Callable[[int], None]], "Linked"]


class Linked:
    """Both ends in one process, with the offer as JSON between them."""

    def __init__(self, sender: WeightSender, receiver: WeightReceiver):
        self.sender, self.receiver = sender, receiver

    def push(self, version: int) -> None:
        offer = Offer.from_json(json.loads(json.dumps(self.sender.offer(version).to_json())))
        self.failed: list[Exception] = []

        def deliver() -> None:
            try:
                self.sender.deliver()
            except EngineError as error:
                self.failed.append(error)

        thread = threading.Thread(target=deliver)
        thread.start()
        try:
            self.receiver.receive(offer)
        finally:
            thread.join(30)
        assert not thread.is_alive()
        assert not self.failed

    def close(self) -> None:
        self.receiver.close()
        self.sender.close()


def link_in_process(trained: nn.Module, served: nn.Module, set_version) -> Linked:
    sent = SentWeights(dict(trained.named_parameters()))
    receiver = InProcessReceiver(ServedWeights(dict(served.named_parameters()), set_version))
    return Linked(InProcessSender(sent), receiver)


def link(kind: str, trained: nn.Module, served: nn.Module, set_version, folder: Path, dtype=None) -> Linked:
    sent = SentWeights(dict(trained.named_parameters()), dtype)
    receiver = RECEIVERS[kind](ServedWeights(dict(served.named_parameters()), set_version))
    return Linked(make_sender(kind, sent, folder), receiver)


@pytest.fixture(params=TRANSPORTS)
def build(request, tmp_path) -> Iterator[Build]:
    """`build(trained, served, set_version)`: a transport; closed at the end, and then nothing may be left of it."""
    made: list[Linked] = []

    def make(trained, served, set_version):
        if request.param == "inproc":
            return link_in_process(trained, served, set_version)
        made.append(link(request.param, trained, served, set_version, tmp_path))
        return made[-1]

    yield make
    for transport in made:
        transport.close()
    assert list(tmp_path.iterdir()) == []


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


def test_an_older_version_is_refused_and_a_repeated_one_is_fine(build, tiny_model):
    served = copy.deepcopy(tiny_model)
    versions: list[int] = []
    transport = build(tiny_model, served, versions.append)
    transport.push(5)
    perturb(tiny_model)
    transport.push(5)  # the trainer's weights of now, under the same number
    assert torch.equal(logits(served), logits(tiny_model))
    before = logits(served)
    perturb(tiny_model)
    with pytest.raises(EngineError, match=r"version 4 .*5"):
        transport.push(4)
    assert torch.equal(logits(served), before)
    transport.push(6)
    transport.push(6)
    assert torch.equal(logits(served), logits(tiny_model))
    assert set(versions) == {5, 6}
    assert versions == sorted(versions)


@pytest.mark.parametrize("kind", RECEIVERS)
def test_the_sender_converts_to_the_engine_s_dtype(kind, tiny_model, tmp_path):
    """float32 masters, a bfloat16 engine: what arrives is rounded to nearest even, as `Tensor.bfloat16` does."""
    served = copy.deepcopy(tiny_model).to(torch.bfloat16)
    transport = link(kind, tiny_model, served, lambda version: None, tmp_path, torch.bfloat16)
    for version in (1, 2):
        perturb(tiny_model)
        transport.push(version)
        for name, weight in served.named_parameters():
            assert torch.equal(weight, tiny_model.get_parameter(name).bfloat16()), name
    transport.close()


@pytest.mark.parametrize("kind", RECEIVERS)
def test_no_descriptor_is_leaked(kind, tiny_model, tmp_path):
    def cycle() -> int:
        transport = link(kind, tiny_model, copy.deepcopy(tiny_model), lambda version: None, tmp_path)
        for version in range(5):
            perturb(tiny_model)
            transport.push(version)
        transport.close()
        return len(os.listdir("/proc/self/fd"))

    first = cycle()  # what torch opens once for the whole process
    assert [cycle() for _ in range(3)] == [first] * 3


@pytest.mark.parametrize("kind", RECEIVERS)
def test_a_refusal_of_one_side_leaves_the_next_push_whole(kind, tmp_path):
    """The engine says no before the first byte; the trainer hears of it and nobody waits for the time-out."""
    trained, served = Three(fill=1.0), Three("d")
    transport = link(kind, trained, served, lambda version: None, tmp_path)
    with pytest.raises(EngineError, match="weight 'c' is sent"):
        transport.push(1)
    assert transport.receiver.served.torn is None
    assert [str(error) for error in transport.failed] == (
        ["engine 1 of 1 refused version 1; its own error says why"] if kind == "broadcast" else []
    )
    transport.close()
    transport = link(kind, trained, Three(), lambda version: None, tmp_path)
    transport.push(2)
    assert all((weight == 1).all() for weight in transport.receiver.served.tensors.values())
    transport.close()


def test_an_offer_that_is_none_is_refused_in_one_line():
    good = Offer("shm", 3, {"a": WeightSpec((2, 3), torch.bfloat16)}, {"path": "x"})
    assert Offer.from_json(json.loads(json.dumps(good.to_json()))) == good
    for spoilt in ({}, {**good.to_json(), "weights": [["a", [2], "complex32"]]}, {**good.to_json(), "version": None}):
        with pytest.raises(EngineError, match="no offer of weights") as caught:
            Offer.from_json(spoilt)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", RECEIVERS)
def test_an_offer_of_another_transport_is_refused(kind, tiny_model):
    served = ServedWeights(dict(tiny_model.named_parameters()), lambda version: None)
    with pytest.raises(EngineError, match="'pigeon'"):
        RECEIVERS[kind](served).receive(Offer("pigeon", 1, served.specs, {}))
    with pytest.raises(EngineError) as caught:
        RECEIVERS[kind](served).receive(Offer(kind, 1, served.specs, {}))
    assert "\n" not in str(caught.value)
    assert (served.version, served.torn) == (None, None)


def test_shared_memory_is_not_copied(tiny_model):
    served = copy.deepcopy(tiny_model)
    for mine, theirs in zip(served.parameters(), tiny_model.parameters(), strict=True):
        mine.data = theirs.data
    written = [p._version for model in (tiny_model, served) for p in model.parameters()]
    versions: list[int] = []
    transport = link_in_process(tiny_model, served, versions.append)
    transport.push(4)
    assert [p._version for model in (tiny_model, served) for p in model.parameters()] == written
    assert versions == [4]
    perturb(tiny_model)
    assert torch.equal(logits(served), logits(tiny_model))


def test_the_engine_on_the_trainer_s_own_module(tiny_model):
    versions: list[int] = []
    written = {name: p._version for name, p in tiny_model.named_parameters()}
    link_in_process(tiny_model, tiny_model, versions.append).push(3)
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


def test_specs_that_agree_pass():
    specs = {name: WeightSpec.of(p) for name, p in Three().named_parameters()}
    assert specs["a"] == WeightSpec((2, 3), torch.float32)
    check_specs(specs, dict(reversed(specs.items())))
