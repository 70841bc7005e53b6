"""What holds for every value: 64 bits, UTF-8, paths that can be paths, messages of one short line."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from treadle.config import Config, load_config
from treadle.config.fields import config_fields
from treadle.config.values import first_few, written
from treadle.errors import ConfigError

PATH_FIELDS = [field.name for field in config_fields().values() if field.declared.path]


def refusal(*argv: str, recipe: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, argv)
    message = str(caught.value)
    assert message.isprintable()  # one line, nothing in it that acts on a terminal
    assert len(message) < 1000
    return message


@pytest.mark.parametrize("name", [f.name for f in config_fields().values() if "integer" in f.kind])
@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 10**30])
def test_an_integer_of_any_field_fits_in_64_bits(name: str, value: int):
    flag = f"{config_fields()[name].flag}={value}"
    assert config_fields()[name].flag in refusal(flag)
    section = config_fields()[name].section
    wrong = [value] if config_fields()[name].is_list else value
    with pytest.raises(ValidationError):
        Config.model_validate({section: {name: wrong}})


def test_the_largest_integer_is_taken():
    assert load_config(None, ["--seed", str(2**63 - 1)]).train.seed == 2**63 - 1


def test_an_integer_of_5000_digits_is_one_short_line(tmp_path: Path):
    assert "(5000 characters)" in refusal("--seed", "9" * 5000)
    for number in ("9" * 5000, "0x" + "f" * 5000):
        recipe = tmp_path / "r.toml"
        recipe.write_text(f"[train]\nseed = {number}\n")
        assert "64 bits" in refusal(recipe=recipe)


def test_every_number_is_finite():
    for text in ("nan", "inf", "-inf", "1e400", "9" * 5000):
        assert "--lr" in refusal("--lr", text)


def test_every_number_fits_in_a_float32():
    assert "float32" in refusal("--reward-clip-high", "1e300")
    assert load_config(None, ["--reward-clip-high", "3e38"]).reward.reward_clip_high == 3e38


def test_text_that_is_not_utf_8_is_refused():
    assert "UTF-8" in refusal("--prompt-suffix", "\udcff")
    assert "UTF-8" in refusal("--rollout-stop", "a", "\udcff")


def test_the_fields_that_hold_paths_are_fields_of_text():
    assert all("text" in config_fields()[name].kind for name in PATH_FIELDS)


@pytest.mark.parametrize("name", sorted(PATH_FIELDS))
def test_a_tilde_is_the_home_folder_in_flags_and_recipes_alike(name: str, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("HOME", "/h")
    field = config_fields()[name]
    given, wanted = ("x=~/a", "x=/h/a") if name == "eval_prompt_data" else ("~/a", "/h/a")
    recipe = tmp_path / "r.toml"
    recipe.write_text(f"[{field.section}]\n{name} = {[given] if field.is_list else given!r}\n".replace("'", '"'))
    for config in (load_config(None, [field.flag, given]), load_config(recipe)):
        assert getattr(getattr(config, field.section), name) == ((wanted,) if field.is_list else wanted)


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("~nosuchuser/x", "home folder of 'nosuchuser'"),
        ("x" * 256, "255 bytes"),
        ("é" * 128, "255 bytes"),
        ("x/" * 3000, "4095 in all"),
    ],
)
def test_what_can_be_no_path_is_refused(path: str, part: str):
    for flag in ("--run-dir", "--hf-checkpoint", "--prompt-data", "--custom-rm-path"):
        assert part in refusal(flag, path)
    assert part in refusal("--eval-prompt-data", f"x={path}")


def test_a_zero_byte_is_in_no_path(tmp_path: Path):
    recipe = tmp_path / "r.toml"
    recipe.write_text('[observe]\nrun_dir = "a\\u0000b"\n')
    assert "zero byte" in refusal(recipe=recipe)


def test_a_tilde_in_other_text_stays():
    assert load_config(None, ["--prompt-suffix", "~/x"]).data.prompt_suffix == "~/x"
    assert load_config(None, ["--run-dir", "a/~/b"]).observe.run_dir == "a/~/b"


def test_a_long_list_of_faults_is_cut():
    assert "and 1997 more" in refusal("--rollout-stop-token-ids", *["x"] * 2000)
    assert first_few(["a", "b"]) == ["a", "b"]
    assert first_few(["a", "b", "c", "d"], most=3) == ["a", "b", "c", "and 1 more like it"]


def test_values_in_messages_are_harmless():
    assert written("\x1b[31m") == r"'\x1b[31m'"
    assert written("") == "''"
    assert "\x1b" not in refusal("--lr", "\x1b[31m")
    assert "\n" not in refusal("--lr", "\n")
