"""Thousands of malformed inputs: none may end in a traceback, hang, or be taken for sound.

A sample of the cases runs with all other tests; all of them, in parts that each take a few minutes, with `-m long`.
`python -m tests.fuzz.runner MODEL --area flags` runs them by hand.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.case import Case
from tests.fuzz.runner import AREAS, Runner, all_cases

SAMPLE = 36
PART = 150
CASES = all_cases()
PARTS = [CASES[start : start + PART] for start in range(0, len(CASES), PART)]


@pytest.fixture(scope="module")
def runner(tiny_model_dir: Path) -> Iterator[Runner]:
    with Runner(tiny_model_dir) as found:
        yield found


def check(runner: Runner, cases: list[Case]) -> None:
    failures = [str(failure) for failure in runner.failures(cases)]
    assert not failures, f"{len(failures)} of {len(cases)} inputs failed\n\n" + "\n\n".join(failures)


def test_there_are_enough_cases_and_each_has_its_name():
    assert len(CASES) >= 1500
    assert len({case.name for case in CASES}) == len(CASES)
    assert {case.area for case in CASES} == AREAS.keys()


def test_a_case_is_the_same_whenever_it_is_made(tmp_path: Path, runner: Runner):
    for case in CASES[:: len(CASES) // 20]:
        made = []
        for _ in range(2):
            folder = tmp_path / "case"
            folder.mkdir()
            words = case.make(folder, runner.bench)
            made.append((list(words), sorted(path.name for path in folder.rglob("*"))))
            shutil.rmtree(folder)
        assert made[0] == made[1]


@pytest.mark.slow
def test_a_sample_of_inputs(runner: Runner):
    check(runner, CASES[len(CASES) // SAMPLE // 2 :: len(CASES) // SAMPLE][:SAMPLE])


@pytest.mark.long
@pytest.mark.parametrize("part", range(len(PARTS)))
def test_all_inputs(runner: Runner, part: int):
    check(runner, PARTS[part])
