from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.chat import Codec
from treadle.config import DataSection, EvalOverride, EvalSection
from treadle.data import PromptDataset, PromptFormat, PromptSource, build_eval_sets, build_source
from treadle.data.readers import RowsReader
from treadle.data.source import epoch_order
from treadle.errors import CheckpointError, ConfigError, DataError
from treadle.types import Prompt

MakeSource = Callable[..., PromptSource]
ORDER_8_42_0 = [3, 1, 5, 7, 4, 0, 6, 2]
ORDER_8_42_3 = [5, 4, 1, 6, 2, 0, 7, 3]


@pytest.fixture(scope="session")
def source(codec: Codec) -> MakeSource:
    """Makes a source of data sets by name and size; row i of data set `a` is the text `a<i>`."""

    def dataset(name: str, size: int) -> PromptDataset:
        rows = RowsReader([{"input": f"{name}{i}"} for i in range(size)], name)
        return PromptDataset(name, rows, codec, PromptFormat(), 100)

    def make(
        sizes: dict[str, int], weights: list[float] | None = None, shuffle: bool = False, seed: int = 1
    ) -> PromptSource:
        return PromptSource([dataset(name, size) for name, size in sizes.items()], weights, shuffle, seed)

    return make


def texts(prompts: list[Prompt]) -> list[str]:
    return [prompt.text for prompt in prompts]


def test_unshuffled_prompts_come_in_file_order_across_epochs(source: MakeSource) -> None:
    stream = source({"a": 3})
    assert texts(stream.next_prompts(2)) == ["a0", "a1"]
    assert stream.epoch == pytest.approx(2 / 3)
    prompts = stream.next_prompts(8)
    assert texts(prompts) == ["a2", "a0", "a1", "a2", "a0", "a1", "a2", "a0"]
    assert [p.group_id for p in prompts] == [2, 3, 4, 5, 6, 7, 8, 9]
    assert [p.row for p in prompts] == [2, 0, 1, 2, 0, 1, 2, 0]
    assert (len(stream), stream.num_draws, stream.next_prompts(0)) == (3, 10, [])


