import doctest
import importlib
import pkgutil

import pytest

from treadle import algorithms

MODULES = sorted(m.name for m in pkgutil.iter_modules(algorithms.__path__))


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_the_docstrings_run(name):
    module = importlib.import_module(f"treadle.algorithms.{name}")
    assert doctest.testmod(module).failed == 0
