"""Readers of the user: what they raise or return that is no row is one line that names them."""

from pathlib import Path

import pytest

from treadle.data.readers import open_reader
from treadle.errors import DataError

CODE = """
class reader:
    columns = ["input"]
    def __len__(self): return 3
    def row(self, index): {row}
    def column(self, name, start, stop): {column}
    def locate(self, index): return index
"""


@pytest.mark.parametrize(
    ("row", "column", "part"),
    [
        ("raise RuntimeError('no row')", "return []", "raised RuntimeError: no row"),
        ("raise KeyboardInterrupt", "return []", "raised KeyboardInterrupt"),
        ("return [1]", "return []", "row 0: a list, not a dict of columns"),
        ("return {'input': 'a'}", "return []", "0 values of column 'input' for rows 0 to 3"),
        ("return {'input': 'a'}", "return 5", "raised TypeError"),
    ],
)
def test_a_reader_that_raises_or_returns_no_row(row: str, column: str, part: str, tmp_path: Path):
    (tmp_path / "mine.py").write_text(CODE.format(row=row, column=column))
    reader = open_reader(f"{tmp_path / 'mine.py'}:reader")
    read = reader.row if not row.startswith("return {") else lambda index: reader.column("input", index, 3)
    with pytest.raises(DataError) as caught:
        read(0)
    assert part in str(caught.value)
    assert "mine.py:reader" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_sequence_that_raises(tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "class rows:\n    def __len__(self): return 2\n    def __getitem__(self, i): raise KeyError(i)\n"
    )
    reader = open_reader(f"{tmp_path / 'mine.py'}:rows")
    with pytest.raises(DataError, match="raised KeyError"):
        reader.row(1)


def test_a_source_given_many_times_is_named_at_once(tmp_path: Path, tiny_codec):
    from treadle.config.sections import DataSection
    from treadle.data import build_source

    (tmp_path / "d.jsonl").write_text('{"input": "a"}\n')
    data = DataSection(prompt_data=(str(tmp_path / "d.jsonl"),) * 3)
    source = build_source(data, codec=tiny_codec, max_prompt_len=9, seed=0)
    assert [row["name"] for row in source.state()["data"]] == ["d.jsonl", "d.jsonl#2", "d.jsonl#3"]
