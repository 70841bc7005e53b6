"""Data files damaged in many ways, read by `plan`, by `train` and as an evaluation set."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tests.fuzz.case import Bench, Case, Words, rng

ROWS = [{"input": f"say {letter}", "label": letter} for letter in "abcd"]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
DEEP = 100_000

FAULTY_LINES: dict[str, bytes] = {
    "empty": b"",
    "blank lines": b"\n\n\n",
    "binary": bytes(range(256)) * 20,
    "zeros": bytes(10_000),
    "utf-16": LINES.encode("utf-16"),
    "half a line": LINES.encode()[:-12],
    "half a character": b'{"input": "\xe2\x82", "label": "a"}\n',
    "latin-1": b'{"input": "caf\xe9", "label": "a"}\n',
    "no json": b"say a\nsay b\n",
    "single quotes": b"{'input': 'say a'}\n",
    "numbers": b"1\n2\n3\n",
    "texts": b'"a"\n"b"\n',
    "lists": b'["a"]\n["b"]\n',
    "nulls": b"null\nnull\n",
    "one row is a list": LINES.encode() + b"[1]\n",
    "one row is null": LINES.encode() + b"null\n",
    "empty objects": b"{}\n{}\n",
    "no column": b'{"question": "a"}\n',
    "column of numbers": b'{"input": 1, "label": "a"}\n',
    "column of nulls": b'{"input": null, "label": "a"}\n',
    "column of objects": b'{"input": {"a": 1}, "label": "a"}\n',
    "column of booleans": b'{"input": true, "label": "a"}\n',
    "empty messages": b'{"input": [], "label": "a"}\n',
    "messages of numbers": b'{"input": [1, 2], "label": "a"}\n',
    "messages without a role": b'{"input": [{"content": "x"}], "label": "a"}\n',
    "role of a number": b'{"input": [{"role": 1, "content": "x"}], "label": "a"}\n',
    "content of a number": b'{"input": [{"role": "user", "content": 1}], "label": "a"}\n',
    "two objects a line": b'{"input": "a"} {"input": "b"}\n',
    "open brace": b'{"input": "a"\n',
    "deep list": b'{"input": ' + b"[" * DEEP + b"]" * DEEP + b"}\n",
    "deep object": b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"\n",
    "deep and open": b"[" * DEEP,
    "surrogate": b'{"input": "\\ud800", "label": "a"}\n',
    "empty prompt": b'{"input": "", "label": "a"}\n',
    "too long for the context": b'{"input": "' + b"x" * 100_000 + b'", "label": "a"}\n',
}  # fmt: skip

ODD_LINES: dict[str, bytes] = {
    "bom": b"\xef\xbb\xbf" + LINES.encode(),
    "windows": LINES.replace("\n", "\r\n").encode(),
    "old mac": LINES.replace("\n", "\r").encode(),
    "blank lines between": LINES.replace("\n", "\n\n  \n").encode(),
    "no last line end": LINES.rstrip().encode(),
    "label of a number": b'{"input": "a", "label": 1}\n',
    "label of 5000 digits": b'{"input": "a", "label": ' + b"9" * 5000 + b"}\n",
    "label nan": b'{"input": "a", "label": NaN}\n',
    "label infinite": b'{"input": "a", "label": 1e999}\n',
    "label of null": b'{"input": "a", "label": null}\n',
    "label of a list": b'{"input": "a", "label": ["a", {"b": 1}]}\n',
    "label missing": b'{"input": "a"}\n{"input": "b", "label": "x"}\n',
    "label deep": b'{"input": "a", "label": ' + b"[" * 500 + b"]" * 500 + b"}\n",
    "label deeper": b'{"input": "a", "label": ' + b"[" * 5000 + b"]" * 5000 + b"}\n",
    "label long": b'{"input": "a", "label": "' + b"x" * 300_000 + b'"}\n',
    "label of controls": b'{"input": "a", "label": "\\u001b[31m\\u0000\\u202e"}\n',
    "label with a surrogate": b'{"input": "a", "label": "\\ud800"}\n',
    "nul": b'{"input": "a\\u0000b", "label": "a"}\n',
    "escape": b'{"input": "\\u001b[31ma", "label": "a"}\n',
    "same key twice": b'{"input": "a", "input": 1, "input": "b", "label": "a"}\n',
    "unknown letters": '{"input": "ßäö💥", "label": "a"}\n'.encode(),
    "many columns": ("{" + ", ".join(f'"c{i}": {i}' for i in range(5000)) + ', "input": "a", "label": "a"}\n').encode(),
    "long key": b'{"' + b"k" * 100_000 + b'": 1, "input": "a", "label": "a"}\n',
    "messages": b'{"input": [{"role": "user", "content": "a"}], "label": "a"}\n',
    "unknown role": b'{"input": [{"role": "\\u001b[31m", "content": "a"}], "label": "a"}\n',
    "message with tool calls": b'{"input": [{"role": "assistant", "content": null, "tool_calls": 7}], "label": "a"}\n',
    "content parts": b'{"input": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "label": "a"}\n',
    "content parts that are wrong": b'{"input": [{"role": "user", "content": [{"type": 1}]}], "label": "a"}\n',
    "messages in text": b'{"input": "[{\\"role\\": \\"user\\"", "label": "a"}\n',
}  # fmt: skip

JSON: dict[str, bytes] = {
    "number": b"1",
    "text": b'"x"',
    "null": b"null",
    "empty list": b"[]",
    "empty object": b"{}",
    "list of numbers": b"[1, 2]",
    "list of lists": b"[[1], [2]]",
    "mixed list": json.dumps([*ROWS, 1]).encode(),
    "open list": json.dumps(ROWS).encode()[:-1],
    "trailing comma": json.dumps(ROWS).encode()[:-1] + b",]",
    "deep": b"[" * DEEP + b"]" * DEEP,
    "columns": json.dumps({"input": ["a", "b"], "label": ["a", "b"]}).encode(),
    "columns of other lengths": json.dumps({"input": ["a", "b"], "label": ["a"]}).encode(),
    "data key": json.dumps({"data": ROWS}).encode(),
    "binary": bytes(range(256)),
    "huge number": b"[" + b"9" * 5000 + b"]",
}

CSV: dict[str, bytes] = {
    "empty": b"",
    "header alone": b"input,label\n",
    "no column": b"a,b\n1,2\n",
    "other lengths": b"input,label\na\nb,c,d\n",
    "binary": bytes(range(256)) * 4,
    "zeros": bytes(1000),
    "nul": b"input,label\na\x00b,c\n",
    "open quote": b'input,label\n"abc,d\n',
    "latin-1": b"input,label\ncaf\xe9,x\n",
    "same header twice": b"input,input\na,b\n",
    "long field": b"input,label\n" + b"x" * 300_000 + b",a\n",
    "utf-16": "input,label\na,b\n".encode("utf-16"),
    "numbers": b"input,label\n1,2\n",
    "escape in the header": b"\x1b[31m,label\na,b\n",
    "semicolons": b"input;label\na;b\n",
    "bom": b"\xef\xbb\xbfinput,label\na,b\n",
}

FAULTY_SOURCES = (
    "data.jsonl@[", "data.jsonl@[]x", "data.jsonl@[1:1]", "data.jsonl@[9:]", "data.jsonl@[a:b]", "data.jsonl@[::2]", "data.jsonl@[1]", "data.jsonl@train", "data.txt",
    f"data.jsonl@[{'9' * 5000}:]", "data.jsonl@[-1:-2]", "@[1:2]", "@", "data", "reasoning_gym:", "reasoning_gym:nope", "reasoning_gym:chain_sum?", "reasoning_gym:chain_sum?size=0",
    "reasoning_gym:chain_sum?size=-1", "reasoning_gym:chain_sum?size=x", "reasoning_gym:chain_sum?nope=1", "reasoning_gym:chain_sum?min_terms=9&max_terms=1", "reasoning_gym:chain_sum?size=1e400",
    "reasoning_gym:chain_sum?seed=" + "9" * 5000, "reasoning_gym:chain_sum?size==", "reasoning_gym:\x1b[31m", "os:getcwd", "os:nope", "nope.py:x", "json:loads", "reader.py:numbers", "reader.py:raises",
    "reader.py:exits", "reader.py:kills", "reader.py:empty", "reader.py:text", "reader.py:liar", "reader.py:bad_row", "a/b/c/d", "nope/nope", "../x.jsonl", "/dev/zero", "pipe.jsonl", "zero.jsonl", "folder.jsonl",
    "loop.jsonl", "x" * 300 + ".jsonl", "x/" * 3000 + ".jsonl", "~nosuchuser/x.jsonl", "\udcff.jsonl", "a\nb.jsonl", "\x1b[31m.jsonl", "empty_folder", "folder_of_rubbish", "hole.jsonl", "hole.parquet", "/proc/self/mem",
    "s3://x/y.jsonl", "https://127.0.0.1:9/x.jsonl", "file:///etc/passwd", "C:\\x.jsonl", "data.jsonl:x", "data.jsonl@[0:2]@[0:1]x",
)  # fmt: skip

READER = """
import os, sys
numbers = [1, 2, 3]
empty = []
text = "abc"
bad_row = [{"input": object()}]
def raises(): raise ValueError("\\x1b[31mno\\ndata")
def exits(): sys.exit(0)
def kills(): raise KeyboardInterrupt
class liar:
    columns = ["input", "label"]
    def __len__(self): return 5
    def row(self, index): raise RuntimeError("no row")
    def column(self, name, start, stop): return []
    def locate(self, index): return 3
