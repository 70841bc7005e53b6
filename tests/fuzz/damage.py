"""Ways to damage a file, for model folders and checkpoints."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.fuzz.case import rng

Damage = Callable[[Path], None]


def _written(content: bytes) -> Damage:
    def damage(path: Path) -> None:
        path.write_bytes(content)

    return damage


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _link(target: str) -> Damage:
    def damage(path: Path) -> None:
        path.unlink()
        path.symlink_to(target)

    return damage


def _cut(share: float) -> Damage:
    def damage(path: Path) -> None:
        content = path.read_bytes()
        path.write_bytes(content[: int(len(content) * share)])

    return damage


def _longer(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\x00\xffmore")


def _hole(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 36)


def flip(seed: str, count: int) -> Damage:
    """Change `count` bytes, always the same ones for a seed."""

    def damage(path: Path) -> None:
        random, content = rng(seed), bytearray(path.read_bytes())
        for _ in range(count):
            content[random.randrange(len(content))] = random.randrange(256)
        path.write_bytes(bytes(content))

    return damage


DAMAGES: dict[str, Damage] = {
    "missing": Path.unlink,
    "empty": _written(b""),
    "zeros": _written(bytes(4096)),
    "binary": _written(bytes(range(256)) * 4),
    "half": _cut(0.5),
    "cut at the end": _cut(0.98),
    "longer": _longer,
    "folder": _folder,
    "fifo": _fifo,
    "loop": lambda path: _link(path.name)(path),
    "zero device": _link("/dev/zero"),
    "dangling": _link("nowhere"),
    "hole": _hole,
}
"""Damage that any file may have."""

JSON_DAMAGES: dict[str, Damage] = {
    "null": _written(b"null"),
    "number": _written(b"1"),
    "text": _written(b'"x"'),
    "list": _written(b"[]"),
    "list of lists": _written(b"[[1]]"),
    "object": _written(b"{}"),
    "object of nulls": _written(b'{"a": null}'),
    "deep": _written(b"[" * 100_000 + b"]" * 100_000),
    "deep object": _written(b'{"a":' * 100_000),
    "5000 digits": _written(b'{"a": ' + b"9" * 5000 + b"}"),
    "bom": _written(b"\xef\xbb\xbf{}"),
    "utf-16": _written("{}".encode("utf-16")),
    "latin-1": _written(b'{"a": "\xe9"}'),
    "surrogate": _written(b'{"\\ud800": "\\ud800"}'),
    "nan": _written(b'{"a": NaN, "b": 1e999}'),
}
"""Damage that a JSON file may have beside."""


def remove(path: Path) -> None:
    """Delete a file or a folder."""
    shutil.rmtree(path) if path.is_dir() else path.unlink()
