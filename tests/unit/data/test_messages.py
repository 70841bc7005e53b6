"""Messages, tools and labels in the forms that data sets have them in."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from treadle.chat import Codec
from treadle.config import DataSection, EvalOverride, EvalSection, load_config
from treadle.data import build_eval_sets, build_source
from treadle.data.dataset import PromptDataset
from treadle.data.messages import content_text
from treadle.data.readers import RowsReader, open_reader
from treadle.data.rendering import PromptFormat, Renderer
from treadle.errors import ConfigError, DataError

Rows = list[dict[str, Any]]
Make = Callable[..., Codec]

TOOL_TEMPLATE = (
    "{% for t in tools or [] %}[{{ t | tojson }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ '-' if m.content is none else m.content }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.name }} {{ c.function.arguments | tojson }}){% endfor %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking is false %}<no think>{% endif %}{% endif %}"
)
CALLS: Rows = [
    {
        "input": [
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "type": "function",
                        "function": {"name": "weather", "arguments": {"city": "Oslo", "deep": {"a": 1}}},
                    }
                ],
            },
            {"role": "tool", "content": "5", "tool_call_id": "x"},
        ],
        "tools": [{"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}}],
    },
    {
        "input": [
            {"role": "user", "content": "Clock?"},
            {
                "role": "assistant",
                "tool_calls": [
                    {
                        "type": "function",
                        "function": {"name": "clock", "arguments": {"deep": {"b": [1, None]}, "unit": "h"}},
                    }
                ],
            },
            {"role": "tool", "content": "6"},
        ],
        "tools": [{"name": "clock", "parameters": {"properties": {"unit": {"enum": ["h"]}}}, "strict": True}],
    },
    {"input": [{"role": "user", "content": "Hi"}]},
]


@pytest.fixture(scope="module")
def tool_codec(make_codec: Make) -> Codec:
    return make_codec(template=TOOL_TEMPLATE)


def texts(source: str | Path | Rows, codec: Codec, **form: Any) -> list[str]:
    reader = RowsReader(source, "d") if isinstance(source, list) else open_reader(str(source))
    return [prompt.text for prompt in PromptDataset("d", reader, codec, PromptFormat(**form), 2000)]


def refused(rows: Rows, codec: Codec, **form: Any) -> str:
    with pytest.raises(DataError) as caught:
        texts(rows, codec, **form)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write_parquet(path: Path, rows: Rows) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def test_rows_of_parquet_render_as_those_of_jsonl(tool_codec: Codec, write_jsonl: Any, tmp_path: Path) -> None:
    jsonl, parquet = write_jsonl("t.jsonl", CALLS), write_parquet(tmp_path / "t.parquet", CALLS)
    assert open_reader(str(parquet)).row(0)["tools"][0]["parameters"]["properties"]["unit"] is None
    mine = tmp_path / "mine.py"
    mine.write_text(f"import datasets\nrows = datasets.Dataset.from_parquet({str(parquet)!r})\n")
    want = texts(jsonl, tool_codec, tools_key="tools")
    assert want == [
        '[{"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}}]<user>Weather?\n'
        '<assistant>-(weather {"city": "Oslo", "deep": {"a": 1}})\n<tool>5\n<assistant>',
        '[{"name": "clock", "parameters": {"properties": {"unit": {"enum": ["h"]}}}, "strict": true}]<user>Clock?\n'
        '<assistant>-(clock {"deep": {"b": [1, null]}, "unit": "h"})\n<tool>6\n<assistant>',
        "<user>Hi\n<assistant>",
    ]
    for source in (parquet, f"{mine}:rows", f"{parquet}@[0:3]"):
        assert texts(source, tool_codec, tools_key="tools") == want


def test_nulls_that_a_json_row_has_stay(tool_codec: Codec, write_jsonl: Any) -> None:
    call = {"function": {"name": "f", "arguments": {"unit": None}}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "b"},
    ]
    assert '(f {"unit": null})' in texts(write_jsonl("t.jsonl", [{"input": messages}]), tool_codec)[0]


def test_tools_are_a_list_or_its_json_text(tool_codec: Codec) -> None:
    tools = [{"name": "f", "x": None}]
    for value in (tools, json.dumps(tools)):
        (text,) = texts([{"input": "a", "t": value}], tool_codec, tools_key="t", apply_chat_template=True)
        assert text == '[{"name": "f", "x": null}]<user>a\n<assistant>'
    for value in (None, [], "", "[]"):
        rows = [{"input": "a", "t": value}]
        assert texts(rows, tool_codec, tools_key="t", apply_chat_template=True) == ["<user>a\n<assistant>"]
    form = {"tools_key": "t", "apply_chat_template": True}
    assert "column 't' is a dict; tools are a list" in refused([{"input": "a", "t": {"name": "f"}}], tool_codec, **form)
    assert "column 't' is a list; tools are a list" in refused([{"input": "a", "t": ["f"]}], tool_codec, **form)
    assert "column 't' is text that is no JSON" in refused([{"input": "a", "t": "[{"}], tool_codec, **form)
    deep = "[{" + '"a":{' * 200 + "}" * 201 + "]"
    assert "nested more than 100 deep" in refused([{"input": "a", "t": deep}], tool_codec, **form)
    assert "no column 't'" in refused([{"input": "a"}], tool_codec, **form)


def test_the_bound_counts_tools_and_variables(make_codec: Make) -> None:
    """What is dropped is what counting tokens drops, also where the template writes far more than the messages."""
    codec = make_codec(template=TOOL_TEMPLATE)
    rows = [{"input": "a" * n, "t": [{"d": "x" * m}] if m else None} for n, m in ((5, 0), (5, 300), (90, 10), (90, 0))]
    whole = [len(text) for text in texts(rows, codec, tools_key="t", apply_chat_template=True)]
    for limit in sorted({*whole, *(n - 1 for n in whole[1:])} - {min(whole) - 1}):
        form = PromptFormat(tools_key="t", apply_chat_template=True)
        kept = PromptDataset("d", RowsReader(rows, "d"), codec, form, limit)
        assert [p.row for p in kept] == [i for i, n in enumerate(whole) if n <= limit]
    long = Codec(codec.tokenizer, frozenset(), "long", {"enable_thinking": False})
    renderer = Renderer(long, PromptFormat(apply_chat_template=True))
    bound = renderer.max_tokens("a")
    assert bound is not None
    assert bound >= len("<user>a\n<assistant><no think>")


def test_a_prompt_that_ends_with_an_answer_is_refused_or_continued(tool_codec: Codec, make_codec: Make) -> None:
    user, begun = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "It is "}
    message = refused([{"input": [user]}, {"input": [user, begun]}], tool_codec)
    assert "row 1: the prompt ends with an assistant message" in message
    assert "--continue-final-message" in message
    rows: Rows = [{"input": [user]}, {"input": [user, begun]}]
    want = ["<user>2+2?\n<assistant>", "<user>2+2?\n<assistant>It is "]
    assert texts(rows, tool_codec, continue_final_message=True) == want
    trims = make_codec(template="{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>{% endfor %}")
    assert texts(rows[1:], trims, continue_final_message=True) == ["<user>2+2?</s><assistant>It is"]
    drops = make_codec(template="<user>{{ messages[0].content }}<bot>")
    assert "does not keep the last message" in refused(rows[1:], drops, continue_final_message=True)
    for last in ({"content": ""}, {"content": None, "tool_calls": [{"name": "f"}]}):
        ends: Rows = [{"input": [user, {"role": "assistant", **last}]}]
        assert "no text that could be continued" in refused(ends, tool_codec, continue_final_message=True)


@pytest.mark.parametrize("trim", ["", " | trim"])
def test_a_continued_prompt_is_the_one_of_transformers(make_codec: Make, trim: str) -> None:
    codec = make_codec(template="{% for m in messages %}<{{ m.role }}>{{ m.content" + trim + " }}</s>{% endfor %}")
    for content in ("It is", "It is ", " It\n\n", "continue"):
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": content}]
        want = codec.tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True)
        assert codec.render_messages(messages, continue_final=True) == want


def test_contents_in_parts_are_texts(codec: Codec, make_codec: Make) -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b", "image": None}]
    rows = [{"input": [{"role": "system", "content": "s"}, {"role": "user", "content": parts}]}]
    assert texts(rows, codec, prompt_suffix="!") == ["<system>s\n<user>a b!\n<assistant>"]
    knows = make_codec(
        template="{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{{ p.text }}|{% endfor %}{% endif %}{% endfor %}"
    )
    assert texts(rows, knows) == ["<system>s<user>a b"]  # one part and its text differ there: it gets the text
    takes = make_codec(
        template="{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{{ p.text | trim }}{% endfor %}{% endif %}{% endfor %}"
    )
    assert texts(rows, takes, prompt_suffix="!") == ["<system>s<user>ab!"]


def test_the_text_of_a_content_is_what_people_see() -> None:
    assert content_text({"content": "a"}) == "a"
    assert content_text({"content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]}) == "a b"
    assert content_text({"content": None}) == content_text({}) == ""


def test_messages_as_json_text_are_messages_under_the_template(codec: Codec, tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "é"}]
    path = tmp_path / "t.csv"
    path.write_text('input\n"' + json.dumps(messages).replace('"', '""') + '"\n')
    assert texts(path, codec, apply_chat_template=True) == ["<system>s\n<user>é\n<assistant>"]
    assert texts(path, codec) == [json.dumps(messages)]
    for text in ("[1, 2]", "[]", "[{", '[{"content": "x"}]', '{"role": "user"}', "[x] or [y]?"):
        assert texts([{"input": text}], codec, apply_chat_template=True) == [f"<user>{text}\n<assistant>"]
    assert "message 0: 'content' must be text" in refused(
        [{"input": '[{"role": "user"}]'}], codec, apply_chat_template=True
    )


def test_dotted_keys_read_objects_and_exact_names_win(codec: Codec) -> None:
    rows = [{"a": {"b": {"c": "x"}, "d.e": 1}, "a.b.c": "exact"}, {"a": {"b": {"c": "y"}}, "a.b.c": "exact"}]
    assert texts(rows, codec, input_key="a.b.c") == ["exact", "exact"]
    nested = [{"a": {"b": {"c": text}}, "label": i} for i, text in enumerate("xy")]
    assert texts(nested, codec, input_key="a.b.c") == ["x", "y"]
    found = PromptDataset(
        "d", RowsReader(nested, "d"), codec, PromptFormat("a.b.c", label_key="a.b.c", metadata_key="a.b"), 9
    )
    assert [(p.label, p.metadata) for p in found] == [("x", {"c": "x"}), ("y", {"c": "y"})]
    late = [{"input": "p"}, {"input": "q", "m": {}}, {"input": "r", "m": {"k": 7}}]
    kept = PromptDataset("d", RowsReader(late, "d"), codec, PromptFormat(label_key="m.k"), 9)
    assert [p.label for p in kept] == [None, None, 7]
    assert "column 'm' of 'd' has no key 'kk'; did you mean 'k'?; its objects have 'k'" in refused(
        late, codec, label_key="m.kk"
    )
    assert "column 'input' of 'd' holds a str and no objects; 'input.k'" in refused(late, codec, label_key="input.k")
    assert "'d' has no column 'n.k'" in refused(late, codec, label_key="n.k")
    assert "row 1: column 'm.k' is null or missing" in refused([{"m": {"k": "a"}}, {"m": None}], codec, input_key="m.k")


def test_verls_parquet_is_read_as_it_is(codec: Codec, tmp_path: Path) -> None:
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{i} + 1?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
            "extra_info": {"index": i, "answer": "…" if i else None},
        }
        for i in range(3)
    ]
    path = write_parquet(tmp_path / "train.parquet", rows)
    data = DataSection(prompt_data=(str(path),), input_key="prompt", label_key="reward_model.ground_truth")
    prompts = build_source(data, codec=codec, max_prompt_len=100, seed=0).next_prompts(3)
    assert [(p.text, p.label) for p in prompts] == [(f"<user>{i} + 1?\n<assistant>", str(i + 1)) for i in range(3)]
    assert prompts[0].columns == rows[0]  # rewards see the row as it is
    evaluation = EvalSection(eval_prompt_data=(f"e={path}",))
    assert [p.label for p in build_eval_sets(data, evaluation, codec=codec, max_prompt_len=100)["e"]] == ["1", "2", "3"]


def test_evaluation_sets_have_tools_of_their_own(tool_codec: Codec, write_jsonl: Any) -> None:
    with_tools = write_jsonl("a.jsonl", [{"input": "a", "functions": [{"name": "f"}]}])
    without = write_jsonl("b.jsonl", [{"input": "b"}])
    data = DataSection(apply_chat_template=True, tools_key="tools")
    evaluation = EvalSection(
        eval_prompt_data=(f"a={with_tools}", f"b={without}"),
        eval_overrides={"a": EvalOverride(tools_key="functions")},
    )
    sets = build_eval_sets(data, evaluation, codec=tool_codec, max_prompt_len=100)
    assert [s[0].text for s in sets.values()] == ['[{"name": "f"}]<user>a\n<assistant>', "<user>b\n<assistant>"]
    wrong = EvalSection(eval_prompt_data=(f"b={without}",), eval_overrides={"b": EvalOverride(tools_key="functions")})
    with pytest.raises(DataError, match="no column 'functions'"):
        build_eval_sets(data, wrong, codec=tool_codec, max_prompt_len=100)


@pytest.mark.parametrize(
    "given",
    [
        ["enable_thinking=false", "effort=low", "n=3"],
        ['{"enable_thinking": false, "effort": "low", "n": 3}'],
        ['{enable_thinking = false, effort = "low", n = 3}'],
        ["effort=low", '{"enable_thinking": false, "n": 3}'],
    ],
)
def test_variables_of_the_template_by_flag(given: list[str]) -> None:
    data = load_config(None, ["--chat-template-kwargs", *given]).data
    assert data.template_kwargs == {"enable_thinking": False, "effort": "low", "n": 3}


def test_variables_of_the_template_in_a_recipe(tmp_path: Path) -> None:
    from treadle.config.recipe import to_toml

    recipe = tmp_path / "r.toml"
    for text in (
        "[data]\nchat_template_kwargs = { enable_thinking = false, list = [1, 2] }\n",
        "[data.chat_template_kwargs]\nenable_thinking = false\nlist = [1, 2]\n",
        '[data]\nchat_template_kwargs = ["enable_thinking=false", "list=[1, 2]"]\n',
    ):
        recipe.write_text(text)
        config = load_config(recipe)
        assert config.data.template_kwargs == {"enable_thinking": False, "list": [1, 2]}
        recipe.write_text(to_toml(config))
        assert load_config(recipe) == config


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("enable_thinking", "must be name=value, as enable_thinking=false"),
        ("=1", "must be name=value"),
        ("{x", "is no JSON object and no TOML table"),
        ("tools=[]", "tools is set by Treadle itself"),
        ("continue_final_message=true", "use --continue-final-message"),
        ("a-b=1", "'a-b' is no name of a variable"),
    ],
)
def test_variables_that_are_none_are_refused(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(None, ["--chat-template-kwargs", word])
    assert "\n" not in str(caught.value)


def test_variables_reach_every_rendering(make_codec: Make) -> None:
    codec = Codec(make_codec(template=TOOL_TEMPLATE).tokenizer, frozenset(), "t", {"enable_thinking": False})
    assert texts([{"input": "a"}], codec, apply_chat_template=True) == ["<user>a\n<assistant><no think>"]
    assert codec.decode(codec.encode_reply([], [{"role": "user", "content": "b"}])).endswith("b\n<assistant><no think>")


def test_load_codec_takes_variables(tiny_model_dir: Path) -> None:
    from treadle.chat import load_codec

    assert load_codec(str(tiny_model_dir), {"x": 1}).template_kwargs == {"x": 1}


def test_a_text_without_a_token_for_it_names_its_row() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    bare = Tokenizer(models.WordLevel(vocab={"a": 0, "b": 1}))
    bare.pre_tokenizer = pre_tokenizers.Whitespace()
    codec = Codec(PreTrainedTokenizerFast(tokenizer_object=bare), frozenset(), "bare")
    prompts = PromptDataset("d", RowsReader([{"input": "a b"}, {"input": "x"}], "d"), codec, PromptFormat(), 1000)
    assert prompts[0].token_ids == (0, 1)
    with pytest.raises(DataError, match="d, row 1: the tokenizer of 'bare' can't encode 'x'"):
        prompts[1]
