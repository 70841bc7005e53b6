"""Text and messages to token ids and back, on the tiny tokenizer: one token a character, eos is 0."""

import json
import shutil

import numpy as np
import pytest

from treadle.chat import Codec, load_codec
from treadle.errors import ModelError

USER, BOT, EOS = 1, 2, 0


@pytest.fixture
def codec_with(tiny_codec):
    """The tiny codec with another chat template, or other tokens that end an answer."""
    import copy

    def make(template, eos=frozenset({EOS})):
        tokenizer = copy.deepcopy(tiny_codec.tokenizer)
        tokenizer.chat_template = template
        return Codec(tokenizer, eos, "other")

    return make


def test_text_goes_to_ids_and_back(tiny_codec):
    text = "What is 2 + 3?  (two spaces)"
    ids = tiny_codec.encode_text(text)
    assert len(ids) == len(text)
    assert all(isinstance(i, int) for i in ids)
    assert tiny_codec.decode(ids) == text
    assert tiny_codec.decode(np.array(ids, dtype=np.int32)) == text
    assert tiny_codec.decode([]) == ""


def test_spaces_before_punctuation_stay(tiny_codec):
    text = "a , b . c ' s n't ! ?"
    assert tiny_codec.decode(tiny_codec.encode_text(text)) == text


def test_a_response_keeps_every_token_but_those_that_end_it(codec_with):
    codec = codec_with(None, eos=frozenset({EOS, 5}))
    codec.tokenizer.pad_token = "<bot>"
    h, i = codec.encode_text("hi")
    assert codec.decode([h, EOS, USER, i, EOS]) == "h<eos><user>i<eos>"
    for ending in ([], [EOS], [5], [EOS, BOT, BOT], [BOT, 5, EOS, EOS]):
        assert codec.response_text([h, USER, EOS, i, *ending]) == "h<user><eos>i"
        assert codec.response_text(np.array([h, *ending], dtype=np.int32)) == "h"
        assert codec.response_text(ending) == ""


def test_a_stop_token_is_left_out_if_it_is_special_and_ends_the_response(tiny_codec):
    h, i = tiny_codec.encode_text("hi")
    assert tiny_codec.response_text([h, USER, i, USER], (USER, i)) == "h<user>i"
    assert tiny_codec.response_text([h, USER]) == "h<user>"


