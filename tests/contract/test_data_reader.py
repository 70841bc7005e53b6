"""What every data reader does; a new reader is one more entry in `READERS`.

Each entry makes a reader of the three rows of `ROWS` (other values for readers that make their own rows).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from treadle.data.readers import Reader, RowsReader, open_reader

ROWS = [{"input": "één", "label": "1"}, {"input": "two", "label": "2"}, {"input": "three", "label": "3"}]


def jsonl(folder: Path) -> str:
    path = folder / "rows.jsonl"
    path.write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS), encoding="utf-8")
    return str(path)


def json_array(folder: Path) -> str:
    path = folder / "rows.json"
    path.write_text(json.dumps(ROWS, ensure_ascii=False, indent=2), encoding="utf-8")
    return str(path)


def csv_file(folder: Path) -> str:
    path = folder / "rows.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["input", "label"])
        writer.writeheader()
        writer.writerows(ROWS)
    return str(path)


def parquet(folder: Path) -> str:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "rows [1].parquet")
    return str(folder / "rows [1].parquet")


def saved(folder: Path) -> str:
    import datasets

    datasets.Dataset.from_list(ROWS).with_format("numpy").save_to_disk(str(folder / "saved"))
    return str(folder / "saved")


def folder_of_files(folder: Path) -> str:
    (folder / "files").mkdir()
    (folder / "files" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "files" / "test.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    return str(folder / "files")


def code(folder: Path) -> str:
    (folder / "mine.py").write_text(f"def rows():\n    return {ROWS!r}\n")
    return f"{folder / 'mine.py'}:rows"


def sliced(folder: Path) -> str:
    path = folder / "more.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [{"input": "zero"}, *ROWS, {"input": "four"}]))
    return f"{path}@[1:-1]"


def gym(folder: Path) -> str:
    return "reasoning_gym:chain_sum?size=3&seed=7"


def in_memory(folder: Path) -> Reader:
    return RowsReader(ROWS, "rows")


READERS: list[Callable[[Path], str | Reader]] = [
    jsonl,
    json_array,
    csv_file,
    parquet,
    saved,
    folder_of_files,
    code,
    sliced,
    gym,
    in_memory,
]


@pytest.fixture(params=READERS, ids=lambda make: make.__name__)
def reader(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reader:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    made = request.param(tmp_path)
    return open_reader(made) if isinstance(made, str) else made


def test_rows_come_in_the_order_of_the_source(reader: Reader) -> None:
    assert len(reader) == 3
    rows = [reader.row(i) for i in range(3)]
    if "entry" in rows[0]:  # reasoning_gym makes its own rows
        assert [row["task_index"] for row in rows] == [0, 1, 2]
    else:
        assert rows == ROWS


def test_columns_name_the_keys_of_the_rows(reader: Reader) -> None:
    columns = list(reader.columns)
    assert len(set(columns)) == len(columns)
    assert set().union(*(reader.row(i) for i in range(len(reader)))) <= set(columns)


def test_a_column_is_that_key_of_a_run_of_rows(reader: Reader) -> None:
    for name in reader.columns:
        for start in range(4):
            for stop in range(start, 4):
                assert reader.column(name, start, stop) == [reader.row(i).get(name) for i in range(start, stop)]
    assert reader.column("no such column", 0, 3) == [None, None, None]


@pytest.mark.parametrize("index", [-1, 3, 4])
def test_indices_outside_are_refused(reader: Reader, index: int) -> None:
    with pytest.raises(IndexError):
        reader.row(index)


def test_reading_again_in_any_order_gives_the_same_rows(reader: Reader) -> None:
    first = [reader.row(i) for i in (0, 1, 2)]
    again = [reader.row(i) for i in (2, 0, 1)]
    assert first == [again[1], again[2], again[0]]


def test_a_caller_that_changes_a_row_changes_nothing_for_the_next(reader: Reader) -> None:
    before = dict(reader.row(1))
    reader.row(1).clear()
    assert reader.row(1) == before


def test_every_row_has_a_place_of_its_own(reader: Reader) -> None:
    places = [reader.locate(i) for i in range(3)]
    assert len(set(places)) == 3
    assert all("\n" not in place for place in places)
