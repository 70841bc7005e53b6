from __future__ import annotations

import json
import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.data.json_reader import JsonReader
from treadle.data.readers import open_reader, source_name
from treadle.errors import ConfigError, DataError

Write = Callable[[str, list[Any]], Path]


def rows_of(source: str | Path) -> list[dict[str, Any]]:
    reader = open_reader(str(source))
    return [reader.row(i) for i in range(len(reader))]


def refused(source: str | Path) -> str:
    with pytest.raises(DataError) as caught:
        rows_of(source)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_jsonl_keeps_every_value_as_it_is_written(write_jsonl: Write) -> None:
    rows = [
        {"q": "2024-01-01", "label": 1, "m": {"x": 1}},
        {"q": "b", "label": "one", "m": {"y": None}},
        {"q": [{"role": "user", "content": "c"}], "label": 2.5},
        {"other": 2**70},
    ]
    path = write_jsonl("mixed.jsonl", rows)
    assert rows_of(path) == rows
    assert type(rows_of(path)[0]["label"]) is int
    assert list(open_reader(str(path)).columns) == ["q", "label", "m", "other"]


@pytest.mark.parametrize("chunk_bytes", [1, 3, 7, 1 << 20])
def test_lines_are_found_across_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int) -> None:
    monkeypatch.setattr("treadle.data.json_reader._CHUNK_BYTES", chunk_bytes)
    path = tmp_path / "odd.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a":1}\r\n\n  \t\n {"a":"\xc3\xa9"} \n\r\n{"a":3}')
    assert rows_of(path) == [{"a": 1}, {"a": "é"}, {"a": 3}]
    reader = JsonReader(path)
    assert [reader.locate(i).rpartition("line ")[2] for i in range(3)] == ["1", "4", "6"]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(rows=st.lists(st.dictionaries(st.text(), values, max_size=3), min_size=1, max_size=6), ascii_only=st.booleans())
def test_json_and_jsonl_give_back_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], ascii_only: bool
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    array = json.dumps(rows, ensure_ascii=ascii_only, indent=1)
    (folder / "a.json").write_text(array, encoding="utf-8")
    lines = "\n".join(json.dumps(row, ensure_ascii=ascii_only) for row in rows)
    (folder / "b.json").write_text(lines, encoding="utf-8")
    assert rows_of(folder / "a.json") == rows
    assert rows_of(folder / "b.json") == rows


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"q": 1}', "", '{"q": nope}'], "bad.jsonl, line 3: not a JSON object (Expecting value"),
        (['{"q": 1}', "7"], "bad.jsonl, line 2: a JSON int, not an object"),
        (['[{"q": 1},', "7]"], "bad.jsonl, line 2: a JSON int, not an object"),
        (['[{"q": 1}', '{"q": 2}]'], "bad.jsonl, line 2: a comma or the end of the array is missing"),
        (['[{"q": 1},', "]"], "bad.jsonl, line 2: not a JSON object"),
        (['[{"q": 1}', "", "] 5"], "bad.jsonl, line 3: text after the end of the array"),
        (["[]"], "is empty: it has no rows"),
        (["", "  "], "is empty: it has no rows"),
    ],
)
def test_a_malformed_row_is_named(write_jsonl: Write, lines: list[str], message: str) -> None:
    assert message in refused(write_jsonl("bad.jsonl", lines))


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"q": "a"}\n{"q": "\xe9"}\n')
    assert "latin.jsonl, line 2: not a JSON object (it is not UTF-8 text)" in refused(path)


