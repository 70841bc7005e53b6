"""Values as JSON types, and how deep they may be nested."""

import numpy as np
import pytest

from treadle.plain_json import MAX_DEPTH, is_too_deep, plain_json


def test_what_json_can_hold() -> None:
    value = {1: (1, {3, 2}), "a": np.array([[1.5]]), "b": np.int64(3), "c": complex(1, 2), "d": None}
    assert plain_json(value) == {"1": [1, [2, 3]], "a": [[1.5]], "b": 3, "c": "(1+2j)", "d": None}


def test_values_that_are_nested_too_deep():
    value = []
    for _ in range(MAX_DEPTH - 1):
        value = [value]
    assert not is_too_deep(value)
    assert plain_json(value) == value
    value = [[value]]
    assert is_too_deep(value)
    with pytest.raises(ValueError, match="nested more than 100 deep"):
        plain_json(value)
