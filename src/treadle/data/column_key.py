"""A column by its name, or a value inside a column by a dotted name such as `reward_model.ground_truth`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from treadle.data.readers import Reader
from treadle.errors import DataError
from treadle.registry import suggestion

_BATCH = 1000


@dataclass(frozen=True, slots=True)
class ColumnKey:
    """A column, and the keys that lead from its objects to the value."""

    column: str
    path: tuple[str, ...] = ()

    def value(self, row: Mapping[str, Any]) -> Any:
        """Return the value of a row, None if it has none."""
        return self._inside(row.get(self.column))

    def values(self, reader: Reader, start: int, stop: int) -> list[Any]:
        """Return the values of rows start ≤ i < stop."""
        found = reader.column(self.column, start, stop)
        return [self._inside(value) for value in found] if self.path else found

    def _inside(self, value: Any) -> Any:
        for key in self.path:
            if not isinstance(value, Mapping):
                return None
            value = value.get(key)
        return value


def find_key(name: str, reader: Reader, key: str) -> ColumnKey:
    """Find the column of a data set that a key names; a column of exactly this name wins over a value in an object.

    Raises:
        DataError: if no row has it; the message lists the known names.
    """
    first = reader.row(0)
    if key in first:
        return ColumnKey(key)
    for columns in (first, reader.columns):  # the first row may lack it; `columns` reads them all
        if key in columns:
            return ColumnKey(key)
        for column, path in _splits(key):
            if column in columns:
                return _checked(name, reader, ColumnKey(column, path))
    names = list(reader.columns)
    raise DataError(f"{name!r} has no column {key!r}{suggestion(key, names)}; it has {', '.join(map(repr, names))}")


def has_key(reader: Reader, key: str) -> bool:
    """Return whether a reader has a column that a key could name."""
    return key in reader.columns or any(column in reader.columns for column, _ in _splits(key))


def _splits(key: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    parts = key.split(".")
    for end in range(len(parts) - 1, 0, -1):
        yield ".".join(parts[:end]), tuple(parts[end:])


def _checked(name: str, reader: Reader, key: ColumnKey) -> ColumnKey:
    """Return a key if the objects of any row have it; raises `DataError` if none does."""
    holder, known, other = ColumnKey(key.column, key.path[:-1]), dict[str, None](), "nothing"
    for start in range(0, len(reader), _BATCH):
        for value in holder.values(reader, start, min(start + _BATCH, len(reader))):
            if isinstance(value, Mapping):
                if key.path[-1] in value:
                    return key
                known.update(dict.fromkeys(map(str, value)))
            elif value is not None:
                other = f"a {type(value).__name__}"
    what = f"column {'.'.join((key.column, *key.path[:-1]))!r} of {name!r}"
    if not known:
        raise DataError(
            f"{what} holds {other} and no objects; {'.'.join((key.column, *key.path))!r} names a key of one"
        )
    hint = suggestion(key.path[-1], list(known))
    raise DataError(f"{what} has no key {key.path[-1]!r}{hint}; its objects have {', '.join(map(repr, known))}")