def test_a_file_cut_short_after_it_was_opened_is_an_error_not_a_crash(write_jsonl: Write) -> None:
    path = write_jsonl("cut.jsonl", [{"q": i} for i in range(50)])
    reader = open_reader(str(path))
    path.write_text('{"q": 0}\n')
    assert reader.row(0) == {"q": 0}
    with pytest.raises(DataError, match="not a JSON object"):
        reader.row(40)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ("2:4", [2, 3]),
        (":2", [0, 1]),
        ("3:", [3, 4]),
        ("-2:", [3, 4]),
        (":-3", [0, 1]),
        ("1:99", [1, 2, 3, 4]),
        (":", [0, 1, 2, 3, 4]),
    ],
)
def test_slices_are_those_of_python(write_jsonl: Write, rows: str, expected: list[int]) -> None:
    path = write_jsonl("five.jsonl", [{"n": i} for i in range(5)])
    assert [row["n"] for row in rows_of(f"{path}@[{rows}]")] == expected


def test_wrong_slices_are_refused(write_jsonl: Write) -> None:
    path = write_jsonl("five.jsonl", [{"n": i} for i in range(5)])
    assert "takes no rows" in refused(f"{path}@[5:]")
    assert "has 5, numbered 0 to 4" in refused(f"{path}@[3:2]")
    assert "write path@[a:b]" in refused(f"{path}@[1:4:2]")
    assert "write path@[a:b]" in refused(f"{path}@[3]")


def test_a_missing_or_unknown_file_is_one_clear_line(write_jsonl: Write, tmp_path: Path) -> None:
    path = write_jsonl("train.jsonl", [{"n": 1}])
    assert f"there is no file '{tmp_path}/trian.jsonl'; did you mean '{path}'?" in refused(tmp_path / "trian.jsonl")
    assert "nor a folder" in refused(tmp_path / "nowhere" / "x.jsonl")
    assert "a file has no splits" in refused(f"{path}@train")
    (tmp_path / "notes.txt").write_text("x")
    assert "ends in .jsonl, .json, .parquet, .csv, not .txt" in refused(tmp_path / "notes.txt")
    (tmp_path / "none.jsonl").touch()
    assert "none.jsonl is empty" in refused(tmp_path / "none.jsonl")


@pytest.mark.parametrize("name", ["pipe", "pipe.jsonl", "pipe.csv", "pipe.parquet"])
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    assert "is a pipe, a device or a socket; copy its rows into a file" in refused(tmp_path / name)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("/dev/zero", "'/dev/zero' is a pipe, a device or a socket"),
        ("/dev/null@[:3]", "'/dev/null' is a pipe, a device or a socket"),
        ("~nosuchuser/x.jsonl", "'~nosuchuser/x.jsonl': there is no such home folder"),
        ("a" * 300 + ".jsonl", "…' can't be read: File name too long"),
        ("x/" * 3000 + "a.jsonl", "…' can't be read: File name too long"),
        ("a\0b.jsonl", "there is no file 'a\\x00b.jsonl'"),
        ("", "'' names no data"),
        (" @[:1]", "' ' names no data"),
        ("@train", "'@train' names no data"),
        ("/", "folder '/' holds more than 20000 entries; name the data folder or file"),
    ],
)
def test_a_place_that_holds_no_rows_is_one_clear_line(source: str, message: str) -> None:
    assert message in refused(source)
    if len(source) > 200:
        assert len(refused(source)) < 300