"""


def cases() -> Iterator[Case]:
    """Files of every format with every damage, and sources that name no data."""
    for name, content in FAULTY_LINES.items():
        for command in ("plan", "train", "eval"):
            yield Case(f"data/{command} jsonl {name}", partial(_make, command, "d.jsonl", content, False), faulty=True)
    for name, content in ODD_LINES.items():
        yield Case(f"data/plan jsonl {name}", partial(_make, "plan", "d.jsonl", content, False))
        for chat in (False, True):
            yield Case(f"data/train jsonl {name} {chat=}", partial(_make, "train", "d.jsonl", content, chat))
    for suffix, files in (("json", JSON), ("csv", CSV)):
        for name, content in files.items():
            for command in ("plan", "train"):
                yield Case(f"data/{command} {suffix} {name}", partial(_make, command, f"d.{suffix}", content, False))
    for number in range(40):
        yield Case(
            f"data/plan jsonl bytes {number}",
            partial(_make, "plan", "d.jsonl", _damaged(LINES.encode(), number), False),
        )
    for number in range(60):
        content = partial(_damaged_parquet, number)
        yield Case(
            f"data/{('plan', 'train')[number % 2]} parquet {number}",
            partial(_make_late, ("plan", "train")[number % 2], "d.parquet", content),
        )
    for name, columns in PARQUET.items():
        yield Case(f"data/train parquet {name}", partial(_make_late, "train", "d.parquet", partial(_parquet, columns)))
    for suffix in ("jsonl", "json", "csv", "parquet"):
        yield Case(
            f"data/plan rows as {suffix}",
            partial(_make, "plan", f"d.{suffix}", b"PAR1" + bytes(100) + b"PAR1", False),
            faulty=True,
        )
    for source in FAULTY_SOURCES:
        shown = source[:40].encode("unicode_escape").decode()
        yield Case(f"data/plan source {shown} {len(source)}", partial(_make_source, "plan", source), faulty=True)
        yield Case(f"data/eval source {shown} {len(source)}", partial(_make_source, "eval", source), faulty=True)


def _make(command: str, file: str, content: bytes, chat: bool, folder: Path, bench: Bench) -> Words:
    path = folder / file
    path.write_bytes(content)
    source = {"--eval-prompt-data": f"x={path}"} if command == "eval" else {"--prompt-data": str(path)}
    return bench.words(command, source | ({"--apply-chat-template": ()} if chat else {}))


def _make_late(command: str, file: str, content: Callable[[], bytes], folder: Path, bench: Bench) -> Words:
    return _make(command, file, content(), False, folder, bench)


def _damaged(content: bytes, number: int) -> bytes:
    random = rng(f"data {number}")
    text = bytearray(content)
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(text))
        if random.random() < 0.5:
            text[at] = random.randrange(256)
        else:
            del text[at : at + random.randint(1, 20)]
    return bytes(text)


def _parquet(columns: dict[str, Any]) -> bytes:
    import pyarrow as pa
    from pyarrow import parquet

    buffer = io.BytesIO()
    parquet.write_table(pa.table(columns), buffer)
    return buffer.getvalue()


def _damaged_parquet(number: int) -> bytes:
    """A sound parquet file that is cut, or has some of its bytes changed."""
    random = rng(f"parquet {number}")
    sound = _parquet({"input": [row["input"] for row in ROWS], "label": [row["label"] for row in ROWS]})
    if number % 3 == 0:
        return sound[: random.randrange(len(sound))]
    text = bytearray(sound)
    for _ in range(random.randint(1, 12)):
        text[random.randrange(4, len(text))] = random.randrange(256)
    return bytes(text)


PARQUET: dict[str, dict[str, Any]] = {
    "no rows": {"input": [], "label": []},
    "no columns": {},
    "numbers": {"input": [1, 2], "label": ["a", "b"]},
    "bytes": {"input": [b"\xff", b"\xfe"], "label": ["a", "b"]},
    "label of bytes": {"input": ["a", "b"], "label": [b"\xff", b"\xfe"]},
    "dates": {"input": ["a", "b"], "label": [__import__("datetime").datetime(2020, 1, 1)] * 2},
    "decimals": {"input": ["a", "b"], "label": [__import__("decimal").Decimal("1.5")] * 2},
    "nulls": {"input": [None, None], "label": ["a", "b"]},
    "structs": {"input": ["a", "b"], "label": [{"x": 1, "y": [1]}, {"x": None, "y": []}]},
    "maps of bytes": {"input": ["a", "b"], "label": [{"x": b"\xff"}, {"x": b""}]},
    "nan": {"input": ["a", "b"], "label": [float("nan"), float("inf")]},
}


def _make_source(command: str, source: str, folder: Path, bench: Bench) -> Words:
    """A source that names no data, in a folder with things that are none."""
    (folder / "data.jsonl").write_text(LINES)
    (folder / "data.txt").write_text(LINES)
    (folder / "reader.py").write_text(READER)
    os.mkfifo(folder / "pipe.jsonl")
    (folder / "zero.jsonl").symlink_to("/dev/zero")
    (folder / "loop.jsonl").symlink_to("loop.jsonl")
    for name in ("folder.jsonl", "empty_folder", "folder_of_rubbish"):
        (folder / name).mkdir()
    (folder / "folder_of_rubbish" / "x.bin").write_bytes(bytes(range(256)))
    for name in ("hole.jsonl", "hole.parquet"):
        with (folder / name).open("wb") as file:
            file.truncate(1 << 26)
    if command == "eval":
        return bench.words("eval", {"--eval-prompt-data": f"x={source}", "--prompt-data": None})
    return bench.words(command, {"--prompt-data": source})