def test_a_special_token_that_marks_the_answer_reaches_the_text(tiny_codec):
    """As a model whose `<answer>` was added as a special token: a reward's pattern must find it."""
    import copy
    import re

    tokenizer = copy.deepcopy(tiny_codec.tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<answer>", "</answer>"]})
    codec = Codec(tokenizer, frozenset({EOS}), "marks")
    ids = [*codec.encode_rendered("so <answer>42</answer>"), EOS]
    assert len(ids) == 3 + 4 + 1
    assert re.findall("<answer>(.*?)</answer>", codec.response_text(ids)) == ["42"]


def test_messages_are_rendered_to_where_the_answer_begins(tiny_codec):
    assert tiny_codec.has_chat_template
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    text = tiny_codec.render_messages(messages)
    assert text == "<user>a<bot>b<eos><user>c<bot>"
    a, b, c = tiny_codec.encode_text("abc")
    assert tiny_codec.encode_rendered(text) == [USER, a, BOT, b, EOS, USER, c, BOT]


@pytest.mark.parametrize("ended_by_itself", [True, False])
def test_a_reply_continues_as_the_template_does_however_the_turn_ended(tiny_codec, ended_by_itself):
    """Prompt, answer and reply joined are the tokens of the whole conversation rendered at once."""
    prompt, answer = [{"role": "user", "content": "a"}], {"role": "assistant", "content": "b"}
    reply = [{"role": "tool", "content": "c"}, {"role": "user", "content": "d"}]
    sampled = [*tiny_codec.encode_text("b"), *([EOS] if ended_by_itself else [])]
    given = tiny_codec.encode_reply(np.array(sampled, dtype=np.int32), reply)
    joined = [*tiny_codec.encode_rendered(tiny_codec.render_messages(prompt)), *sampled, *given]
    assert joined == tiny_codec.encode_rendered(tiny_codec.render_messages([*prompt, answer, *reply]))
    assert (given[0] == EOS) is not ended_by_itself


def test_a_reply_where_a_turn_ends_with_another_token_than_eos(codec_with):
    """As Gemma's: the end of a turn is in generation_config, and the tokenizer's eos is another."""
    codec = codec_with("{% for m in messages %}{{ m.content }}<user>{% endfor %}<bot>", eos=frozenset({EOS, USER}))
    b, c = codec.encode_text("bc")
    reply = [{"role": "user", "content": "c"}]
    assert codec.encode_reply([b, USER], reply) == [c, USER, BOT]
    assert codec.encode_reply([b], reply) == [USER, c, USER, BOT]
    # A turn may end with a token that the template does not put there: the template's end comes after it.
    assert codec.encode_reply([b, EOS], reply) == [USER, c, USER, BOT]


def test_what_a_turn_has_sampled_of_its_end_is_not_given_twice(codec_with):
    """A template without special tokens, and a stop string that begins the user's header."""
    codec = codec_with("{% for m in messages %}{{ m.content }}##{{ m.role }}:{% endfor %}")
    reply = [{"role": "user", "content": "c"}]
    rest = codec.encode_text("##assistant:c##user:")
    assert codec.encode_reply(codec.encode_text("b"), reply) == rest
    assert codec.encode_reply(codec.encode_text("b#"), reply) == rest[1:]
    assert codec.encode_reply(codec.encode_text("b##"), reply) == rest[2:]
    assert codec.encode_reply([], reply) == rest


def test_an_end_that_the_template_puts_behind_a_space_is_not_given_twice(codec_with):
    """As Llama 2's; what the model sampled before its end stays as it is."""
    codec = codec_with("{% for m in messages %}{{ m.content }} <eos><user>{% endfor %}")
    reply = [{"role": "user", "content": "c"}]
    b, space, c = codec.encode_text("b c")
    assert codec.encode_reply([b, EOS], reply) == [USER, c, space, EOS, USER]
    assert codec.encode_reply([b, space, EOS], reply) == [USER, c, space, EOS, USER]
    assert codec.encode_reply([b], reply) == [space, EOS, USER, c, space, EOS, USER]


def test_no_template_says_what_to_do(codec_with):
    codec = codec_with(None)
    assert not codec.has_chat_template
    with pytest.raises(ModelError, match=r"no chat template.*--apply-chat-template"):
        codec.render_messages([{"role": "user", "content": "a"}])


def test_what_a_template_raises_is_told_in_one_line(codec_with):
    codec = codec_with("{% for m in messages %}{{ raise_exception('roles must alternate') }}{% endfor %}")
    with pytest.raises(ModelError, match="the chat template of 'other' refused the messages: roles must alternate"):
        codec.render_messages([{"role": "user", "content": "a"}])


def test_a_template_that_explodes_is_one_line_that_names_the_model(codec_with):
    with pytest.raises(ModelError, match="the chat template of 'other' refused the messages: it makes far more text"):
        codec_with("{{ 'x' * 2000000 }}").render_messages([{"role": "user", "content": "a"}])
    with pytest.raises(ModelError, match=r"refused the messages: first$"):
        codec_with("{{ raise_exception('first\nsecond') }}").render_messages([{"role": "user", "content": "a"}])


@pytest.fixture
def make_tokenizer():
    """A tokenizer of characters whose post-processor puts tokens around a text, as `<s> $A </s>`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    def make(around, unknown="?"):
        vocab = {token: i for i, token in enumerate(["</s>", "<s>", "?", *"abc "])}
        tokenizer = Tokenizer(models.WordLevel(vocab=vocab, **({"unk_token": unknown} if unknown else {})))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
        tokenizer.decoder = decoders.Fuse()
        special = [(token, vocab[token]) for token in ("<s>", "</s>")]
        tokenizer.post_processor = processors.TemplateProcessing(single=around, special_tokens=special)
        wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
        return Codec(wrapped, frozenset({0}), "around")

    return make


@pytest.mark.parametrize(
    ("around", "want"),
    [("$A", [3, 4]), ("<s> $A", [1, 3, 4]), ("<s> $A </s>", [1, 3, 4]), ("$A </s>", [3, 4])],
)
def test_a_plain_prompt_begins_once_and_does_not_end(make_tokenizer, around, want):
    codec = make_tokenizer(around)
    assert codec.encode_text("ab") == want
    assert codec.encode_text("<s>ab") == [1, 3, 4]
    assert codec.encode_text("<s><s>ab") == [1, 1, 3, 4]  # what a text says itself stays
    assert codec.encode_text("ab</s>") == [*want, 0]
    assert codec.encode_rendered("ab") == [3, 4]


def test_a_tokenizer_without_an_unknown_token_names_what_it_can_not_encode(make_tokenizer):
    codec = make_tokenizer("<s> $A", unknown=None)
    assert codec.encode_text("ab") == [1, 3, 4]
    with pytest.raises(ModelError, match=r"the tokenizer of 'around' can't encode 'axb': .*UNK") as caught:
        codec.encode_text("axb")
    assert "\n" not in str(caught.value)


def test_a_template_that_drops_earlier_answers_can_not_continue(codec_with):
    codec = codec_with("{{ messages[-1].content }}<bot>")
    assert codec.render_messages([{"role": "user", "content": "a"}]) == "a<bot>"
    with pytest.raises(ModelError, match="does not keep the model's earlier answers"):
        codec.encode_reply([], [{"role": "user", "content": "a"}])


@pytest.fixture
def model_with(tiny_model_dir, tmp_path):
    """A copy of the tiny model's folder with another generation_config.json (text or bytes) and more in config.json."""

    def make(generation_config=None, **config):
        folder = tmp_path / "model"
        shutil.copytree(tiny_model_dir, folder)
        file = folder / "generation_config.json"
        file.unlink(missing_ok=True)
        if generation_config is not None:
            file.write_bytes(generation_config if isinstance(generation_config, bytes) else generation_config.encode())
        known = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**known, **config}))
        return folder

    return make


