"""One input of the fuzzer, and the sound run that inputs are made from by damaging one thing.

A case is a name and a function that writes its files into a folder of its own and returns the words after `treadle`.
Everything random in a case is seeded by its name, so a case is the same in every run.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

Words = list[str]
Make = Callable[[Path, "Bench"], Sequence[str]]

REWARD = "def reward(sample):\n    return float(len(sample.response))\n"


@dataclass(frozen=True)
class Case:
    """One input: `make(folder, bench)` writes its files and returns the command.

    `faulty` inputs must be refused. `deadly` ones are code of the user that ends the process or its output from inside, so
    that no message can be asked for, only an exit code other than 0.
    """

    name: str
    make: Make
    faulty: bool = False
    deadly: bool = False

    @property
    def area(self) -> str:
        return self.name.split("/", 1)[0]


def rng(name: str) -> random.Random:
    """The random numbers of a case: the same ones whenever it is made."""
    return random.Random(name)


@dataclass(frozen=True)
class Bench:
    """The files of a sound tiny run. Read only: a case that damages one copies it first.

    `run_folder` holds a finished run of one rollout with its checkpoint, made by `bench.words("train", …)`.
    """

    model: Path
    data: Path
    run_folder: Path

    @classmethod
    def create(cls, folder: Path, model: Path) -> Bench:
        """Write the data of the tiny run; the caller makes the run itself."""
        data = folder / "data.jsonl"
        rows = [{"input": f"say {letter}", "label": letter} for letter in "abcd"]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return cls(model, data, folder / "run")

    def settings(self) -> dict[str, tuple[str, ...]]:
        """Flags of a run that takes about a second: 1 rollout of 2 × 2 samples of 4 tokens."""
        text = {
            "--hf-checkpoint": str(self.model),
            "--prompt-data": str(self.data),
            "--label-key": "label",
            "--rm-type": "exact",
            "--rollout-batch-size": "2",
            "--n-samples-per-prompt": "2",
            "--rollout-max-response-len": "4",
            "--dtype": "float32",
            "--progress": "off",
            "--num-rollout": "1",
        }
        return {flag: (value,) for flag, value in text.items()} | {"--no-tensorboard": ()}

    def words(
        self, command: str, changes: Mapping[str, Iterable[str] | str | None] = {}, *, recipe: Path | None = None
    ) -> Words:
        """The command of the sound run with some flags changed; None leaves a flag out."""
        given = self.settings()
        for flag, value in changes.items():
            given.pop(flag, None)
            given.pop(f"--no-{flag[2:]}", None)
            if value is not None:
                given[flag] = (value,) if isinstance(value, str) else tuple(value)
        return [
            command,
            *([str(recipe)] if recipe else []),
            *(w for flag, values in given.items() for w in (flag, *values)),
        ]

    def copy_model(self, folder: Path) -> Path:
        """A copy of the tiny model that a case may damage."""
        return Path(shutil.copytree(self.model, folder / "model"))

    def copy_run(self, folder: Path) -> Path:
        """A copy of the finished run that a case may damage."""
        return Path(shutil.copytree(self.run_folder, folder / "finished"))
