"""Rows of parquet and csv files, saved data sets, data folders and hub data sets, through `datasets`.

Parquet, folders and hub data are memory-mapped from the cache of `datasets`; csv is held as an Arrow table of text.
In these formats a column has one type: a nested object has the keys of all rows, with None for those a row lacks.
"""

from __future__ import annotations

import codecs
import glob
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.errors import DataError, first_line
from treadle.hub import work_offline_if_cut_off
from treadle.registry import suggestion

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict


MAX_FOLDER_ENTRIES = 20_000
_CHUNK_BYTES = 1 << 24


class ArrowReader:
    """Reader over a `datasets.Dataset`."""

    adds_nulls = True

    def __init__(self, dataset: Dataset, name: str):
        self._dataset = dataset.with_format(None)  # a saved set may carry a format that gives tensors
        self._name = name

    def __len__(self) -> int:
        return len(self._dataset)

    @property
    def columns(self) -> Sequence[str]:
        return tuple(self._dataset.column_names)

    def row(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)} in {self._name}")
        return dict(self._dataset[index])

    def column(self, name: str, start: int, stop: int) -> list[Any]:
        if name not in self._dataset.column_names:
            return [None] * (stop - start)
        return list(self._dataset[name][start:stop])

    def locate(self, index: int) -> str:
        return f"{self._name}, row {index}"


def innermost_line(error: BaseException) -> str:
    """Return the first line of the innermost cause of an error."""
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error)


def read_parquet(path: Path) -> ArrowReader:
    """Open a parquet file; raises `DataError` for a file that is none, or has no rows."""
    import datasets
    import pyarrow
    import pyarrow.parquet

    try:
        num_rows = pyarrow.parquet.read_metadata(path).num_rows
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a readable parquet file: {innermost_line(error)}") from error
    if num_rows == 0:
        raise DataError(f"{path} is empty: it has a schema but no rows; give a file with rows")
    _quiet()
    try:
        found = datasets.load_dataset(
            "parquet", data_files=glob.escape(str(path.resolve())), split="train", trust_remote_code=False
        )
    except Exception as error:  # the builder wraps whatever goes wrong in many kinds
        raise DataError(f"{path} can't be read: {innermost_line(error)}") from error
    return ArrowReader(found, str(path))


def read_csv(path: Path) -> ArrowReader:
    """Open a csv file with a header line; every value is text, so that 007 stays 007 and NA stays NA."""
    import datasets
    import pyarrow
    from pyarrow import csv

    bad: list[str] = []

    def note(row: csv.InvalidRow) -> str:
        bad.append(f"row {row.number} has {row.actual_columns} values where the header has {row.expected_columns}")
        return "error"

    read = csv.ReadOptions(use_threads=False, block_size=1 << 24)  # rows are only counted by a single thread
    parse = csv.ParseOptions(newlines_in_values=True, invalid_row_handler=note)
    try:
        _check_text(path)
        with csv.open_csv(path, read_options=read, parse_options=parse) as stream:
            names = stream.schema.names
        text = csv.ConvertOptions(column_types={name: pyarrow.string() for name in names}, strings_can_be_null=False)
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise DataError(f"{path}: the header names column {twice[0]!r} twice; rename one")
        # Streamed: reading at once holds the file and the table at the same time.
        with csv.open_csv(path, read_options=read, parse_options=parse, convert_options=text) as stream:
            table = stream.read_all()
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not a readable csv file: {bad[0] if bad else innermost_line(error)}") from error
    return ArrowReader(datasets.Dataset(table), str(path))


def _quiet() -> None:
    """Keep `datasets` from writing progress bars and errors; Treadle reports what it raises in one line."""
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)


def _check_text(path: Path) -> None:
    """Raise `DataError` if a file is not UTF-8 text; pyarrow reports that inside other errors, or not at all."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset, chunk = 0, b"-"
    with path.open("rb") as file:
        while chunk:
            chunk = file.read(_CHUNK_BYTES)
            zero = chunk.find(b"\0")
            if zero >= 0:
                raise DataError(f"{path} is not a text file: byte {offset + zero} is zero; save it as csv in UTF-8")
            try:
                decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{path} is not UTF-8 text (near byte {offset + error.start}); save it as UTF-8"
                ) from error
            offset += len(chunk)


def _check_folder(path: Path) -> None:
    """Raise `DataError` for a folder of too many entries to be a data set; `datasets` would search it for hours."""
    found = 0
    for _, folders, files in os.walk(path):
        found += len(folders) + len(files)
        if found > MAX_FOLDER_ENTRIES:
            raise DataError(
                f"folder {str(path)!r} holds more than {MAX_FOLDER_ENTRIES} entries; name the data folder or file in it"
            )


def read_folder(path: Path, split: str | None) -> ArrowReader:
    """Open a folder saved by `save_to_disk`, or a folder of data files."""
    import datasets

    _check_folder(path)
    _quiet()
    try:
        saved = any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))
        if saved:
            found = datasets.load_from_disk(str(path))
        else:
            found = datasets.load_dataset(str(path.resolve()), trust_remote_code=False)
    except Exception as error:  # many kinds, as in `read_parquet`
        raise DataError(
            f"folder {str(path)!r} holds no readable data set ({innermost_line(error)}); it takes what "
            "save_to_disk writes, or .jsonl, .json, .parquet or .csv files"
        ) from error
    return ArrowReader(_pick_split(found, split, str(path)), _named(str(path), split))


def read_hub(name: str, config: str | None, split: str | None) -> ArrowReader:
    """Open a data set of the Hugging Face hub, from its cache if it is there."""
    import datasets

    shown = f"{name}:{config}" if config else name
    work_offline_if_cut_off(name)
    try:
        found = datasets.load_dataset(name, config, trust_remote_code=False)
    except Exception as error:  # many kinds, as in `read_parquet`
        raise DataError(
            f"no data set {shown!r}: there is no such file or folder, and the hub says: {innermost_line(error)}"
        ) from error
    return ArrowReader(_pick_split(found, split, shown), _named(shown, split))


def _named(name: str, split: str | None) -> str:
    return f"{name}@{split}" if split else name


def _pick_split(found: Dataset | DatasetDict, split: str | None, name: str) -> Dataset:
    """Return the requested split; without a request `train`, or the only one."""
    if not isinstance(found, Mapping):
        if split is not None and str(found.split) != split:
            raise DataError(f"{name!r} is one data set without splits; leave out @{split}")
        return found
    splits = sorted(found)
    wanted = split or ("train" if "train" in splits else splits[0])
    if wanted not in splits:
        raise DataError(f"{name!r} has no split {wanted!r}{suggestion(wanted, splits)}; it has {', '.join(splits)}")
    if split is None and wanted != "train" and len(splits) > 1:
        raise DataError(f"{name!r} has no split 'train'; name one of {', '.join(splits)} as {name}@{splits[0]}")
    return found[wanted]
