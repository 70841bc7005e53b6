"""What counts as a secret, and that none is ever written."""

import json
from pathlib import Path

import pytest

import treadle
from treadle.cli import main
from treadle.config import load_config, recorded, to_toml
from treadle.config.fields import config_fields, override_fields
from treadle.config.secrets import REDACTED, names_secret, secret_names, without_secrets
from treadle.errors import ConfigError

SECRETS = (
    *("hf_token", "hf-token", "token", "api_key", "apiKey", "API_KEY", "apikey", "admin_api_key", "auth-token"),
    *("ssl_keyfile_password", "secret", "client_secret", "aws_secret_access_key", "secretAccessKey", "s3.credentials"),
    *("passwd", "key", "Authorization", "wandb_api_key", "ssh_key"),
)
HARMLESS = (
    *("max_tokens_per_gpu", "num_tokens", "tokenizer", "tokenizer_mode", "eos_token", "token_ids", "pad-token"),
    *("input_key", "label_key", "tools_key", "metadata_key", "keyfile", "num_key_value_heads", "keys", "tokens"),
    *("speculative_token_map", "return_tokens_as_token_ids", "monkey", "secretary", "keep", "max_num_batched_tokens"),
)


@pytest.mark.parametrize("name", SECRETS)
def test_a_secret_is_known_by_its_name(name):
    assert names_secret(name, "x")


@pytest.mark.parametrize("name", HARMLESS)
def test_other_names_are_left_alone(name):
    assert not names_secret(name, "x")


@pytest.mark.parametrize("value", [3, True, None, "3", "0.5", "true", ""])
def test_a_number_or_a_switch_is_no_key(value):
    assert not names_secret("cost_of_a_token", value)
    assert not names_secret("use_key", value)


def test_no_setting_of_treadle_is_a_secret():
    """They come from the environment; a setting with such a name would be written as stars."""
    assert [name for name in (*config_fields(), *override_fields()) if names_secret(name, "x")] == []


def test_secrets_are_replaced_wherever_they_are():
    given = {
        "hf_token": "hush",
        "api_key": ["hush", "hush"],
        "loader": '{"a": [{"s3_secret": "hush", "size": 3}]}',
        "endpoint": "https://me:hush@host:80/x?y",
        "by_token": ("git+https://hush@host/x", "plain"),
        "text": "a: b @ c://d/e@f",
        "json": '{"a":  1}',
        "number": 7,
    }
    found = without_secrets(given)
    assert "hush" not in json.dumps(found)
    assert found["endpoint"] == f"https://{REDACTED}@host:80/x?y"
    assert json.loads(found["loader"]) == {"a": [{"s3_secret": REDACTED, "size": 3}]}
    assert {name: found[name] for name in ("text", "json", "number")} == {
        n: given[n] for n in ("text", "json", "number")
    }
    assert list(secret_names(given)) == ["hf_token", "api_key", "loader.a.s3_secret", "endpoint", "by_token"]


def test_a_configuration_is_written_without_them(capsys):
    words = ("--vllm-hf-token", "hush", "--vllm-api-key=hush", "--hf-checkpoint", "https://me:hush@host/model")
    words += ("--vllm-max-model-len", "512", "--label-key", "answer")
    config = load_config(None, words)
    assert config.engine.vllm["hf_token"] == "hush"
    assert main(["config", *words]) == 0
    for text in (to_toml(config), json.dumps(recorded(config)), capsys.readouterr().out):
        assert "hush" not in text
        assert REDACTED in text
        assert "512" in text
        assert "answer" in text


def test_a_message_does_not_repeat_them(tmp_path):
    recipe = tmp_path / "r.toml"
    recipe.write_text('[engine.vllm]\nhf_token = { name = "hush" }\n\n[model]\nhf_checkpoint = ["http://a:hush@b"]\n')
    with pytest.raises(ConfigError) as caught:
        load_config(recipe)
    assert "hush" not in str(caught.value)


def test_it_is_a_secret_before_anything_starts(tmp_path, capsys):
    code = main(["train", "--rollout-engine", "vllm", "--vllm-hf-token", "hush", "--run-dir", str(tmp_path / "run")])
    err = capsys.readouterr().err
    assert code == 2
    assert "--vllm-hf-token holds a secret" in err
    assert "hush" not in err
    assert not (tmp_path / "run").exists()


def test_nothing_is_written_but_what_is_recorded():
    """config.json of a run and of a checkpoint and the config of a metrics service come from `recorded`."""
    source = Path(treadle.__file__).parent
    found = [p for p in source.rglob("*.py") if 'model_dump(mode="json")' in p.read_text()]
    assert found == [source / "config" / "secrets.py"]
