"""What is no recipe is refused in one line, at once, and never read to its end."""

import os
from pathlib import Path

import pytest

from treadle.config import load_config
from treadle.errors import ConfigError


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 1500
    return message


def test_a_byte_order_mark_is_no_part_of_a_recipe(tmp_path: Path):
    recipe = tmp_path / "r.toml"
    recipe.write_bytes(b"\xef\xbb\xbf[train]\nseed = 5\n")
    assert load_config(recipe).train.seed == 5


def test_a_pipe_a_device_and_a_folder_are_no_recipes(tmp_path: Path):
    pipe = tmp_path / "pipe.toml"
    os.mkfifo(pipe)
    assert "a pipe or a device, not a file" in refusal(pipe)
    assert "a pipe or a device, not a file" in refusal(Path("/dev/zero"))
    assert "Is a directory" in refusal(tmp_path)


def test_a_huge_file_is_not_read(tmp_path: Path):
    with (tmp_path / "r.toml").open("wb") as file:
        file.truncate(1 << 40)
    assert "more than" in refusal(tmp_path / "r.toml")


@pytest.mark.parametrize("name", ["x" * 300 + ".toml", "x/" * 3000 + "r.toml", "no/such\x1b[31m.toml", "a\nb.toml"])
def test_odd_names_of_recipes(name: str, tmp_path: Path):
    assert "recipe" in refusal(tmp_path / name)


@pytest.mark.parametrize(
    "text",
    [
        "[data]\nprompt_data = " + "[" * 3000 + "]" * 3000,
        "[data]\nprompt_data = " + "[" * 100_000,
        "optim = " + "{a=" * 3000 + "1" + "}" * 3000,
        ".".join(["a"] * 5000) + " = 1",
        "[" + ".".join(["a"] * 5000) + "]",
        "[optim]\nlr." + ".".join(["a"] * 1500) + " = 1",
        "[engine.vllm]\nx." + ".".join(["a"] * 1500) + " = 1",
        "[optim]\n" + "".join(f"key_{i} = 1\n" for i in range(2000)),
        "[optim]\n" + "x" * 100_000 + " = 1",
        "[" + "x" * 100_000 + "]",
        "x" * 1_000_000,
        '["\\u001b[31m"]\nx = 1',
        '[optim]\n"\\u001b[31m" = 1',
        '[optim]\nlr = "a\\nb"',
        "[optim]\nlr = 2020-02-31",
    ],
    ids=range(15),
)
def test_odd_recipes_are_one_short_line(text: str, tmp_path: Path):
    recipe = tmp_path / "r.toml"
    recipe.write_text(text)
    refusal(recipe)