@pytest.mark.parametrize(
    ("generation_config", "config", "want"),
    [
        (None, {}, {0}),
        ("{}", {}, {0}),
        ('{"eos_token_id": 5}', {}, {0, 5}),
        ('{"eos_token_id": [1, 2]}', {}, {0, 1, 2}),
        ('{"eos_token_id": null}', {"eos_token_id": None}, {0}),
        (None, {"eos_token_id": [3, 4]}, {0, 3, 4}),
        ('{"eos_token_id": 5}', {"eos_token_id": 3, "text_config": {"eos_token_id": [6, 7]}}, {0, 3, 5, 6, 7}),
    ],
)
def test_ends_are_those_of_tokenizer_generation_config_and_config(model_with, generation_config, config, want):
    assert load_codec(str(model_with(generation_config, **config))).eos_token_ids == want


def test_ends_of_a_hub_id_are_those_of_its_folder(model_with, tmp_path, monkeypatch):
    from huggingface_hub import constants

    folder = model_with('{"eos_token_id": [1, 2]}', eos_token_id=[3])
    repo = tmp_path / "hub" / "models--org--name"
    snapshot = repo / "snapshots" / ("0" * 40)
    shutil.copytree(folder, snapshot)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(snapshot.name)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert load_codec("org/name").eos_token_ids == load_codec(str(folder)).eos_token_ids == {0, 1, 2, 3}
    (snapshot / "generation_config.json").unlink()
    assert load_codec("org/name").eos_token_ids == {0, 3}


def test_ends_of_a_bundled_name_are_those_of_its_folder(model_with, tmp_path, monkeypatch):
    from treadle.models.bundled import resolve

    folder = model_with('{"eos_token_id": 4}', eos_token_id=[3])
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "cache"))
    shutil.copytree(folder, tmp_path / "cache" / "models" / "smollm2-135m-instruct")
    assert load_codec(resolve("smollm2-135m-instruct")).eos_token_ids == {0, 3, 4}


