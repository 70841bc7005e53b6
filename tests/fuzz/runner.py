"""Run cases through a fork server, two at a time, and collect what went wrong.

    python -m tests.fuzz.runner --area flags --every 5

runs every fifth case of an area and prints what failed.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.fork_server import Child, Done, ForkServer
from tests.fuzz import checkpoints, data, flags, models, modules, recipes
from tests.fuzz.case import Bench, Case
from tests.fuzz.verdict import MARK, end_processes, left_behind, problems

AREAS = {
    "flags": flags,
    "recipes": recipes,
    "data": data,
    "models": models,
    "checkpoints": checkpoints,
    "modules": modules,
}
AT_ONCE = 2
SECONDS = 10.0
END_SECONDS = 3.0
TRIES = 3  # a busy machine may make a sound run late once, not three times
ROOM_BYTES = 3 << 30  # what a case may take beside what the server has mapped
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


@dataclass(frozen=True)
class Failure:
    """A case that did not end as it should, with what it printed."""

    case: Case
    what: str
    words: tuple[str, ...]
    done: Done

    def __str__(self) -> str:
        shown = [f"{self.case.name}: {self.what} (code {self.done.code}, {self.done.seconds:.1f} s)"]
        shown += [f"  $ treadle {' '.join(word[:200] for word in self.words)[:1500]!r}"]
        shown += [f"  | {line[:300]}" for line in (self.done.stdout + self.done.stderr).splitlines()[-14:]]
        return "\n".join(shown)


def all_cases() -> list[Case]:
    """Every case of every area, always in the same order."""
    return [case for area in AREAS.values() for case in area.cases()]


@dataclass
class _Running:
    case: Case
    folder: Path
    words: tuple[str, ...]
    child: Child
    tries: int
    began: float


class Runner:
    """A fork server, a sound run, and folders for cases; use it as a context manager."""

    def __init__(self, model: Path):
        self._files = tempfile.TemporaryDirectory(prefix="treadle-fuzz-")
        self._root = Path(self._files.name)
        os.environ.update(ENVIRONMENT)
        self._server = ForkServer()
        self.bench = Bench.create(self._root, model)
        self._number = 0

    def __enter__(self) -> Runner:
        self._server.__enter__()
        words = self.bench.words("train", {"--run-dir": str(self.bench.run_folder), "--save-interval": "1"})
        done = self._server.run(words, cwd=self._root, timeout=120)
        assert done.code == 0, done.stderr
        return self

    def __exit__(self, *error: object) -> None:
        self._server.__exit__(*error)
        self._files.cleanup()

    def failures(self, cases: Iterable[Case]) -> Iterator[Failure]:
        """Run all cases; what failed, in the order in which it ended."""
        waiting = iter(cases)
        running: list[_Running] = []
        while True:
            while len(running) < AT_ONCE and (case := next(waiting, None)) is not None:
                running.append(self._start(case, 1))
            if not running:
                return
            for item in list(running):
                late = time.monotonic() - item.began > SECONDS * _slowness()
                if not late and item.child.returncode is None:
                    continue
                done = item.child.finish(0)
                running.remove(item)
                if done.code is None and item.tries < TRIES:
                    self._clean(item)
                    running.append(self._start(item.case, item.tries + 1))
                    continue
                yield from self._judge(item, done)
            time.sleep(0.01)

    def _start(self, case: Case, tries: int) -> _Running:
        self._number += 1
        folder = self._root / f"case-{self._number}"
        folder.mkdir()
        words = tuple(case.make(folder, self.bench))
        child = self._server.start(words, cwd=folder, env={MARK: _mark(folder)})
        _limit(child.pid)
        return _Running(case, folder, words, child, tries, time.monotonic())

    def _judge(self, item: _Running, done: Done) -> Iterator[Failure]:
        found = list(problems(item.case, done))
        if left := self._clean(item):
            found.append(f"{left} processes left behind")
        if found:
            yield Failure(item.case, "; ".join(found), item.words, done)

    def _clean(self, item: _Running) -> int:
        """Remove what a case left; the number of processes among it."""
        mark = _mark(item.folder)
        deadline = time.monotonic() + END_SECONDS
        while (left := left_behind(mark, item.child.pid)) and time.monotonic() < deadline:
            time.sleep(0.1)  # one that saw its parent end needs a moment to follow
        end_processes(left)
        shutil.rmtree(item.folder, ignore_errors=True)
        return len(left)


def _mark(folder: Path) -> str:
    """A name for a case that no other run of the fuzzer on this machine uses: the folders of a run lie in its own."""
    return f"{folder.parent.name}/{folder.name}"


def _slowness() -> float:
    """How many times longer work takes here than alone: two cases keep two cores busy, more load is of others."""
    return max(1.0, os.getloadavg()[0] / max(AT_ONCE, os.cpu_count() or 1))


def _limit(pid: int) -> None:
    """Bound the memory of a case, so that one that asks for all of it harms no other."""
    try:
        mapped = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
        resource.prlimit(pid, resource.RLIMIT_AS, (mapped + ROOM_BYTES, mapped + ROOM_BYTES))
        resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
    except (OSError, IndexError, ValueError):
        return  # it has ended already


def main() -> int:
    """Run the cases that were asked for; the exit code is 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="folder of a tiny model")
    parser.add_argument("--area", choices=AREAS)
    parser.add_argument("--match", default="", help="only cases whose name contains this")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--offset", type=int, default=0)
    given = parser.parse_args()
    cases = [c for c in all_cases() if given.area in (None, c.area) and given.match in c.name]
    cases = cases[given.offset :: given.every]
    began = time.monotonic()
    kinds: Counter[str] = Counter()
    with Runner(given.model.resolve()) as runner:
        print(f"{len(cases)} cases; ready after {time.monotonic() - began:.1f} s", flush=True)
        began = time.monotonic()

        def counted() -> Iterator[Case]:
            for number, case in enumerate(cases):
                if number % 100 == 0:
                    print(f"-- {number} after {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
                yield case

        for failure in runner.failures(counted()):
            print(failure, flush=True)
            kinds[failure.case.area] += 1
    print(f"{sum(kinds.values())} of {len(cases)} failed {dict(kinds)} in {time.monotonic() - began:.1f} s")
    return 1 if kinds else 0


if __name__ == "__main__":
    sys.exit(main())
