"""What tests of several transports share: an engine's weights, and how they and the trainer's are compared and changed."""

import pytest
import torch

from treadle.weights import ServedWeights


@pytest.fixture(scope="session")
def served_like():
    """`served_like(weights)`: an engine's weights of the same names and shapes, all zero."""

    def make(weights) -> ServedWeights:
        return ServedWeights({name: torch.zeros_like(t) for name, t in weights.items()}, lambda version: None)

    return make


@pytest.fixture(scope="session")
def assert_same():
    """`assert_same(served, weights)`: the engine has these weights, whole."""

    def check(served: ServedWeights, weights) -> None:
        assert served.torn is None
        assert all(torch.equal(served.tensors[name], weight) for name, weight in weights.items())

    return check


@pytest.fixture(scope="session")
def change():
    """`change(weights)`: some numbers of the weights a and c become others."""

    def apply(weights) -> None:
        weights["a"][3] += 1.5
        weights["c"][::3] *= -2

    return apply
