from __future__ import annotations

import doctest
import sys
from pathlib import Path

import pytest

import treadle.registry
from treadle.errors import ConfigError
from treadle.registry import resolve

KNOWN = {"grpo": 1, "gspo": 2, "reinforce": 3}


def test_examples_in_the_docstrings_run() -> None:
    assert doctest.testmod(treadle.registry).failed == 0


def test_a_registered_name_wins() -> None:
    assert resolve("advantage", "gspo", KNOWN) == 2


def test_an_object_of_a_file_is_imported_once(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Score:\n    value: int = 4\n\nclass Outer:\n    inner = Score()\n"
    )
    score = resolve("reward", f"{file}:Score", {})
    assert score().value == 4
    assert resolve("reward", f"{file}:Score", {}) is score
    assert resolve("reward", f"{file}:Outer.inner", {}) == score()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("grpoo", "unknown advantage 'grpoo'; did you mean 'grpo'?"),
        ("zzz", r"\(known: grpo, gspo, reinforce\)"),
        ("math:gdc", "math has no 'gdc'; did you mean 'gcd'?"),
        ("no_such_module_here:f", "can't be imported: ModuleNotFoundError"),
        ("no_such_file.py:f", "there is no file 'no_such_file.py'"),
    ],
)
def test_a_wrong_name_is_refused_in_one_line(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolve("advantage", name, KNOWN)
    assert "\n" not in str(caught.value)


def test_a_file_that_raises_is_named_and_not_kept(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("1 / 0\n")
    before = set(sys.modules)
    with pytest.raises(ConfigError, match=r"broken\.py can't be imported: ZeroDivisionError: division by zero"):
        resolve("reward", f"{file}:f", {})
    assert {name for name in set(sys.modules) - before if "broken" in name} == set()


def test_a_module_beside_the_run_is_pointed_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rewards_of_mine.py").write_text("def f(): ...\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"write rewards_of_mine\.py:f"):
        resolve("reward", "rewards_of_mine:f", {})
