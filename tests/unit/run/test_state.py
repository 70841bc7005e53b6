"""The global random generators go through JSON and come back exactly."""

import json
import random

import numpy as np
import pytest
import torch

from treadle.errors import CheckpointError
from treadle.run.state import random_state, seed_everything, set_random_state


def draw():
    """A few numbers of every kind from each generator."""
    return (
        torch.rand(3).tolist() + torch.randn(3).tolist(),
        np.random.rand(3).tolist() + np.random.standard_normal(3).tolist() + [int(np.random.randint(1 << 30))],
        [random.random(), random.gauss(0, 1), random.getrandbits(80)],
    )


def test_drawing_goes_on_where_it_was_saved():
    seed_everything(11)
    draw()
    state = random_state()
    assert state["numpy"][3] == 1, "numpy keeps the second of a pair of normals"
    assert state["python"][2] is not None, "and so does Python"
    text = json.dumps(random_state(), allow_nan=False)
    want = draw()
    for again in range(2):
        seed_everything(again)
        set_random_state(json.loads(text))
        assert draw() == want
    assert draw() != want


def test_saving_draws_nothing():
    seed_everything(5)
    want = draw()
    seed_everything(5)
    assert random_state() == random_state()
    assert draw() == want


def test_a_seed_decides_everything():
    seed_everything(1)
    one = draw()
    seed_everything(2)
    other = draw()
    seed_everything(1)
    assert draw() == one
    assert all(a != b for a, b in zip(one, other, strict=True))


def test_a_seed_may_be_larger_than_numpys():
    seed_everything(2**32 + 1)
    large = draw()
    seed_everything(1)
    small = draw()
    assert large[1] == small[1]  # numpy takes the low 32 bits
    assert large[2] != small[2]


@pytest.mark.parametrize(
    "change",
    [
        {"torch": None},
        {"torch": "AAAA"},
        {"torch": "no base64!"},
        {"numpy": 3},
        {"numpy": ["MT19937", [1], 0, 0, 0.0]},
        {"numpy": ["MT19937", [-1] * 624, 0, 0, 0.0]},
        {"python": [3, [], None]},
        {"python": [3, ["x"] * 625, None]},
        {"python": {}},
    ],
)
def test_a_state_of_another_shape_is_damage(change):
    with pytest.raises(CheckpointError, match="random generators is damaged"):
        set_random_state({**random_state(), **change})