@pytest.mark.parametrize("sharded", [False, True])
def test_ends_are_the_same_before_and_after_a_save_and_an_export(model_with, tmp_path, sharded):
    """Files of the ends survive both ways a checkpoint's model is written, and the export of it."""
    import torch

    from treadle.models.load import empty_model, load_model
    from treadle.models.saving import export_model, save_model, write_model_config

    folder = model_with('{"eos_token_id": [1, 2]}', eos_token_id=[3, 4])
    want, saved = load_codec(str(folder)), tmp_path / "saved"
    model = load_model(str(folder), torch.float32, torch.device("cpu"))
    save_model(model, model.state_dict(), saved)
    if sharded:
        for name in ("config.json", "generation_config.json"):
            (saved / name).unlink()
        write_model_config(empty_model(str(folder), torch.float32), saved)
    want.save(saved)
    assert load_codec(str(saved)).eos_token_ids == want.eos_token_ids == {0, 1, 2, 3, 4}
    assert load_codec(str(export_model(saved, tmp_path / "out", "bfloat16"))).eos_token_ids == want.eos_token_ids


def test_a_config_that_names_no_end_names_none_when_it_is_saved(model_with, tmp_path):
    """The class of a config has a default, which a hand-written file did not ask for."""
    import torch

    from treadle.models.load import load_model
    from treadle.models.saving import save_model

    folder = model_with(None)
    config = json.loads((folder / "config.json").read_text())
    del config["eos_token_id"]
    (folder / "config.json").write_text(json.dumps(config))
    want, saved = load_codec(str(folder)), tmp_path / "saved"
    model = load_model(str(folder), torch.float32, torch.device("cpu"))
    save_model(model, model.state_dict(), saved)
    want.save(saved)
    assert load_codec(str(saved)).eos_token_ids == want.eos_token_ids == {0}


@pytest.mark.parametrize(
    ("generation_config", "message"),
    [
        ("", r"generation_config\.json of .* can't be read"),
        (b"\x80\x00\xff", r"generation_config\.json of .* can't be read"),
        ("[" * 100_000, r"generation_config\.json of .* can't be read"),
        ("[1]", "holds a JSON list, not an object"),
        ("null", "holds a JSON NoneType, not an object"),
        ('{"eos_token_id": "2"}', "eos_token_id in generation_config.json of .* holds '2'"),
        ('{"eos_token_id": true}', "holds True; it must be a token id from 0 to 97"),
        ('{"eos_token_id": [1, 2.0]}', "holds 2.0"),
        ('{"eos_token_id": {"a": 1}}', "holds {'a': 1}"),
        ('{"eos_token_id": [[1]]}', "holds \\[1\\]"),
        ('{"eos_token_id": 98}', "holds 98; it must be a token id from 0 to 97"),
        ('{"eos_token_id": -1}', "holds -1"),
    ],
)
def test_a_generation_config_that_means_nothing_is_one_line(model_with, generation_config, message):
    with pytest.raises(ModelError, match=message) as caught:
        load_codec(str(model_with(generation_config)))
    assert "\n" not in str(caught.value)


def test_an_end_in_config_that_is_no_token_is_one_line(model_with):
    with pytest.raises(ModelError, match=r"eos_token_id in text_config in config\.json of .* holds 99"):
        load_codec(str(model_with(text_config={"eos_token_id": 99})))


def test_a_saved_tokenizer_is_the_same(tiny_codec, tmp_path):
    tiny_codec.save(tmp_path)
    again = load_codec(str(tmp_path))
    text = "<user>a b, c!<bot>"
    assert again.encode_rendered(text) == tiny_codec.encode_rendered(text)
    messages = [{"role": "user", "content": "a"}]
    assert again.render_messages(messages) == tiny_codec.render_messages(messages)
    assert again.eos_token_ids == {0}


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"no tokenizer in .*tokenizer\.json") as caught:
        load_codec(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_tokenizer_that_fails_in_use_is_refused_when_it_is_loaded(tiny_model_dir, tmp_path):
    folder = shutil.copytree(tiny_model_dir, tmp_path / "model")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": "x"}))
    with pytest.raises(ModelError, match="can't encode and decode a letter"):
        load_codec(str(folder))
