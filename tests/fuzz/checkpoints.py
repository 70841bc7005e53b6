"""Checkpoints and run folders damaged in many ways, loaded by `train`, `eval` and `model export`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from tests.fuzz.case import Bench, Case, Words
from tests.fuzz.damage import DAMAGES, JSON_DAMAGES, Damage, flip

FILES = (
    "checkpoints/rollout_000001/manifest.json",
    "checkpoints/rollout_000001/state.json",
    "checkpoints/rollout_000001/config.json",
    "checkpoints/rollout_000001/optimizer.safetensors",
    "checkpoints/rollout_000001/model/model.safetensors",
    "checkpoints/rollout_000001/model/config.json",
    "checkpoints/rollout_000001/model/tokenizer.json",
    "checkpoints/latest",
    "config.json",
    "metrics.jsonl",
    "summary.json",
)
STEP = "checkpoints/rollout_000001"
ODD_VALUES = (None, 0, -1, 1.5, 10**30, "x", "", [], [1], {}, {"a": 1}, True)

LATEST: dict[str, bytes] = {
    "empty": b"",
    "above": b"../x\n",
    "far above": b"../../../../../../etc\n",
    "absolute": b"/etc\n",
    "missing": b"rollout_000009\n",
    "earlier": b"rollout_000000\n",
    "binary": bytes(range(256)),
    "long": b"x" * 100_000,
    "two lines": b"rollout_000001\nrollout_000000\n",
    "blank": b"  \n\n",
    "colour": b"\x1b[31m\n",
    "dot": b".\n",
}

MANIFESTS: dict[str, Any] = {
    "of numbers": {"state.json": 1},
    "of nulls": {"state.json": None},
    "without sizes": {"state.json": {}},
    "sizes of text": {"state.json": {"bytes": "x", "xxh3_128": 1}},
    "far file": {"../../../x": {"bytes": 0, "xxh3_128": ""}},
    "absolute file": {"/dev/zero": {"bytes": 0, "xxh3_128": ""}},
    "long name": {"x" * 5000: {"bytes": 0, "xxh3_128": ""}},
    "nul in a name": {"a\x00b": {"bytes": 0, "xxh3_128": ""}},
    "folder": {"model": {"bytes": 0, "xxh3_128": ""}},
    "empty name": {"": {"bytes": 0, "xxh3_128": ""}},
    "colour": {"\x1b[31m": {"bytes": 0, "xxh3_128": ""}},
}


def cases() -> Iterator[Case]:
    """Every file × every damage, honest manifests over wrong contents, pointers to nowhere, folders of other things."""
    for file in FILES:
        damages = DAMAGES | (JSON_DAMAGES if file.endswith(".json") else {})
        for i, (name, damage) in enumerate(damages.items()):
            yield Case(f"checkpoints/train {file} {name}", partial(_make, "train", file, damage))
            if i % 4 == 0:
                yield Case(f"checkpoints/eval {file} {name}", partial(_make, "eval", file, damage))
                yield Case(f"checkpoints/export {file} {name}", partial(_make, "export", file, damage))
    for number in range(30):
        file = FILES[number % len(FILES)]
        yield Case(
            f"checkpoints/train {file} bytes {number}", partial(_make, "train", file, flip(f"checkpoint {number}", 2))
        )
    for name, content in LATEST.items():
        yield Case(f"checkpoints/train latest {name}", partial(_make, "train", "checkpoints/latest", _write(content)))
    for name, manifest in MANIFESTS.items():
        write = _write(json.dumps(manifest).encode())
        for command in ("train", "export"):
            yield Case(
                f"checkpoints/{command} manifest {name}", partial(_make, command, f"{STEP}/manifest.json", write)
            )
    for key in STATE_KEYS:
        for i, value in enumerate(ODD_VALUES):
            if (i + len(key)) % 3 == 0:
                change = partial(_change_state, key, value)
                yield Case(f"checkpoints/train state {key} = {json.dumps(value)}", partial(_make_state, change))
    for name, damage in JSON_DAMAGES.items():
        yield Case(f"checkpoints/train signed state {name}", partial(_make_signed, "train", "state.json", damage))
    for file in ("optimizer.safetensors", "model/model.safetensors", "model/config.json"):
        for name, damage in DAMAGES.items():
            if name in ("empty", "zeros", "binary", "half", "cut at the end", "longer"):
                yield Case(
                    f"checkpoints/train signed {file} {name}",
                    partial(_make_signed, "train", file, damage),
                    # What is read of a checkpoint to train on are tensors: the config is that of --hf-checkpoint.
                    faulty=name != "longer" and not file.endswith("config.json"),
                )
                yield Case(f"checkpoints/export signed {file} {name}", partial(_make_signed, "export", file, damage))
    for name, write_folder in FOLDERS.items():
        for command in ("train", "eval", "export"):
            starts_over = command == "train" and name in STARTED_OVER
            make = partial(_make_folder, command, write_folder)
            yield Case(f"checkpoints/{command} folder {name}", make, faulty=not starts_over)
    for name, flags in RUN_DIRS.items():
        yield Case(f"checkpoints/train place {name}", partial(_make_place, flags))


STATE_KEYS = ("rollout_id", "random", "source", "dtype", "train", "optimizer", "trainer", "normalizer")


def words_for(command: str, checkpoint: Path, bench: Bench) -> Words:
    """The command that loads this checkpoint, save folder or run folder."""
    if command == "export":
        return ["model", "export", str(checkpoint), "exported"]
    changes: dict[str, Any] = {"--load": str(checkpoint), "--num-rollout": "2", "--save-interval": "1"}
    if command == "eval":
        changes |= {"--eval-prompt-data": f"x={bench.data}"}
    return bench.words(command, changes)


def _make(command: str, file: str, damage: Damage, folder: Path, bench: Bench) -> Words:
    run = bench.copy_run(folder)
    damage(run / file)
    return words_for(command, run, bench)


def _write(content: bytes) -> Damage:
    def damage(path: Path) -> None:
        path.write_bytes(content)

    return damage


def _sign(step: Path) -> None:
    """Write a manifest that agrees with the files that are there."""
    names = (
        p.relative_to(step).as_posix() for p in sorted(step.rglob("*")) if p.is_file() and p.name != "manifest.json"
    )
    entries = {}
    for name in names:
        content = (step / name).read_bytes()
        entries[name] = {"bytes": len(content), "xxh3_128": xxhash.xxh3_128(content).hexdigest()}
    (step / "manifest.json").write_text(json.dumps(entries))


def _make_signed(command: str, file: str, damage: Damage, folder: Path, bench: Bench) -> Words:
    """Damage that the checksums know nothing of, as a writer with a fault would leave it."""
    run = bench.copy_run(folder)
    damage(run / STEP / file)
    _sign(run / STEP)
    return words_for(command, run, bench)


def _change_state(key: str, value: Any, state: dict[str, Any]) -> None:
    state[key] = value


def _make_state(change: Callable[[dict[str, Any]], None], folder: Path, bench: Bench) -> Words:
    run = bench.copy_run(folder)
    path = run / STEP / "state.json"
    state = json.loads(path.read_text())
    change(state)
    path.write_text(json.dumps(state))
    _sign(run / STEP)
    return words_for("train", run, bench)


def _empty(folder: Path, bench: Bench) -> Path:
    (folder / "empty").mkdir()
    return folder / "empty"


def _not_finished(folder: Path, bench: Bench) -> Path:
    run = bench.copy_run(folder)
    shutil.rmtree(run / "checkpoints")
    return run


def _rollout_is_a_file(folder: Path, bench: Bench) -> Path:
    run = bench.copy_run(folder)
    shutil.rmtree(run / STEP)
    (run / STEP).write_text("x")
    return run


def _rollout_is_empty(folder: Path, bench: Bench) -> Path:
    run = bench.copy_run(folder)
    shutil.rmtree(run / STEP)
    (run / STEP).mkdir()
    return run


def _checkpoints_is_a_file(folder: Path, bench: Bench) -> Path:
    run = bench.copy_run(folder)
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").write_text("x")
    return run


STARTED_OVER = ("a run without checkpoints", "rollout is a file")
"""Folders of runs that have no checkpoint: `--load` begins such a run again."""
FOLDERS: dict[str, Callable[[Path, Bench], Path]] = {
    "empty": _empty,
    "missing": lambda folder, bench: folder / "missing",
    "file": lambda folder, bench: bench.data,
    "below a file": lambda folder, bench: bench.data / "x",
    "a run without checkpoints": _not_finished,
    "rollout is a file": _rollout_is_a_file,
    "rollout is empty": _rollout_is_empty,
    "checkpoints is a file": _checkpoints_is_a_file,
    "long": lambda folder, bench: Path("x" * 5000),
    "device": lambda folder, bench: Path("/dev/zero"),
    "root": lambda folder, bench: Path("/"),
    "no user": lambda folder, bench: Path("~nosuchuser/x"),
    "colour": lambda folder, bench: Path("\x1b[31m"),
    "named like a rollout": lambda folder, bench: folder / "rollout_1",
}


def _make_folder(command: str, write: Callable[[Path, Bench], Path], folder: Path, bench: Bench) -> Words:
    return words_for(command, write(folder, bench), bench)


RUN_DIRS: dict[str, dict[str, str]] = {
    f"{flag} {value!r:.30}": {flag: value}
    for flag in ("--run-dir", "--save", "--weight-folder", "--save-debug-rollout-data", "--load-debug-rollout-data", "--load")
    for value in ("", " ", ".", "..", "/dev/null", "/dev/null/x", "file", "file/x", "x" * 300, "x" * 5000, "~nosuchuser/x", "/proc/x", "loop", "a\nb", "\x1b[31m", "pipe")
}  # fmt: skip


def _make_place(flags: dict[str, str], folder: Path, bench: Bench) -> Words:
    from tests.fuzz.flags import prepare

    prepare(folder)
    changes: dict[str, Any] = dict(flags) | {"--save-interval": "1"}
    if "--load-debug-rollout-data" in flags:
        changes |= {"--debug-train-only": ()}
    if "--load" in flags:
        changes |= {"--num-rollout": "2"}
    return bench.words("train", changes)
