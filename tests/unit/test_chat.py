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


def test_special_tokens_are_hidden_from_people_and_rewards(tiny_codec):
    ids = [*tiny_codec.encode_text("hi"), EOS, BOT]
    assert tiny_codec.decode(ids) == "hi"
    assert tiny_codec.decode(ids, skip_special_tokens=False) == "hi<eos><bot>"


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


def test_no_template_says_what_to_do(codec_with):
    codec = codec_with(None)
    assert not codec.has_chat_template
    with pytest.raises(ModelError, match=r"no chat template.*--apply-chat-template"):
        codec.render_messages([{"role": "user", "content": "a"}])


def test_what_a_template_raises_is_told_in_one_line(codec_with):
    codec = codec_with("{% for m in messages %}{{ raise_exception('roles must alternate') }}{% endfor %}")
    with pytest.raises(ModelError, match="the chat template of 'other' refused the messages: roles must alternate"):
        codec.render_messages([{"role": "user", "content": "a"}])


def test_a_template_that_drops_earlier_answers_can_not_continue(codec_with):
    codec = codec_with("{{ messages[-1].content }}<bot>")
    assert codec.render_messages([{"role": "user", "content": "a"}]) == "a<bot>"
    with pytest.raises(ModelError, match="does not keep the model's earlier answers"):
        codec.encode_reply([], [{"role": "user", "content": "a"}])


@pytest.mark.parametrize(
    ("generation_config", "want"),
    [
        (None, {0}),
        ({}, {0}),
        ({"eos_token_id": 5}, {0, 5}),
        ({"eos_token_id": [1, 2]}, {0, 1, 2}),
        ({"eos_token_id": None}, {0}),
    ],
)
def test_ends_are_those_of_tokenizer_and_generation_config(tiny_model_dir, tmp_path, generation_config, want):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_dir, folder)
    file = folder / "generation_config.json"
    file.unlink(missing_ok=True)
    if generation_config is not None:
        file.write_text(json.dumps(generation_config))
    assert load_codec(str(folder)).eos_token_ids == want


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