def test_a_link_to_a_device_or_to_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "zero.jsonl").symlink_to("/dev/zero")
    (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
    assert "is a pipe, a device or a socket" in refused(tmp_path / "zero.jsonl")
    assert "there is no file" in refused(tmp_path / "loop.jsonl")


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet", "a"])
def test_data_that_may_not_be_read_is_named(name: str) -> None:
    """As another user: for the one who made the file, or for root, everything can be read."""
    with tempfile.TemporaryDirectory() as made:  # pytest's own folders are closed to others
        folder = Path(made)
        folder.chmod(0o755)
        path = folder / name
        path.write_text('{"q": "a"}\n') if path.suffix else path.mkdir()
        path.chmod(0)
        closed = folder / "closed"
        closed.mkdir()
        closed.chmod(0)
        is_root = os.geteuid() == 0
        if is_root:
            os.seteuid(65534)
        try:
            messages = refused(path), refused(closed / "b.jsonl")
        finally:
            if is_root:
                os.seteuid(0)
            for item in (path, closed):
                item.chmod(0o755)
        assert "ermission denied" in messages[0]
        assert "closed/b.jsonl' can't be read: Permission denied" in messages[1]


@pytest.mark.parametrize("depth", [90, 200, 500])
def test_a_row_nested_too_deep_is_named(write_jsonl: Write, tmp_path: Path, depth: int) -> None:
    row = '{"q": 1, "deep": ' + '{"a": [' * (depth // 2) + "]}" * (depth // 2) + "}"
    mine = tmp_path / "mine.py"
    mine.write_text(f"import json\nrows = [{{'q': 0}}, json.loads({row!r})]\n")
    sources = [write_jsonl("deep.jsonl", ['{"q": 0}', row]), write_jsonl("deep.json", ['[{"q": 0},', row, "]"])]
    for source, place in ((sources[0], "line 2"), (sources[1], "line 2"), (f"{mine}:rows", "row 1")):
        if depth < 100:
            assert rows_of(source)[1]["q"] == 1
        else:
            assert f"{place}: its values are nested more than 100 deep" in refused(source)


def test_a_mark_of_utf8_at_the_start_is_no_part_of_the_data(tmp_path: Path) -> None:
    for name, text in (("a.jsonl", '{"q": "x"}'), ("a.json", '[{"q": "x"}]'), ("a.csv", "q\nx\n")):
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
        assert rows_of(tmp_path / name) == [{"q": "x"}]
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf")
        assert "mpty" in refused(tmp_path / name)


def test_csv_values_stay_text(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text('q,label\n"a\nb",007\n2024-01-01,NA\nnull,\n')
    assert rows_of(path) == [
        {"q": "a\nb", "label": "007"},
        {"q": "2024-01-01", "label": "NA"},
        {"q": "null", "label": ""},
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a readable csv file"),
        ("a,b\n", "is empty"),
        ("a,b\n1,2\n3\n", "row 3 has 1 values where the header has 2"),
        ("a,a\n1,2\n", "names column 'a' twice"),
        (b"\x80\x01,\xff\n", "is not UTF-8 text (near byte 0)"),
        (b"a,b\n1,2\n\xe9,3\n4\n", "is not UTF-8 text"),
        (b"a,b\n1,\xc3", "is not UTF-8 text"),
        ("a,b\n1,2\n".encode("utf-16"), "byte 3 is zero; save it as csv in UTF-8"),
    ],
)
def test_a_bad_csv_is_one_clear_line(tmp_path: Path, text: str | bytes, message: str, capfd: Any) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert message in refused(path)
    assert capfd.readouterr().err == ""


def test_a_bad_parquet_is_one_clear_line(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "junk.parquet").write_text("junk")
    assert "not a readable parquet file" in refused(tmp_path / "junk.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"q": pyarrow.array([], pyarrow.string())}), tmp_path / "no.parquet")
    assert "no.parquet is empty" in refused(tmp_path / "no.parquet")


def test_a_parquet_nested_too_deep_is_one_clear_line(tmp_path: Path, capfd: Any) -> None:
    import pyarrow
    import pyarrow.parquet

    value: Any = "x"
    for _ in range(90):
        value = {"a": value}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"q": value}]), tmp_path / "deep.parquet")
    assert "deep.parquet can't be read: " in refused(tmp_path / "deep.parquet")
    assert capfd.readouterr().err == ""


def test_splits_of_folders(tmp_path: Path) -> None:
    import datasets

    one, two = datasets.Dataset.from_list([{"n": 1}]), datasets.Dataset.from_list([{"n": 2}])
    folder = tmp_path / "saved"
    datasets.DatasetDict({"train": one, "test": two}).save_to_disk(str(folder))
    assert rows_of(folder) == [{"n": 1}]
    assert rows_of(f"{folder}@test") == [{"n": 2}]
    assert rows_of(f"{folder}@test@[:1]") == [{"n": 2}]
    assert "has no split 'tset'; did you mean 'test'?; it has test, train" in refused(f"{folder}@tset")
    datasets.DatasetDict({"dev": one, "test": two}).save_to_disk(str(tmp_path / "other"))
    assert "has no split 'train'; name one of dev, test" in refused(tmp_path / "other")
    one.save_to_disk(str(tmp_path / "plain"))
    assert "one data set without splits" in refused(f"{tmp_path / 'plain'}@test")
    (tmp_path / "void").mkdir()
    assert "holds no readable data set" in refused(tmp_path / "void")


