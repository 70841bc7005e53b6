"""Recipes and flags become one configuration, and mistakes in them one clear line."""

import math
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.config import Config, load_config, to_toml
from treadle.config.fields import config_fields
from treadle.config.recipe import to_toml_value
from treadle.errors import ConfigError


@pytest.fixture
def recipe(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "quick.toml"
        path.write_text(text)
        return path

    return write


def refusal(path: Path | None, *argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, argv)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_nothing_given_is_the_default():
    assert load_config(None) == Config()


def test_later_wins(recipe):
    path = recipe("[rollout]\nrollout_batch_size = 4\nn_samples_per_prompt = 2\n[optim]\nlr = 1\n")
    config = load_config(path, ["--rollout-batch-size", "32"])
    assert (config.rollout.rollout_batch_size, config.rollout.n_samples_per_prompt) == (32, 2)
    assert config.optim.lr == 1.0
    assert isinstance(config.optim.lr, float)
    assert config.rollout.rollout_top_k == 0


def test_flag_rescues_a_bad_recipe_value(recipe):
    path = recipe("[rollout]\nrollout_batch_size = 0\n")
    assert load_config(path, ["--rollout-batch-size", "3"]).rollout.rollout_batch_size == 3


def test_lists_take_several_words_exactly_as_typed():
    argv = ["--prompt-data", "a", "b", "--rollout-stop", "\n", "END", "--rollout-stop-token-ids", "1", "2"]
    config = load_config(None, argv)
    assert config.data.prompt_data == ("a", "b")
    assert config.rollout.rollout_stop == ("\n", "END")
    assert config.rollout.rollout_stop_token_ids == (1, 2)


def test_empty_list_and_none_unset_what_the_recipe_gave(recipe):
    path = recipe('[rollout]\nrollout_stop = ["x"]\n[train]\nglobal_batch_size = 8\n')
    config = load_config(path, ["--rollout-stop", "--global-batch-size", "None"])
    assert config.rollout.rollout_stop == ()
    assert config.train.global_batch_size is None


@pytest.mark.parametrize(
    ("in_recipe", "flags", "value"),
    [
        ("true", [], True),
        ("true", ["--no-use-kl-loss"], False),
        ("false", ["--use-kl-loss"], True),
        ("false", ["--no-use-kl-loss"], False),
    ],
)
def test_switches(recipe, in_recipe, flags, value):
    assert load_config(recipe(f"[algorithm]\nuse_kl_loss = {in_recipe}\n"), flags).algorithm.use_kl_loss is value


def test_negative_numbers_equals_signs_and_underscores():
    config = load_config(None, ["--entropy-coef", "-0.5", "--lr=1e-5", "--rollout_batch_size", "3"])
    assert (config.algorithm.entropy_coef, config.optim.lr, config.rollout.rollout_batch_size) == (-0.5, 1e-5, 3)


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--rollout-batch-sze", "3"], ["--rollout-batch-sze", "did you mean --rollout-batch-size"]),
        (["--no-use-kl-los"], ["did you mean --no-use-kl-loss"]),
        (["--rollout-batch-size", "0"], ["--rollout-batch-size 0", "greater than or equal to 1"]),
        (["--rollout-batch-size", "x"], ["--rollout-batch-size x", "integer", "≥ 1"]),
        (["--lr", "nan"], ["--lr nan", "finite"]),
        (["--lr", "inf"], ["--lr inf", "finite"]),
        (["--dtype", "fp8"], ["--dtype fp8", "'auto', 'float32' or 'bfloat16'"]),
        (["--rollout-stop-token-ids", "1", "two"], ["--rollout-stop-token-ids two", "integer"]),
        (["--rollout-batch-size"], ["--rollout-batch-size needs a value"]),
        (["--use-kl-loss", "true"], ["'true'", "--no-flag"]),
        (["--lr", "1", "quick.toml"], ["'quick.toml'", "first argument"]),
        (["--eval-overrides", "x"], ["[eval.eval_overrides.NAME]"]),
        (["--lr", "x", "--eps-clip", "7"], ["--lr x", "--eps-clip 7", "less than or equal to 1"]),
    ],
)
def test_bad_flags(argv, parts):
    message = refusal(None, *argv)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[train]\nrollout_batch_size = 3\n", ["rollout_batch_size belongs in [rollout], not in [train]"]),
        ("rollout_batch_size = 3\n", ["rollout_batch_size belongs in [rollout]"]),
        ("[rolout]\n", ["no section [rolout]", "'[rollout]'"]),
        ("[train]\nrollout_batch_sze = 3\n", ["no field rollout_batch_sze", "rollout_batch_size in [rollout]"]),
        ("rollout = 3\n", ["must be a table: [rollout]"]),
        ("[eval.eval_overrides.math]\neval_temprature = 1\n", ["eval_temprature", "did you mean 'eval_temperature'"]),
        ("[eval.eval_overrides.math]\neval_temperature = -1\n", ["math.eval_temperature = -1", "equal to 0"]),
        ("[rollout]\nrollout_batch_size = '16'\n", ['rollout_batch_size = "16" in [rollout]', "integer"]),
        ("[rollout]\nrollout_batch_size = true\n", ["rollout_batch_size = true", "integer"]),
        ("[rollout]\nrollout_stop = 'x'\n", ['rollout_stop = "x"', "list"]),
        ("[rollout]\nrollout_top_p = 2\n", ["rollout_top_p = 2", "less than or equal to 1"]),
        ("[optim]\nlr = inf\n", ["lr", "finite"]),
        ("[optim]\nlr = 1979-05-27\n", ["1979-05-27", "number"]),
        ("[optim]\nlr = 1\n\n[rollout\n", ["quick.toml, line 4"]),
        ("[optim]\nlr = ", ["quick.toml, line 2"]),
        ("a = 1\na = 2\n", ["quick.toml, line 2"]),
    ],
)
def test_bad_recipes(recipe, text, parts):
    message = refusal(recipe(text))
    for part in [*parts, "quick.toml"]:
        assert part in message


