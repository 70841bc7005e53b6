"""The examples in docstrings run and give what they show."""

import doctest
import importlib
from pathlib import Path

import pytest

import treadle

SOURCE = Path(treadle.__file__).parent
FILES = sorted(path.relative_to(SOURCE) for path in SOURCE.rglob("*.py") if ">>> " in path.read_text())


def test_there_are_examples():
    assert len(FILES) > 20


@pytest.mark.parametrize("path", FILES, ids=str)
def test_the_examples_of_a_module_run(path):
    module = importlib.import_module(".".join(("treadle", *path.with_suffix("").parts)).removesuffix(".__init__"))
    done = doctest.testmod(module)
    assert done.attempted > 0
    assert done.failed == 0
