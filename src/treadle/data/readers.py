"""Readers of rows: their protocol, and `open_reader`, which opens a source named in the config."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from treadle.data.arrow_reader import ArrowReader, read_csv, read_folder, read_hub, read_parquet
from treadle.data.gym_reader import GYM_PREFIX, GymReader
from treadle.data.json_reader import JsonReader
from treadle.errors import DataError
from treadle.plain_json import TOO_DEEP, is_too_deep
from treadle.registry import nearest, resolve, user_code

SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")
_SLICE = re.compile(r"(?P<location>.*)@\[(?P<rows>[^\[\]]*)\]", re.DOTALL)
_ROWS = re.compile(r"\s*(-?\d+)?\s*:\s*(-?\d+)?\s*")
_OBJECT = re.compile(r"(?P<module>[^:]+):(?P<object>[A-Za-z_][\w.]*)")
_HUB_ID = re.compile(r"(?P<name>[\w.-]+(/[\w.-]+)?)(:(?P<config>[\w. +-]+))?")
_KINDS = f"a {', '.join(SUFFIXES)} file, a folder, a hub id, reasoning_gym:task?key=value, or package.module:object"


class Reader(Protocol):
    """Rows by index. Reading a row twice gives the same row; nothing needs all rows in memory."""

    @property
    def columns(self) -> Sequence[str]:
        """Names that rows have; a row may lack some of them."""
        ...

    def __len__(self) -> int: ...

    def row(self, index: int) -> dict[str, Any]:
        """Row `index`, 0 ≤ index < len; `IndexError` outside (negative indices are outside)."""
        ...

    def column(self, name: str, start: int, stop: int) -> list[Any]:
        """Return one column of rows start ≤ i < stop, None if a row lacks it; 0 ≤ start ≤ stop ≤ len."""
        ...

    def locate(self, index: int) -> str:
        """Return the location of row `index` for errors: `train.jsonl, line 7`."""
        ...


class RowsReader:
    """Reader of a sequence of dict rows that Python already has."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], name: str):
        self._rows = rows
        self._name = name

    def __len__(self) -> int:
        return len(self._rows)

    @cached_property
    def columns(self) -> Sequence[str]:
        return tuple(dict.fromkeys(key for index in range(len(self)) for key in self.row(index)))

    def row(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)} in {self._name}")
        with user_code(lambda what: DataError(f"{self.locate(index)}: {self._name} {what}")):
            row = self._rows[index]
        return _checked_row(row, self.locate(index))

    def column(self, name: str, start: int, stop: int) -> list[Any]:
        return [self.row(index).get(name) for index in range(start, stop)]

    def locate(self, index: int) -> str:
        return f"{self._name}, row {index}"


class UserReader:
    """Reader around a user's class. Its exceptions, and results that are no rows, become `DataError`s that name it."""

    def __init__(self, reader: Reader, location: str):
        self._reader = reader
        self._name = f"data reader {location!r}"

    def _calling(self) -> AbstractContextManager[None]:
        return user_code(lambda what: DataError(f"{self._name} {what}"))

    def __len__(self) -> int:
        with self._calling():
            return len(self._reader)

    @property
    def columns(self) -> Sequence[str]:
        with self._calling():
            return [str(name) for name in self._reader.columns]

    def row(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)} in {self._name}")
        with self._calling():
            row = self._reader.row(index)
        return _checked_row(row, f"{self._name}, row {index}")

    def column(self, name: str, start: int, stop: int) -> list[Any]:
        with self._calling():
            values = list(self._reader.column(name, start, stop))
        if len(values) != stop - start:
            raise DataError(
                f"{self._name}: {len(values)} values of column {name!r} for rows {start} to {stop}; return one for each"
            )
        return values

    def locate(self, index: int) -> str:
        with self._calling():
            return str(self._reader.locate(index))

    @property
    def adds_nulls(self) -> bool:
        return adds_nulls(self._reader)


