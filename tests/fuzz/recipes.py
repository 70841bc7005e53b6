"""Recipes that are no TOML, no text, no file, or hold values of the wrong type."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from tests.fuzz.case import Bench, Case, Words, rng
from tests.fuzz.flags import prepare
from treadle.config.fields import ConfigField, config_fields

SOUND = '[optim]\nlr = 1e-4\n\n[rollout]\nrollout_top_k = 5\nrollout_stop = ["x"]\n\n[eval.eval_overrides.a]\neval_top_k = 3\n'

BROKEN: dict[str, bytes] = {
    "bom utf-16": b"\xff\xfe" + SOUND.encode("utf-16-le"),
    "utf-16 without bom": SOUND.encode("utf-16-be"),
    "latin-1": b"[model]\nhf_checkpoint = \"\xe9\"\n",
    "binary": bytes(range(256)) * 8,
    "zeros": bytes(4096),
    "half a character": SOUND.encode() + b"# \xe2\x82",
    "nul in a text": b"[model]\nhf_checkpoint = \"a\x00b\"\n",
    "nul in a key": b"[model]\nhf\x00checkpoint = 1\n",
    "carriage returns alone": SOUND.replace("\n", "\r").encode(),
    "form feed": b"[optim]\n\x0clr = 1\n",
    "escape": b"[optim]\nlr = \x1b[31m\n",
    "escape in a key": b"[optim]\n\"\\u001b[31m\" = 1\n",
    "escape in a section": b"[\"\\u001b[31m\"]\nlr = 1\n",
    "surrogate escape": b"[model]\nhf_checkpoint = \"\\ud800\"\n",
    "code point too high": b"[model]\nhf_checkpoint = \"\\UFFFFFFFF\"\n",
    "unknown escape": b"[model]\nhf_checkpoint = \"\\q\"\n",
    "json": b'{"optim": {"lr": 1}}',
    "yaml": b"optim:\n  lr: 1\n",
    "ini": b"[optim]\nlr: 1\n",
    "python": b"optim = dict(lr=1)\n",
    "unclosed text": b"[model]\nhf_checkpoint = \"abc\n",
    "unclosed long text": b"[model]\nhf_checkpoint = \"\"\"abc\n",
    "unclosed list": b"[data]\nprompt_data = [1,\n",
    "unclosed table": b"[optim\nlr = 1\n",
    "unclosed inline table": b"optim = {lr = 1\n",
    "empty table name": b"[]\nlr = 1\n",
    "no value": b"[optim]\nlr =\n",
    "no key": b"[optim]\n= 1\n",
    "two values": b"[optim]\nlr = 1 2\n",
    "two keys": b"[optim]\nlr = 1\nlr = 2\n",
    "two tables": b"[optim]\nlr = 1\n[optim]\nmin_lr = 0\n",
    "a key that is a table": b"[optim]\nlr.x = 1\n",
    "a table over a key": b"optim = 1\n[optim]\nlr = 1\n",
    "array of tables": b"[[optim]]\nlr = 1\n",
    "array of overrides": b"[[eval.eval_overrides]]\nx = 1\n",
    "override that is a number": b"[eval]\neval_overrides = 1\n",
    "override that is a list": b"[eval]\neval_overrides = [1]\n",
    "override of numbers": b"[eval.eval_overrides]\na = 1\n",
    "override unknown": b"[eval.eval_overrides.a]\nnope = 1\n",
    "override wrong": b"[eval.eval_overrides.a]\neval_top_p = 2\n",
    "override deep": b"[eval.eval_overrides.a.b.c]\nx = 1\n",
    "unknown section": b"[optimiser]\nlr = 1\n",
    "unknown key": b"[optim]\nlearning_rate = 1\n",
    "key outside sections": b"lr = 1\n",
    "key in another section": b"[model]\nlr = 1\n",
    "section as number": b"optim = 1\n",
    "section as text": b"optim = \"x\"\n",
    "section as list": b"optim = [1, 2]\n",
    "date": b"[optim]\nlr = 2020-01-01\n",
    "time": b"[optim]\nlr = 10:00:00\n",
    "bad date": b"[optim]\nlr = 2020-13-45\n",
    "5000 digits": b"[train]\nseed = " + b"9" * 5000 + b"\n",
    "5000 digits in a float": b"[optim]\nlr = " + b"9" * 5000 + b".0\n",
    "5000 digits in a list": b"[rollout]\nrollout_stop_token_ids = [" + b"9" * 5000 + b"]\n",
    "hex of 5000 digits": b"[train]\nseed = 0x" + b"f" * 5000 + b"\n",
    "beyond 64 bits": b"[train]\nseed = 18446744073709551616\n",
    "minus beyond 64 bits": b"[optim]\nlr_warmup_steps = -18446744073709551616\n",
    "beyond 64 bits in a list": b"[rollout]\nrollout_stop_token_ids = [99999999999999999999]\n",
    "infinite": b"[optim]\nlr = inf\n",
    "nan": b"[optim]\nlr = nan\n",
    "nan in a list": b"[reward]\nrm_weights = [nan]\n",
    "overflowing": b"[optim]\nlr = 1e400\n",
    "leading zero": b"[train]\nseed = 007\n",
    "two underscores": b"[train]\nseed = 1__0\n",
    "lists too deep": b"[data]\nprompt_data = " + b"[" * 3000 + b"]" * 3000 + b"\n",
    "lists open too deep": b"[data]\nprompt_data = " + b"[" * 100_000,
    "inline tables too deep": b"optim = " + b"{a=" * 3000 + b"1" + b"}" * 3000 + b"\n",
    "dotted key too deep": b".".join([b"a"] * 5000) + b" = 1\n",
    "table too deep": b"[" + b".".join([b"a"] * 5000) + b"]\nx = 1\n",
    "dotted key deep below a field": b"[optim]\nlr." + b".".join([b"a"] * 1500) + b" = 1\n",
    "dotted key deep below an argument": b"[engine.vllm]\nx." + b".".join([b"a"] * 1500) + b" = 1\n",
    "long key": b"[optim]\n" + b"x" * 100_000 + b" = 1\n",
    "long section": b"[" + b"x" * 100_000 + b"]\n",
    "long line of rubbish": b"x" * 1_000_000,
    "many unknown keys": b"[optim]\n" + b"".join(b"key_%d = 1\n" % i for i in range(2000)),
    "many sections": b"".join(b"[s%d]\n" % i for i in range(2000)),
    "vllm number": b"[engine]\nvllm = 1\n",
    "vllm nested": b"[engine.vllm]\nx = {y = 1}\n",
    "list of lists": b"[data]\nprompt_data = [[\"a\"]]\n",
    "list of numbers": b"[data]\nprompt_data = [1, 2]\n",
    "mixed list": b"[data]\nprompt_data = [\"a\", 1, true]\n",
    "colour in a message": b"[optim]\nlr = \"\\u001b[31mred\"\n",
    "line break in a message": b"[optim]\nlr = \"a\\nb\\nc\"\n",
    "bidi in a message": b"[optim]\nlr = \"\\u202eabc\"\n",
    "choice with a line break": b"[model]\ndtype = \"float32\\n\"\n",
}  # fmt: skip

ODD: dict[str, bytes] = {
    "vllm date": b"[engine.vllm]\nx = 2020-01-01\n",
    "empty": b"",
    "bom": b"\xef\xbb\xbf" + SOUND.encode(),
    "bom alone": b"\xef\xbb\xbf",
    "line ends of windows": SOUND.replace("\n", "\r\n").encode(),
    "comments": b"# x\n" * 10_000,
    "home in a path": b"[observe]\nrun_dir = \"~nosuchuser/x\"\n",
    "home of mine": b"[model]\nref_load = \"~/nosuch\"\n[algorithm]\nuse_kl_loss = true\nkl_loss_coef = 0.1\n",
    "nul by escape": b"[data]\nprompt_suffix = \"a\\u0000b\"\n",
    "nul in a file name": b"[data]\nprompt_data = [\"a\\u0000b.jsonl\"]\n",
    "nul in a model": b"[model]\nref_load = \"a\\u0000b\"\n[algorithm]\nuse_kl_loss = true\nkl_loss_coef = 0.1\n",
    "nul in a run folder": b"[observe]\nrun_dir = \"a\\u0000b\"\n",
    "nul in a load": b"[checkpoint]\nload = \"a\\u0000b\"\n",
    "nul in a save": b"[checkpoint]\nsave = \"a\\u0000b\"\n",
    "nul in a module": b"[reward]\ncustom_rm_path = \"a\\u0000b.py:x\"\n",
    "nul in a pattern": b"[reward]\nrm_type = [\"regex\"]\nrm_regex = \"\\u0000(\"\n",
    "nul in a column": b"[data]\nlabel_key = \"\\u0000\"\n",
    "empty texts": b"[observe]\nrun_dir = \"\"\n[checkpoint]\nsave = \"\"\nload = \"\"\n",
    "empty model": b"[model]\nhf_checkpoint = \"\"\n",
    "weights that are huge": b"[data]\nprompt_data_weights = [1e308]\n",
    "weights that are tiny": b"[data]\nprompt_data_weights = [5e-324]\n",
    "pattern that explodes": b"[reward]\nrm_type = [\"regex\"]\nrm_regex = \"(((((((((a*)*)*)*)*)*)*)*)*\"\n",
    "pattern that is deep": b"[reward]\nrm_type = [\"regex\"]\nrm_regex = \"" + b"(" * 5000 + b")" * 5000 + b"\"\n",
    "pattern with a huge count": b"[reward]\nrm_type = [\"regex\"]\nrm_regex = \"a{99999999999999999999}\"\n",
}  # fmt: skip

WRONG_TYPES = (
    "1",
    "1.5",
    "true",
    '"x"',
    "[]",
    '["x"]',
    "[1]",
    "{}",
    "{a = 1}",
    "1979-05-27",
    "inf",
    "-1",
    '""',
    "[[]]",
    "99999999999999999999",
)
VALUES_OF_A_FIELD = 1


def cases() -> Iterator[Case]:
    """Broken files, odd files, a sound file with one byte damaged, and each field with values of other types."""
    for name, content in BROKEN.items():
        yield Case(f"recipes/broken {name}", partial(_make_file, "config", content), faulty=True)
        if len(content) < 1000:
            yield Case(f"recipes/broken {name} with train", partial(_make_file, "train", content), faulty=True)
    for name, content in ODD.items():
        for command in ("config", "plan", "train"):
            yield Case(f"recipes/{command} odd {name}", partial(_make_file, command, content))
    for number in range(80):
        yield Case(f"recipes/one byte {number}", partial(_make_file, "config", _damaged(number)))
    for field in config_fields().values():
        for value in rng(f"types of {field.name}").sample(WRONG_TYPES, VALUES_OF_A_FIELD):
            content = f"[{field.section}]\n{field.name} = {value}\n".encode()
            yield Case(
                f"recipes/{field.name} = {value}", partial(_make_file, "config", content), _is_wrong(field, value)
            )
    for name, write in PLACES.items():
        yield Case(f"recipes/place {name}", partial(_make_place, write), faulty=True)


def _is_wrong(field: ConfigField, value: str) -> bool:
    """Whether the value is certainly of no use: a number where a list is wanted, a list where a number is."""
    is_table, is_list = value.startswith("{"), value.startswith("[")
    if field.recipe_only:
        return not is_table
    if field.name == "chat_template_kwargs":  # a table that a flag can set too
        return is_list
    return is_table or (is_list and not field.is_list) or (field.is_list and not is_list)


def _damaged(number: int) -> bytes:
    """The sound recipe with one to three bytes changed, inserted or deleted."""
    random = rng(f"recipe {number}")
    text = bytearray(SOUND.encode())
    for _ in range(random.randint(1, 3)):
        at = random.randrange(len(text))
        kind = random.randrange(3)
        if kind == 0:
            text[at] = random.randrange(256)
        elif kind == 1:
            text.insert(at, random.choice(b"[]{}\"'=.,#\n\\0e-\x00\xff"))
        else:
            del text[at : at + random.randint(1, 10)]
    return bytes(text)


def _make_file(command: str, content: bytes, folder: Path, bench: Bench) -> Words:
    """A command that reads the recipe; flags that a recipe of this kind sets are left to it."""
    path = folder / "recipe.toml"
    path.write_bytes(content)
    if command == "config":
        return ["config", str(path)]
    own = {
        f"--{line.split(b'=')[0].strip().decode(errors='replace').replace('_', '-')}": None
        for line in content.splitlines()
        if b"=" in line
    }
    return bench.words(command, own, recipe=path)


def _fifo(folder: Path) -> str:
    os.mkfifo(folder / "r.toml")
    return "r.toml"


def _fifo_by_link(folder: Path) -> str:
    os.mkfifo(folder / "p")
    (folder / "r.toml").symlink_to("p")
    return "r.toml"


def _folder(folder: Path) -> str:
    (folder / "r.toml").mkdir()
    return "r.toml"


def _large(folder: Path) -> str:
    with (folder / "r.toml").open("wb") as file:
        file.truncate(8 << 30)  # a hole: takes no space
    return "r.toml"


PLACES: dict[str, Callable[[Path], str]] = {
    "fifo": _fifo,
    "link to a fifo": _fifo_by_link,
    "folder": _folder,
    "8 GiB": _large,
    "zero": lambda folder: "/dev/zero",
    "below a file": lambda folder: f"{folder.parent}/data.jsonl/r.toml",
    "too long": lambda folder: "x" * 300 + ".toml",
    "far too long": lambda folder: "x/" * 5000 + "r.toml",
    "no user": lambda folder: "~nosuchuser/r.toml",
    "missing": lambda folder: "missing.toml",
    "missing folder": lambda folder: "missing/r.toml",
    "empty name": lambda folder: "",
    "surrogate": lambda folder: "\udcff.toml",
    "memory": lambda folder: "/proc/self/mem",
    "colour": lambda folder: "\x1b[31m.toml",
    "line break": lambda folder: "a\nb.toml",
}


def _make_place(write: Callable[[Path], str], folder: Path, bench: Bench) -> Words:
    prepare(folder)
    return ["config", write(folder)]