def test_rows_of_the_users_own_code(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "class Squares:\n"
        "    def __len__(self): return 4\n"
        "    def __getitem__(self, i): return {'n': i * i}\n"
        "rows = [{'n': 5}]\n"
        "def fails(): raise KeyError('x')\n"
        "def text(): return 'abc'\n"
        "def no_rows(): return [1]\n"
    )
    assert rows_of(f"{file}:Squares@[1:3]") == [{"n": 1}, {"n": 4}]
    assert rows_of(f"{file}:rows") == [{"n": 5}]
    assert "raised KeyError" in refused(f"{file}:fails")
    assert "gave a str; it must give a Reader" in refused(f"{file}:text")
    assert "row 0: a int, not a dict" in refused(f"{file}:no_rows")
    with pytest.raises(ConfigError, match="has no 'row'; did you mean 'rows'"):
        open_reader(f"{file}:row")


def test_gym_rows_are_made_by_index_and_scored_by_their_verifier() -> None:
    import reasoning_gym

    source = "reasoning_gym:chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=2&size=50&seed=7"
    reader = open_reader(source)
    assert len(reader) == 50
    row = reader.row(33)
    fresh = reasoning_gym.create_dataset(row["task"], **row["task_args"])
    assert row == json.loads(json.dumps(row))
    assert row["question"] == fresh[33]["question"]
    assert fresh.score_answer(row["answer"], row["entry"]) == 1.0
    assert fresh.score_answer("no number", row["entry"]) == 0.0
    left, _, right = row["entry"]["metadata"]["expression"].partition(" + ")
    if right:
        assert int(row["answer"]) == int(left) + int(right)


def test_gym_is_the_same_without_a_seed_and_leaves_the_shared_generator_alone() -> None:
    random.seed(5)
    before = random.getstate()
    first, again = open_reader("reasoning_gym:list_functions"), open_reader("reasoning_gym:list_functions")
    assert [first.row(i) for i in (2, 0)] == [again.row(2), open_reader("reasoning_gym:list_functions").row(0)]
    assert random.getstate() == before


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("chain_sums", "no task 'chain_sums'; did you mean 'chain_sum'?"),
        ("composite", "no task 'composite'"),
        (
            "chain_sum?min_term=2",
            "no parameter 'min_term'; did you mean 'min_terms'?; allowed: allow_negation, max_digits",
        ),
        ("chain_sum?allow_negation=False", "allow_negation='False' must be true or false"),
        ("chain_sum?min_terms=two", "min_terms='two' must be a number"),
        ("chain_sum?size=1.5", "size=1.5 must be a whole number"),
        ("chain_sum?size=100000000000000", "is too many; at most 10000000"),
        ("chain_sum?seed=1&seed=2", "gives 'seed' twice"),
        ("chain_sum?seed", "'seed' is not key=value"),
        ("chain_sum?min_terms=5&max_terms=2", "the task refuses these values"),
    ],
)
def test_gym_mistakes_are_one_clear_line(query: str, message: str) -> None:
    assert message in refused(f"reasoning_gym:{query}")


def test_names_leave_out_folders_of_files_only(write_jsonl: Write) -> None:
    path = write_jsonl("train.jsonl", [{"n": 1}])
    assert source_name(f"{path}@[:1]") == "train.jsonl@[:1]"
    assert source_name(f"{path.parent}@test") == f"{path.parent.name}@test"
    assert source_name("openai/gsm8k:main@test@[:5]") == "openai/gsm8k:main@test@[:5]"
