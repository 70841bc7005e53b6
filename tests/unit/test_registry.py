from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from treadle.errors import ConfigError
from treadle.registry import resolve, user_code

KNOWN = {"grpo": 1, "gspo": 2, "reinforce": 3}


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
        ("no_such_module_here:f", "can't be imported: it raised ModuleNotFoundError"),
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
    with pytest.raises(
        ConfigError,
        match=r"broken\.py can't be imported: it raised ZeroDivisionError: division by zero \(broken\.py:1\)",
    ):
        resolve("reward", f"{file}:f", {})
    assert {name for name in set(sys.modules) - before if "broken" in name} == set()


def test_a_module_beside_the_run_is_pointed_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rewards_of_mine.py").write_text("def f(): ...\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"write rewards_of_mine\.py:f"):
        resolve("reward", "rewards_of_mine:f", {})


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("import sys; sys.exit(0)", "raised SystemExit: 0"),
        ("import os; os._exit(0)", r"called os\._exit\(0\)"),
        ("from os import _exit; _exit(3)", r"called os\._exit\(3\)"),
        ("raise KeyboardInterrupt", "raised KeyboardInterrupt"),
        ("raise GeneratorExit", "raised GeneratorExit"),
        ("class E(Exception):\n    def __str__(self):\n        raise ValueError\nraise E", "raised E"),
        ("def f(:", r"raised SyntaxError: .* \(ends\.py:1\)"),
    ],
)
def test_a_module_that_ends_the_process_is_named(tmp_path: Path, line: str, what: str) -> None:
    file = tmp_path / "ends.py"
    file.write_text(f"{line}\nf = 1\n")
    with pytest.raises(ConfigError, match=f"ends.py can't be imported: it {what}") as caught:
        resolve("reward", f"{file}:f", {})
    assert "\n" not in str(caught.value)


def test_what_an_object_of_a_module_raises_when_it_is_read_is_told(tmp_path: Path) -> None:
    file = tmp_path / "lazy.py"
    file.write_text("import sys\ndef __getattr__(name):\n    sys.exit(0)\n")
    with pytest.raises(ConfigError, match=r"can't be read: it raised SystemExit: 0 \(lazy.py:3\)"):
        resolve("reward", f"{file}:f", {})


def test_a_ctrl_c_while_a_module_is_imported_is_the_users(tmp_path: Path) -> None:
    file = tmp_path / "slow.py"
    file.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nf = 1\n")
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        resolve("reward", f"{file}:f", {})
    assert signal.getsignal(signal.SIGINT) is before


def test_a_forked_child_of_a_users_code_may_end_itself() -> None:
    with user_code(ValueError):
        pid = os.fork()
        if pid == 0:
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


@pytest.mark.parametrize("inside", ["pass", "treadle.registry.end_process(5)"])
def test_the_run_itself_can_end_the_process(inside: str) -> None:
    program = f"""
import os, treadle.registry
with treadle.registry.user_code(ValueError):
    {inside}
os._exit(5)
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 5


def test_a_file_may_import_its_neighbour_but_not_hide_a_module_of_python(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_mine.py").write_text("value = 5\n")
    (tmp_path / "colorsys.py").write_text("rgb_to_yiq = None\n")
    file = tmp_path / "asks.py"
    file.write_text("import colorsys\nimport neighbour_of_mine\nf = neighbour_of_mine.value, colorsys.rgb_to_yiq\n")
    before = list(sys.path)
    try:
        value, function = resolve("reward", f"{file}:f", {})
    finally:
        sys.path[:] = before
        sys.modules.pop("neighbour_of_mine", None)
    assert value == 5
    assert callable(function)
