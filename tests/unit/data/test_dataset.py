from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.chat import Codec
from treadle.data.dataset import PromptDataset
from treadle.data.readers import RowsReader, open_reader
from treadle.data.rendering import PromptFormat, Renderer
from treadle.errors import ConfigError, DataError, ModelError

Rows = list[dict[str, Any]]
MakeCodec = Callable[..., Codec]


def dataset(rows: Rows, codec: Codec, limit: int = 1000, **form: Any) -> PromptDataset:
    return PromptDataset("d", RowsReader(rows, "d"), codec, PromptFormat(**form), limit)


def refused(rows: Rows, codec: Codec, limit: int = 1000, **form: Any) -> str:
    with pytest.raises(DataError) as caught:
        dataset(rows, codec, limit, **form)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_text_prompt_is_tokenised_as_it_is(codec: Codec) -> None:
    rows = [{"input": "1+1", "label": 2, "extra": {"k": 1}}]
    (prompt,) = dataset(rows, codec, label_key="label", metadata_key="extra", prompt_suffix=" = ?")
    assert prompt.text == "1+1 = ?"
    assert codec.decode(prompt.token_ids) == "1+1 = ?"
    assert len(prompt.token_ids) == 7
    assert (prompt.label, prompt.columns, prompt.metadata) == (2, rows[0], {"k": 1})
    assert (prompt.messages, prompt.data_name, prompt.row, prompt.group_id) == (None, "d", 0, 0)


def test_text_becomes_a_user_message_under_the_template(codec: Codec) -> None:
    (prompt,) = dataset(
        [{"input": "hi"}], codec, apply_chat_template=True, system_prompt="Be brief.", prompt_suffix="!"
    )
    assert prompt.text == "<system>Be brief.\n<user>hi!\n<assistant>"
    assert codec.decode(prompt.token_ids) == prompt.text
    assert prompt.messages == ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi!"})


def test_messages_are_rendered_with_or_without_the_flag(codec: Codec) -> None:
    messages = [
        {"role": "user", "content": "a", "name": None},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "b"},
    ]
    for apply in (False, True):
        (prompt,) = dataset([{"q": messages}], codec, input_key="q", apply_chat_template=apply, prompt_suffix="?")
        assert prompt.text == "<user>a\n<assistant>c\n<user>b?\n<assistant>"
        assert prompt.messages is not None
        assert prompt.messages[0] == {"role": "user", "content": "a"}
    assert messages[2]["content"] == "b"


def test_metadata_of_other_types_is_kept_under_its_column(codec: Codec) -> None:
    rows = [{"input": "a", "m": "easy"}, {"input": "b", "m": None}]
    assert [p.metadata for p in dataset(rows, codec, metadata_key="m")] == [{"m": "easy"}, {}]


def test_prompts_over_the_limit_are_dropped_and_counted(codec: Codec) -> None:
    rows = [{"input": "x" * n} for n in (5, 11, 10, 40, 3)]
    kept = dataset(rows, codec, 10)
    assert [len(p.token_ids) for p in kept] == [5, 10, 3]
    assert [p.row for p in kept] == [0, 2, 4]
    assert [p.group_id for p in kept] == [0, 2, 4]
    assert (kept.num_dropped, kept.num_rows, len(kept)) == (2, 5, 3)
    assert kept[-1].text == "xxx"
    assert [p.row for p in kept[1:]] == [2, 4]
    with pytest.raises(IndexError):
        kept[3]


def test_all_dropped_says_how_long_they_are(codec: Codec) -> None:
    message = refused([{"input": "x" * n} for n in (12, 30)], codec, 10)
    assert "all 2 prompts of 'd' are longer than 10 tokens (the shortest has 12, the longest 30)" in message
    assert "--rollout-max-prompt-len" in message


texts = st.text(alphabet=st.sampled_from("ab .,7é×漢ﷺ🙂İ\n"), min_size=1, max_size=30)


@settings(max_examples=60)
@given(rows=st.lists(texts, min_size=1, max_size=8), limit=st.integers(1, 200), template=st.booleans())
def test_what_is_dropped_is_what_counting_tokens_drops(
    codec: Codec, rows: list[str], limit: int, template: bool
) -> None:
    around = len("<user>\n<assistant>") if template else 0
    fit = [i for i, text in enumerate(rows) if len(text.encode()) + around <= limit]
    if fit:
        kept = dataset([{"input": text} for text in rows], codec, limit, apply_chat_template=template)
        assert [prompt.row for prompt in kept] == fit
    else:
        assert "all" in refused([{"input": text} for text in rows], codec, limit, apply_chat_template=template)


@pytest.fixture(scope="module")
def hard_tokenizers(make_codec: MakeCodec) -> dict[str, Codec]:
    from tokenizers import normalizers as n
    from tokenizers import pre_tokenizers as p

    spaced = p.ByteLevel(add_prefix_space=True, use_regex=False)
    return {
        "plain": make_codec(),
        "nfkd": make_codec(normalizer=n.NFKD()),
        "nfkc lower": make_codec(normalizer=n.Sequence([n.NFKC(), n.Lowercase()])),
        "space before each digit": make_codec(pre_tokenizer=p.Sequence([p.Digits(individual_digits=True), spaced])),
        "space before each mark": make_codec(pre_tokenizer=p.Sequence([p.Punctuation(), spaced])),
    }


@settings(max_examples=60, deadline=None)
@given(
    value=texts
    | st.lists(
        st.fixed_dictionaries({"role": st.sampled_from(["user", "tool"]), "content": texts}), min_size=1, max_size=3
    )
)
def test_the_bound_is_one_for_tokenizers_that_make_text_longer(hard_tokenizers: dict[str, Codec], value: Any) -> None:
    for codec in hard_tokenizers.values():
        renderer = Renderer(codec, PromptFormat())
        bound = renderer.max_tokens(value)
        assert bound is not None
        assert len(renderer.encode(renderer.render(value))) <= bound