def test_each_epoch_has_its_own_order_of_all_rows(source: MakeSource) -> None:
    stream = source({"a": 20}, shuffle=True, seed=7)
    epochs = [texts(stream.next_prompts(20)) for _ in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [sorted(f"a{i}" for i in range(20))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert epochs[1] == [f"a{i}" for i in epoch_order(20, 7, 1)]
    assert epochs != [texts(source({"a": 20}, shuffle=True, seed=8).next_prompts(20))] * 3


def test_the_order_of_an_epoch_never_changes() -> None:
    assert epoch_order(8, 42, 0).tolist() == ORDER_8_42_0
    assert epoch_order(8, 42, 3).tolist() == ORDER_8_42_3


def test_dropped_rows_are_never_drawn(codec: Codec) -> None:
    rows = RowsReader([{"input": "x" * n} for n in (3, 9, 4, 9, 5)], "d")
    stream = PromptSource([PromptDataset("d", rows, codec, PromptFormat(), 5)], None, True, 3)
    assert Counter(len(text) for text in texts(stream.next_prompts(6))) == {3: 2, 4: 2, 5: 2}
    assert (len(stream), stream.num_dropped) == (3, 2)


sizes = st.lists(st.integers(1, 9), min_size=1, max_size=4).map(lambda ns: dict(zip("abcd", ns, strict=False)))


@settings(deadline=None)
@given(sizes=sizes, shuffle=st.booleans(), epochs=st.integers(1, 3))
def test_without_weights_an_epoch_takes_each_row_once(
    source: MakeSource, sizes: dict[str, int], shuffle: bool, epochs: int
) -> None:
    stream = source(sizes, shuffle=shuffle)
    every = Counter(f"{name}{i}" for name, size in sizes.items() for i in range(size))
    for _ in range(epochs):
        assert Counter(texts(stream.next_prompts(len(stream)))) == every


@settings(deadline=None)
@given(weights=st.lists(st.sampled_from([0.1, 0.5, 1.0, 3.0, 0.3]), min_size=2, max_size=4), draws=st.integers(1, 60))
def test_shares_hold_in_every_prefix(source: MakeSource, weights: list[float], draws: int) -> None:
    stream = source(dict(zip("abcd", [2, 3, 5, 1][: len(weights)], strict=False)), weights=weights)
    drawn = [prompt.data_name for prompt in stream.next_prompts(draws)]
    for prefix in range(1, draws + 1):
        counts = Counter(drawn[:prefix])
        ahead = [counts[name] - prefix * w / sum(weights) for name, w in zip("abcd", weights, strict=False)]
        assert max(ahead) < 1
        assert min(ahead) > -len(weights)


def test_weights_mix_by_hand(source: MakeSource) -> None:
    stream = source({"a": 2, "b": 9}, weights=[0.75, 0.25])
    assert texts(stream.next_prompts(8)) == ["a0", "a1", "b0", "a0", "a1", "a0", "b1", "a1"]


def test_prompts_put_back_come_first_with_their_ids(source: MakeSource) -> None:
    stream = source({"a": 4})
    first = stream.next_prompts(3)
    stream.put_back([first[2], first[0]])
    assert stream.epoch == pytest.approx(1 / 4)
    again = stream.next_prompts(4)
    assert again[:2] == [first[2], first[0]]
    assert [(p.text, p.group_id) for p in again[2:]] == [("a3", 3), ("a0", 4)]


moves = st.lists(
    st.tuples(st.integers(0, 7), st.lists(st.integers(0, 6), max_size=3, unique=True)), min_size=1, max_size=6
)


def play(stream: PromptSource, plan: list[tuple[int, list[int]]], resume_at: set[int], fresh: Any) -> list[Prompt]:
    """Draw and put back as planned, moving to a fresh source through JSON before the given steps."""
    drawn: list[Prompt] = []
    for step, (count, back) in enumerate(plan):
        if step in resume_at:
            state = json.loads(json.dumps(stream.state()))
            stream = fresh()
            stream.load_state(state)
            assert stream.state() == state
        prompts = stream.next_prompts(count)
        assert len(prompts) == count
        stream.put_back([prompts[i] for i in back if i < count])
        drawn += prompts
    return drawn


@settings(deadline=None, max_examples=60)
@given(
    plan=moves,
    resume_at=st.sets(st.integers(0, 5)),
    sizes=sizes,
    shuffle=st.booleans(),
    weighted=st.booleans(),
)
def test_a_resumed_stream_goes_on_as_if_never_stopped(
    source: MakeSource,
    plan: list[tuple[int, list[int]]],
    resume_at: set[int],
    sizes: dict[str, int],
    shuffle: bool,
    weighted: bool,
) -> None:
    weights = [0.7, 0.2, 0.4, 1.0][: len(sizes)] if weighted else None

    def fresh() -> PromptSource:
        return source(sizes, weights=weights, shuffle=shuffle, seed=5)

    assert play(fresh(), plan, resume_at, fresh) == play(fresh(), plan, set(), fresh)


def test_a_state_of_other_data_is_refused_and_changes_nothing(source: MakeSource) -> None:
    saved = source({"a": 4, "b": 2})
    saved.next_prompts(3)
    state = saved.state()
    for other, message in [
        (
            source({"a": 5, "b": 2}),
            "drew from a with 4 prompts, b with 2 prompts; this one has a with 5 prompts, b with 2",
        ),
        (source({"a": 4}), "this one has a with 4 prompts:"),
        (source({"a": 4, "b": 2}, seed=9), "had rollout_seed 1, this one has 9"),
        (source({"a": 4, "b": 2}, shuffle=True), "had rollout_shuffle False, this one has True"),
        (source({"a": 4, "b": 2}, weights=[1.0, 1.0]), r"prompt_data_weights\) \[4, 2\], this one has \[1, 1\]"),
    ]:
        with pytest.raises(DataError, match=message) as caught:
            other.load_state(state)
        assert "\n" not in str(caught.value)
        assert other.next_prompts(1)[0].group_id == 0


@pytest.mark.parametrize(
    "change", [{"draws": 7}, {"data": None}, {"put_back": [["a", 1]]}, {"put_back": [["a", "x", 1]]}, {"draws": None}]
)
def test_a_damaged_state_is_refused(source: MakeSource, change: dict[str, Any]) -> None:
    stream = source({"a": 4})
    with pytest.raises(CheckpointError, match="saved state of the prompts is damaged"):
        stream.load_state({**stream.state(), **change})
    with pytest.raises(CheckpointError, match="damaged"):
        stream.load_state({})
    with pytest.raises(DataError, match="put row 4 of 'a' back"):
        stream.load_state({**stream.state(), "put_back": [["a", 4, 0]]})


@pytest.mark.parametrize(
    ("weights", "message"),
    [([1.0], "1 weights for 2 sources"), ([1.0, 0.0], "holds 0.0"), ([1.0, float("nan")], "holds nan")],
)
def test_wrong_weights_are_refused(source: MakeSource, weights: list[float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        source({"a": 1, "b": 1}, weights=weights)


def test_build_source_reads_the_config(codec: Codec, write_jsonl: Any) -> None:
    path = write_jsonl("t.jsonl", [{"q": "abc", "a": 1}, {"q": "abcdefgh", "a": 2}, {"q": "de", "a": 3}])
    data = DataSection(
        prompt_data=(f"{path}@[:2]", str(path), str(path), "reasoning_gym:chain_sum?size=4"),
        input_key="q",
        label_key="a",
        rollout_shuffle=True,
    )
    with pytest.raises(DataError, match="no column 'q'"):
        build_source(data, codec=codec, max_prompt_len=5, seed=3)
    data = data.model_copy(update={"prompt_data": data.prompt_data[:3]})
    stream = build_source(data, codec=codec, max_prompt_len=5, seed=3)
    assert (len(stream), stream.num_dropped) == (5, 3)
    prompts = stream.next_prompts(5)
    assert Counter((p.data_name, p.text, p.label) for p in prompts) == {
        ("t.jsonl@[:2]", "abc", 1): 1,
        ("t.jsonl", "abc", 1): 1,
        ("t.jsonl", "de", 3): 1,
        ("t.jsonl#2", "abc", 1): 1,
        ("t.jsonl#2", "de", 3): 1,
    }
    with pytest.raises(ConfigError, match="no prompt_data"):
        build_source(DataSection(), codec=codec, max_prompt_len=5, seed=3)


def test_build_eval_sets_reads_the_config(codec: Codec, write_jsonl: Any) -> None:
    path = write_jsonl("t.jsonl", [{"q": "abc", "a": 1}, {"q": "x" * 200, "a": 2}, {"q": "de", "a": 3, "m": "k"}])
    data = DataSection(input_key="question", label_key="answer", metadata_key="m", prompt_suffix="!")
    evaluation = EvalSection(
        eval_prompt_data=("sums=reasoning_gym:chain_sum?size=4&seed=2", f"file={path}"),
        eval_overrides={"file": EvalOverride(input_key="q", label_key="a")},
    )
    sets = build_eval_sets(data, evaluation, codec=codec, max_prompt_len=150)
    assert list(sets) == ["sums", "file"]
    assert [p.group_id for p in sets["sums"]] == [0, 1, 2, 3]
    assert all(p.label == p.columns["answer"] and p.text.endswith("!") for p in sets["sums"])
    assert [(p.group_id, p.text, p.label, p.metadata) for p in sets["file"]] == [
        (0, "abc!", 1, {}),
        (2, "de!", 3, {"m": "k"}),
    ]
    assert (sets["file"].num_dropped, sets["sums"].num_dropped) == (1, 0)
    assert build_eval_sets(data, EvalSection(), codec=codec, max_prompt_len=5) == {}


@pytest.mark.parametrize(
    ("specs", "overrides", "message"),
    [
        (("t.jsonl",), (), "has no name; write name=t.jsonl"),
        (("reasoning_gym:chain_sum?size=4",), (), "write name=reasoning_gym:chain_sum"),
        (("a=reasoning_gym:chain_sum", "a=x.jsonl"), (), "names 'a' twice"),
        (("math=reasoning_gym:chain_sum",), ("maths",), "eval_overrides.maths: .* did you mean 'math'"),
    ],
)
def test_wrong_eval_sets_are_refused(
    codec: Codec, specs: tuple[str, ...], overrides: tuple[str, ...], message: str
) -> None:
    evaluation = EvalSection(eval_prompt_data=specs, eval_overrides={name: EvalOverride() for name in overrides})
    with pytest.raises(ConfigError, match=message):
        build_eval_sets(DataSection(), evaluation, codec=codec, max_prompt_len=5)


def test_draws_reach_the_end_of_a_large_data_set_in_order() -> None:
    order = epoch_order(1000, 0, 0)
    assert np.array_equal(np.sort(order), np.arange(1000))
    assert abs(np.corrcoef(order, np.arange(1000))[0, 1]) < 0.15