class SlicedReader:
    """Rows start ≤ i < stop of another reader."""

    def __init__(self, reader: Reader, start: int, stop: int):
        self._reader = reader
        self._start = start
        self._length = stop - start

    def __len__(self) -> int:
        return self._length

    @property
    def columns(self) -> Sequence[str]:
        return self._reader.columns

    def row(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self._length:
            raise IndexError(f"row {index} of a slice of {self._length} rows")
        return self._reader.row(self._start + index)

    def column(self, name: str, start: int, stop: int) -> list[Any]:
        return self._reader.column(name, self._start + start, self._start + stop)

    def locate(self, index: int) -> str:
        return self._reader.locate(self._start + index)

    @property
    def adds_nulls(self) -> bool:
        return adds_nulls(self._reader)


def _checked_row(row: Any, place: str) -> dict[str, Any]:
    """Return a row of a user's reader; raises `DataError` if it is no mapping, or nested too deep."""
    if not isinstance(row, Mapping):
        raise DataError(f"{place}: a {type(row).__name__}, not a dict of columns")
    if is_too_deep(row):
        raise DataError(f"{place}: {TOO_DEEP}")
    return dict(row)


def adds_nulls(reader: Reader) -> bool:
    """Return whether a reader gives each object in a column the keys of all others, as None; Arrow does."""
    return bool(getattr(reader, "adds_nulls", False))


def open_reader(source: str) -> Reader:
    """Open a source as the config names it; `path@[a:b]` takes rows a to b as a Python slice would.

    Raises `DataError` if the source is missing, empty or of an unknown kind, or if the slice is empty.
    """
    location, rows = _split_slice(source)
    reader = _open(location)
    size = len(reader)
    if size == 0:
        raise DataError(f"{location!r} is empty: it has no rows; every data set needs at least one")
    if rows is None:
        return reader
    start, stop, _ = rows.indices(size)
    if start >= stop:
        raise DataError(f"{source!r} takes no rows: {location!r} has {size}, numbered 0 to {size - 1}")
    return SlicedReader(reader, start, stop)


def source_name(source: str) -> str:
    """Return the name of a source, without the folders of an existing file: data keeps its name if it is moved.

    >>> source_name(f"{__file__}@[:100]"), source_name("owner/dataset@[:100]")
    ('readers.py@[:100]', 'owner/dataset@[:100]')
    """
    location, _ = _split_slice(source)
    for place in (location, location.rpartition("@")[0]):
        path = _local_path(place)
        if place and path.exists():
            return path.name + source[len(place) :]
    return source


def _local_path(text: str) -> Path:
    """Return the path of a place that may or may not exist.

    Raises:
        DataError: if it can't be a path, can't be reached, or is neither a file nor a folder. Reading a pipe blocks,
            and a device may never end.
    """
    shown = text if len(text) <= 200 else f"{text[:200]}…"
    try:
        path = Path(text).expanduser()
        is_other = path.exists() and not path.is_file() and not path.is_dir()
    except RuntimeError as error:  # ~name without such a user
        raise DataError(f"{shown!r}: there is no such home folder; write the path without ~") from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise DataError(f"{shown!r} can't be read: {reason}") from error
    if is_other:
        raise DataError(f"{shown!r} is a pipe, a device or a socket; copy its rows into a file")
    return path


def _split_slice(source: str) -> tuple[str, slice | None]:
    match = _SLICE.fullmatch(source)
    if match is None:
        return source, None
    rows = _ROWS.fullmatch(match["rows"])
    if rows is None:
        raise DataError(
            f"{source!r}: [{match['rows']}] is not a slice of rows; write path@[a:b], path@[:b] or path@[a:]"
        )
    return match["location"], slice(*(None if edge is None else int(edge) for edge in rows.groups()))


def _open(location: str) -> Reader:
    if not location.strip():
        raise DataError(f"{location!r} names no data; a source is {_KINDS}")
    if location.startswith(GYM_PREFIX):
        return GymReader(location)
    path = _local_path(location)
    if path.is_file():
        return _open_file(path)
    if path.is_dir():
        return read_folder(path, None)
    if _names_an_object(location):
        return _open_object(location)
    base, at, split = location.rpartition("@")
    if not at:
        base, split = location, ""
    if not base.strip():  # `@train` is no split of the current folder
        raise DataError(f"{location!r} names no data; a source is {_KINDS}")
    path = _local_path(base)
    if path.is_file():
        raise DataError(f"{location!r}: a file has no splits; path@[a:b] takes rows")
    if path.is_dir():
        return read_folder(path, split or None)
    hub = _HUB_ID.fullmatch(base)
    if hub is None or path.suffix in SUFFIXES or base.startswith("."):
        raise DataError(f"there is no file {base!r}{_neighbour(path)}; a source is {_KINDS}")
    return read_hub(hub["name"], hub["config"], split or None)


def _open_file(path: Path) -> Reader:
    suffix = path.suffix.lower()
    if suffix in (".jsonl", ".json"):
        try:
            return JsonReader(path)
        except OSError as error:
            raise DataError(f"{path} can't be read: {error.strerror}") from error
    if suffix == ".parquet":
        return read_parquet(path)
    if suffix == ".csv":
        return read_csv(path)
    raise DataError(
        f"{path}: a data file ends in {', '.join(SUFFIXES)}, not {suffix or 'nothing'}; convert or rename it"
    )


def _neighbour(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.exists()]
    except OSError:
        return f" (nor a folder {str(path.parent)!r})"
    near = nearest(path.name, names)
    return f"; did you mean {str(path.parent / near)!r}?" if near else ""


def _names_an_object(location: str) -> bool:
    """Return whether `a:b` is code, in a .py file or a module that can be found, and no config of a hub data set."""
    match = _OBJECT.fullmatch(location)
    if match is None:
        return False
    module = match["module"]
    if module.endswith(".py"):
        return True
    if not all(part.isidentifier() for part in module.split(".")):
        return False
    here = Path(*module.split(".")).with_suffix(".py")
    try:
        return here.is_file() or importlib.util.find_spec(module.split(".")[0]) is not None
    except (OSError, ValueError):  # no path, or a module without a spec
        return False


def _open_object(location: str) -> Reader:
    """Return the reader of the user's object: a reader, a sequence of dict rows, or a callable that returns one."""
    found: Any = resolve("data reader", location, {})
    if callable(found):
        with user_code(lambda what: DataError(f"data reader {location!r} {what}")):
            found = found()
    if all(hasattr(found, name) for name in ("row", "column", "locate", "__len__")):
        return UserReader(found, location)
    if type(found).__module__.startswith("datasets.") and hasattr(found, "column_names"):
        return ArrowReader(found, location)
    if isinstance(found, str | bytes | Mapping) or not (hasattr(found, "__len__") and hasattr(found, "__getitem__")):
        raise DataError(
            f"data reader {location!r} gave a {type(found).__name__}; it must give a Reader or a sequence of dict rows"
        )
    return RowsReader(found, location)