@pytest.mark.parametrize(("name", "character"), [("space before each digit", "7"), ("space before each mark", ",")])
def test_text_that_doubles_in_the_tokenizer_is_dropped(
    hard_tokenizers: dict[str, Codec], name: str, character: str
) -> None:
    codec = hard_tokenizers[name]
    assert len(codec.encode_text(character * 40)) == 80
    kept = dataset([{"input": character * n} for n in (40, 39, 41, 90)], codec, 79)
    assert [len(prompt.token_ids) for prompt in kept] == [78]


def test_the_bound_spares_the_tokenizer_where_it_can(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    encode = Codec.encode_rendered
    monkeypatch.setattr(Codec, "encode_rendered", lambda self, text: calls.append(text) or encode(self, text))
    dataset([{"input": "x" * 20}] * 500 + [{"input": "x" * 400}], codec, 300, apply_chat_template=True)
    assert len(calls) == 1


def test_a_tokenizer_that_breaks_the_bound_is_caught_at_the_draw(make_codec) -> None:
    from tokenizers import normalizers

    grows = make_codec(normalizer=normalizers.Replace("a", "a" * 50))
    found = dataset([{"input": "aaaa"}], grows, 100)
    with pytest.raises(DataError, match="row 0: the prompt has 200 tokens, more than the limit of 100"):
        found[0]


def test_templates_that_write_a_content_twice_are_measured(make_codec: MakeCodec) -> None:
    twice = make_codec(template="{% for m in messages %}{{ m.content }}|{{ m.content }}{% endfor %}")
    kept = dataset([{"input": "x" * n} for n in (10, 50)], twice, 60, apply_chat_template=True)
    assert [p.row for p in kept] == [0]
    assert len(kept[0].token_ids) == 21


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "d, row 1: column 'q' is null or missing"),
        (5, "row 1: column 'q' is a int; a prompt is text, or a list of {role, content} messages"),
        ("", "row 1: column 'q' is empty"),
        ([], "is an empty list"),
        (["hi"], "message 0 is a str; a message is {role, content}"),
        ([{"role": "user", "text": "x"}], "message 0: 'content' must be text, not missing"),
        ([{"role": "user", "content": None}], "message 0: 'content' must be text, not NoneType"),
        ([{"role": "user", "content": 5}], "message 0: 'content' must be text, not int"),
        ([{"role": None, "content": "x"}], "message 0: 'role' must be text, not NoneType"),
        ([{"role": "user", "content": ["x"]}], "message 0: content holds a part that is a str; Treadle takes text"),
        ([{"role": "user", "content": [{"type": "image"}]}], "content holds a part that is of type 'image'"),
        ({"role": "user", "content": "x"}, "column 'q' is a dict"),
        ("a\ud83d", "row 1: the prompt holds half a character ('\\ud83d', a lone surrogate)"),
    ],
)
def test_a_row_that_is_no_prompt_is_named(codec: Codec, value: Any, message: str) -> None:
    assert message in refused([{"q": "good"}, {"q": value}], codec, input_key="q")


def test_a_missing_column_lists_the_columns(codec: Codec) -> None:
    rows = [{"inputs": "a", "labels": 1}, {"inputs": "b", "score": 2}]
    assert (
        refused(rows, codec) == "'d' has no column 'input'; did you mean 'inputs'?; it has 'inputs', 'labels', 'score'"
    )
    assert "no column 'answer'" in refused(rows, codec, input_key="inputs", label_key="answer")
    assert "no column 'meta'" in refused(rows, codec, input_key="inputs", metadata_key="meta")
    assert dataset(rows, codec, input_key="inputs", label_key="score")[1].label == 2


def test_a_null_in_a_file_names_its_line(codec: Codec, write_jsonl: Callable[[str, Rows], Path]) -> None:
    path = write_jsonl("t.jsonl", [{"input": "a"}, {"input": "b"}, {"input": None}])
    with pytest.raises(DataError, match=r"t\.jsonl, line 3: column 'input' is null or missing"):
        PromptDataset("t", open_reader(str(path)), codec, PromptFormat(), 100)
    with pytest.raises(DataError, match=r"t\.jsonl, line 3: column 'input' is null"):
        PromptDataset("t", open_reader(f"{path}@[1:]"), codec, PromptFormat(), 100)


def test_settings_that_do_not_fit_the_prompts_are_refused(codec: Codec) -> None:
    with pytest.raises(ConfigError, match="system_prompt needs a chat template"):
        dataset([{"input": "a"}], codec, system_prompt="s")
    own = [{"input": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}]
    assert "has a system message of its own" in refused(own, codec, system_prompt="other")
    system = [{"input": [{"role": "system", "content": "s"}]}]
    assert "last user message, and there is none" in refused(system, codec, prompt_suffix="!")
    with pytest.raises(ConfigError, match="tools_key needs a chat template"):
        dataset([{"input": "a", "t": [{"name": "f"}]}], codec, tools_key="t")


def test_a_template_that_refuses_names_the_row_and_none_at_all_names_the_model(make_codec: MakeCodec) -> None:
    strict = make_codec(
        template="{{ raise_exception('roles must alternate') if messages|length > 1 else '<u>' + messages[0].content }}"
    )
    one, two = {"role": "user", "content": "a"}, {"role": "user", "content": "b"}
    message = refused([{"input": [one]}, {"input": [one, two]}], strict)
    assert "d, row 1: the chat template of 'tiny' refused the messages: roles must alternate" in message
    with pytest.raises(ModelError, match="no chat template"):
        dataset([{"input": [one]}], make_codec(template=None))
