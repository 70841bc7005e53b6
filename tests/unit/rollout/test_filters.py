"""Group filters of the user's own: whatever they do wrong is one line that names them."""

from __future__ import annotations

from pathlib import Path

import pytest

from treadle.errors import ConfigError
from treadle.rollout.filters import any_failed, load_filter, zero_signal

FILTERS = """
import os, sys

def short(group):
    return "too easy"

def raises(group):
    return 1 / 0

def exits(group):
    sys.exit(0)

def ends(group):
    os._exit(0)

def number(group):
    return 1.5

def slash(group):
    return "a/b"

def long(group):
    return "x" * 5000

def lines(group):
    return "a" + chr(10) + "b"

class Odd:
    def __repr__(self):
        raise SystemExit(0)

def odd(group):
    return Odd()

value = 3
"""


@pytest.fixture
def own(tmp_path: Path):
    file = tmp_path / "own.py"
    file.write_text(FILTERS)
    return lambda name: f"{file}:{name}"


def test_named_filters_are_what_they_are() -> None:
    assert load_filter("zero_signal") is zero_signal
    assert load_filter("any_failed") is any_failed


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("raises", r"raised ZeroDivisionError: division by zero \(own.py:8\)"),
        ("exits", "raised SystemExit: 0"),
        ("ends", r"called os\._exit\(0\)"),
        ("number", "returned 1.5"),
        ("slash", "returned 'a/b'"),
        ("long", "returned 'xxx"),
        ("lines", r"returned 'a\\nb'"),
        ("odd", "raised SystemExit: 0"),
    ],
)
def test_a_filter_that_goes_wrong_is_named(own, make_groups, name: str, what: str) -> None:
    (group,) = make_groups((2,))
    with pytest.raises(ConfigError, match=rf"group filter '.*own.py:{name}' {what}") as caught:
        load_filter(own(name))(group)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_filter_that_keeps_the_contract(own, make_groups) -> None:
    (group,) = make_groups((2,))
    assert load_filter(own("short"))(group) == "too easy"
    with pytest.raises(ConfigError, match="is no function of a group"):
        load_filter(own("value"))
