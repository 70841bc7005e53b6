"""Rows of a .jsonl or .json file, parsed one by one when they are read.

Only the offsets of each row are kept (16 bytes a row), never the rows. JSON does not go through Arrow on purpose: Arrow
gives a column one type. That turns the label 1 into 1.0 beside a 2.5 and a date into a timestamp, and gives every
nested object the keys of all others.
"""

from __future__ import annotations

import json
import os
import re
import weakref
from array import array
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from treadle.errors import DataError
from treadle.plain_json import MAX_DEPTH, TOO_DEEP, is_too_deep

_CHUNK_BYTES = 1 << 24
_BOM = b"\xef\xbb\xbf"
_SPACE = re.compile(r"[ \t\r\n]*")
_SHAPE_HINT = "write one JSON object a line, or one array of objects"


class JsonReader:
    """Reader of a file with one JSON object a line, or with one array of objects.

    Raises `DataError` for an empty file, and for a row that is no JSON object when that row is read.
    """

    def __init__(self, path: Path):
        self.path = path
        if path.stat().st_size == 0:
            raise DataError(f"{path} is empty; {_SHAPE_HINT}")
        self._starts, self._ends = _array_spans(path) if _is_array(path) else _line_spans(path)
        # The file is read by offset and not mapped: a mapped file that someone cuts short kills the process.
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)

    def __len__(self) -> int:
        return len(self._starts)

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """Every key that any row has; reads the whole file the first time."""
        names: dict[str, None] = {}
        for start in range(0, len(self), 1000):
            for row in self._rows(start, min(start + 1000, len(self))):
                names.update(dict.fromkeys(row))
        return tuple(names)

    def row(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)} in {self.path}")
        return self._rows(index, index + 1)[0]

    def column(self, name: str, start: int, stop: int) -> list[Any]:
        return [row.get(name) for row in self._rows(start, stop)]

    def locate(self, index: int) -> str:
        left, line = int(self._starts[index]), 1
        with self.path.open("rb") as file:
            while left > 0 and (chunk := file.read(min(left, _CHUNK_BYTES))):
                line += chunk.count(b"\n")
                left -= len(chunk)
        return f"{self.path}, line {line}"

    def _rows(self, start: int, stop: int) -> list[dict[str, Any]]:
        if start >= stop:
            return []
        base = int(self._starts[start])
        try:
            raw = os.pread(self._file, int(self._ends[stop - 1]) - base, base)
        except OSError as error:
            raise DataError(f"{self.path} can't be read: {error.strerror}") from error
        spans = zip((self._starts[start:stop] - base).tolist(), (self._ends[start:stop] - base).tolist(), strict=True)
        return [self._parse(start + i, raw[a:b]) for i, (a, b) in enumerate(spans)]

    def _parse(self, index: int, raw: bytes) -> dict[str, Any]:
        try:
            value = json.loads(raw.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            reason = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error)
            raise DataError(f"{self.locate(index)}: not a JSON object ({reason}); {_SHAPE_HINT}") from error
        if not isinstance(value, dict):
            raise DataError(f"{self.locate(index)}: a JSON {type(value).__name__}, not an object; {_SHAPE_HINT}")
        if raw.count(b"{") + raw.count(b"[") > MAX_DEPTH and is_too_deep(value):
            raise DataError(f"{self.locate(index)}: {TOO_DEEP}")
        return value


def _is_array(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(4096).removeprefix(_BOM).lstrip()
    return head.startswith(b"[")


def _line_spans(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the start and end offset of every line that is not blank, int64 [R] each."""
    none = np.zeros(0, dtype=np.int64)
    starts: list[np.ndarray] = [none]
    ends: list[np.ndarray] = [none]
    heads: list[np.ndarray] = [none]  # the first byte of each line
    with path.open("rb") as file:
        offset = 3 if file.read(3) == _BOM else 0
        file.seek(offset)
        after_newline = True
        while chunk := file.read(_CHUNK_BYTES):
            content = np.frombuffer(chunk, dtype=np.uint8)
            is_newline = content == ord("\n")
            first = np.flatnonzero(np.concatenate([[after_newline], is_newline[:-1]]))
            starts.append(first + offset)
            heads.append(content[first])
            ends.append(np.flatnonzero(is_newline) + offset)
            after_newline = bool(is_newline[-1])
            offset += len(chunk)
        if not after_newline:
            ends.append(np.array([offset], dtype=np.int64))
        all_starts, all_ends = np.concatenate(starts), np.concatenate(ends)
        keep = np.ones(len(all_starts), dtype=bool)
        may_be_blank = np.flatnonzero(np.isin(np.concatenate(heads), list(b" \t\r\n")))
        for line in may_be_blank.tolist():
            file.seek(int(all_starts[line]))
            keep[line] = bool(file.read(int(all_ends[line] - all_starts[line])).strip())
    return all_starts[keep], all_ends[keep]


def _array_spans(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the start and end offset of every object in the file's one array, int64 [R] each."""
    raw = path.read_bytes()
    skipped = len(_BOM) if raw.startswith(_BOM) else 0
    try:
        text = raw[skipped:].decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {skipped + error.start}); save it as UTF-8") from error
    starts, ends, end_of_array = _scan_array(path, text)
    if _skip_space(text, end_of_array) != len(text):
        raise DataError(f"{path}, line {_line(text, end_of_array)}: text after the end of the array; {_SHAPE_HINT}")
    if not text.isascii():
        starts, ends = _byte_offsets(text, starts, ends)
    return np.array(starts, dtype=np.int64) + skipped, np.array(ends, dtype=np.int64) + skipped


def _scan_array(path: Path, text: str) -> tuple[array[int], array[int], int]:
    """Return the character offsets of the objects of an array, starts and ends, and that of the array's end."""
    decode = json.JSONDecoder().raw_decode
    starts, ends = array("q"), array("q")
    position = _skip_space(text, _skip_space(text, 0) + 1)
    while text[position : position + 1] != "]" or len(starts) > 0:
        try:
            value, end = decode(text, position)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{path}, line {_line(text, position)}: not a JSON object ({error}); {_SHAPE_HINT}"
            ) from error
        if not isinstance(value, dict):
            kind = type(value).__name__
            raise DataError(f"{path}, line {_line(text, position)}: a JSON {kind}, not an object; {_SHAPE_HINT}")
        starts.append(position)
        ends.append(end)
        position = _skip_space(text, end)
        if text[position : position + 1] == "]":
            break
        if text[position : position + 1] != ",":
            raise DataError(
                f"{path}, line {_line(text, position)}: a comma or the end of the array is missing; {_SHAPE_HINT}"
            )
        position = _skip_space(text, position + 1)
    return starts, ends, position + 1


def _skip_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    assert match is not None
    return match.end()


def _byte_offsets(text: str, starts: array[int], ends: array[int]) -> tuple[array[int], array[int]]:
    byte_starts, byte_ends = array("q"), array("q")
    characters = offset = 0
    for start, end in zip(starts, ends, strict=True):
        offset += len(text[characters:start].encode())
        byte_starts.append(offset)
        offset += len(text[start:end].encode())
        byte_ends.append(offset)
        characters = end
    return byte_starts, byte_ends


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1
