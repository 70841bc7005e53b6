"""Tokens chosen by entropy, by hand."""

import pytest
import torch

from treadle.algorithms.corrections import top_entropy_mask
from treadle.errors import ConfigError

ENTROPY = torch.tensor([0.3, 2.0, 0.0, 1.0, 1.0, 5.0])
MASK = torch.tensor([True, True, True, True, True, False])


def test_the_highest_of_the_trained_tokens_are_kept():
    # five trained tokens: 2.0, then two of 1.0, then 0.3, 0.0; the 5.0 is not trained
    assert top_entropy_mask(ENTROPY, 0.2, MASK).tolist() == [False, True, False, False, False, False]
    assert top_entropy_mask(ENTROPY, 0.4, MASK).tolist() == [
        False,
        True,
        False,
        True,
        True,
        False,
    ]  # a tie stays together
    assert top_entropy_mask(ENTROPY, 1.0, MASK).tolist() == MASK.tolist()
    assert top_entropy_mask(ENTROPY, 0.001, MASK).sum() == 1


def test_order_does_not_matter_and_nothing_is_fine():
    order = torch.tensor([4, 2, 5, 0, 3, 1])
    assert torch.equal(top_entropy_mask(ENTROPY, 0.5, MASK)[order], top_entropy_mask(ENTROPY[order], 0.5, MASK[order]))
    assert top_entropy_mask(torch.zeros(0), 0.5).tolist() == []
    assert not top_entropy_mask(ENTROPY, 0.5, torch.zeros(6, dtype=torch.bool)).any()


@pytest.mark.parametrize("fraction", [0.0, -1.0, 1.5])
def test_a_fraction_is_a_fraction(fraction):
    with pytest.raises(ConfigError, match="top_entropy_fraction"):
        top_entropy_mask(ENTROPY, fraction)