def test_missing_and_unreadable_recipes(recipe, tmp_path):
    recipe("")
    assert "quick.toml'?" in refusal(tmp_path / "quik.toml")
    assert f"no folder {tmp_path / 'no'}" in refusal(tmp_path / "no" / "x.toml")
    assert "directory" in refusal(tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"a = \xff")
    assert "UTF-8" in refusal(tmp_path / "binary.toml")


def test_help_groups_flags_by_section_and_shows_what_the_recipe_says(recipe, capsys):
    path = recipe("[rollout]\nrollout_batch_size = 77\n")
    with pytest.raises(SystemExit) as stop:
        load_config(path, ["--help"], prog="treadle train [RECIPE]")
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert "usage: treadle train [RECIPE]" in shown
    assert "rollout options" in shown
    assert "(recipe: 77)" in shown
    for field in config_fields().values():
        assert (field.flag in shown) is not field.recipe_only


def test_toml_loads_back_identically(recipe):
    text = """
[model]
hf_checkpoint = "é \\u007f \\n 'quoted' \\" \\\\ 😀"
[rollout]
rollout_stop = ["\\n", "</a>"]
[eval]
eval_prompt_data = ["a.b=x"]
[eval.eval_overrides."a.b"]
eval_temperature = 1
rm_type = ["math", "exact"]
"""
    config = load_config(recipe(text), ["--lr", "1e-16", "--num-epoch", "2"])
    assert load_config(recipe(to_toml(config))) == config
    assert config.eval.eval_overrides["a.b"].eval_temperature == 1.0


def test_toml_of_the_default_loads_back(recipe):
    assert load_config(recipe(to_toml(Config()))) == Config()
    # TOML can't say None: it may only ever be a default.
    assert all(field.default is None for field in config_fields().values() if field.optional)


@settings(max_examples=200, deadline=None)
@given(
    st.one_of(
        st.text(st.characters(exclude_categories=("Cs",))), st.integers(-(2**63), 2**63 - 1), st.booleans(), st.floats()
    )
)
def test_any_value_survives_toml(value):
    back = tomllib.loads(f"x = {to_toml_value(value)}")["x"]
    assert type(back) is type(value)
    assert back == value or (math.isnan(back) and math.isnan(value))


# Arguments of engines


def test_arguments_of_an_engine_are_passed_by_prefix_and_win_over_the_recipe(recipe):
    path = recipe(
        '[rollout]\nrollout_engine = "vllm"\n[engine.vllm]\nmax_model_len = 256\nenforce_eager = true\nlora = ["a", "b"]\n'
    )
    argv = ["--vllm-max-model-len", "512", "--rollout-batch-size", "4", "--vllm-no-enforce-eager", "--vllm-x.y=--z"]
    config = load_config(path, argv)
    assert config.engine.vllm == {"max_model_len": "512", "enforce_eager": False, "lora": ("a", "b"), "x.y": "--z"}
    assert config.rollout.rollout_batch_size == 4
    assert load_config(recipe(to_toml(config))) == config


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_engine_arguments_alone_are_enough(kind):
    engine = load_config(None, [f"--{kind}-enable-x", f"--{kind}-y", "3"]).engine
    assert engine.arguments(kind) == {"enable_x": True, "y": "3"}
    assert sum(bool(engine.arguments(name)) for name in ("torch", "vllm", "sglang")) == 1


def test_the_table_of_engine_arguments_is_named_in_refusals(recipe):
    assert "[engine.vllm]" in refusal(None, "--vllm", "x")
    assert "vllm.max_model_len" in refusal(recipe("[engine.vllm]\nmax_model_len = {a = 1}\n"))


@pytest.mark.parametrize("name", [name for name in config_fields() if name.endswith("_seconds")])
def test_no_deadline_is_longer_than_what_waits_for_it_can_take(name):
    """A socket takes 2^31 ms: with `--rm-timeout-seconds 1e30` every sample failed."""
    flag = f"--{name.replace('_', '-')}"
    assert load_config(None, [flag, "604800"])
    for value in ("604801", "1e30"):
        assert f"{name}" in (message := refusal(None, flag, value)) or flag in message
