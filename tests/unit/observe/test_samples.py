from __future__ import annotations

import json
import math
from dataclasses import fields
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from treadle.errors import DataError, TreadleError
from treadle.observe.samples import read_groups, rollout_file, rollout_ids, write_groups
from treadle.types import NO_VERSION, Group, Prompt, Sample, Status


def make_sample(group_id: int = 0, index: int = 0, **changes: object) -> Sample:
    values: dict[str, object] = {
        "group_id": group_id,
        "index": index,
        "token_ids": np.array([5, 6, 7], np.int32),
        "loss_mask": np.array([False, True, True]),
        "rollout_logprobs": np.array([0.0, -0.1, -1e-30], np.float32),
        "weight_versions": np.array([NO_VERSION, 3, 4], np.int32),
        "temperature": 0.7,
        "status": Status.COMPLETED,
        "text": "42",
        "reward": 1.0,
        "reward_parts": {"math": 1.0},
    }
    return Sample(**{**values, **changes})  # type: ignore[arg-type]


def make_group(group_id: int = 0, num_samples: int = 2, **changes: object) -> Group:
    prompt = Prompt(
        group_id, (5,), "6 × 7 = ?", label="42", columns={"q": "6 × 7", "n": [1, None]}, data_name="sums", row=9,
        messages=({"role": "user", "content": "6 × 7 = ?"},), metadata={"level": 2},
    )  # fmt: skip
    return Group(prompt, tuple(make_sample(group_id, i, **changes) for i in range(num_samples)))


def same(a: object, b: object) -> bool:
    """Equal, with NaN equal to itself and arrays equal bit for bit."""
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, float) and math.isnan(a):
        return isinstance(b, float) and math.isnan(b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Prompt | Sample):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    return type(a) is type(b) and a == b


def assert_same_groups(groups: list[Group], back: list[Group]) -> None:
    assert len(groups) == len(back)
    for group, other in zip(groups, back, strict=True):
        assert same(group.prompt, other.prompt)
        assert same(group.samples, other.samples)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
json_objects = st.dictionaries(st.text(max_size=5), json_values, max_size=3)


@st.composite
def samples(draw: st.DrawFn, group_id: int) -> Sample:
    length = draw(st.integers(0, 6))

    def row(element: st.SearchStrategy) -> list:
        return draw(st.lists(element, min_size=length, max_size=length))

    return Sample(
        group_id=group_id,
        index=draw(st.integers(0, 9)),
        token_ids=np.array(row(st.integers(0, 2**31 - 1)), np.int32),
        loss_mask=np.array(row(st.booleans()), bool),
        rollout_logprobs=np.array(row(st.floats(width=32).map(lambda x: math.nan if math.isnan(x) else x)), np.float32),
        weight_versions=np.array(row(st.integers(-1, 2**31 - 1)), np.int32),
        temperature=draw(st.floats(0, 2)),
        status=draw(st.sampled_from(Status)),
        text=draw(st.text()),
        trajectory_id=draw(st.integers(0, 99)),
        reward=draw(st.none() | st.floats()),
        reward_parts=draw(st.dictionaries(st.text(max_size=5), st.floats(), max_size=2)),
        failure=draw(st.text()),
        metadata=draw(json_objects),
    )


@st.composite
def groups(draw: st.DrawFn) -> Group:
    prompt = Prompt(
        group_id=draw(st.integers(0, 3)),
        token_ids=tuple(draw(st.lists(st.integers(0, 2**31 - 1), max_size=4))),
        text=draw(st.text()),
        label=draw(json_values),
        columns=draw(json_objects),
        data_name=draw(st.text()),
        row=draw(st.integers(0, 2**40)),
        messages=draw(st.none() | st.lists(json_objects, max_size=2).map(tuple)),
        metadata=draw(json_objects),
    )
    return Group(prompt, tuple(draw(st.lists(samples(prompt.group_id), max_size=3))))


@given(st.lists(groups(), max_size=4))
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_groups_come_back_exactly_and_every_line_is_strict_json(tmp_path: Path, drawn: list[Group]) -> None:
    path = tmp_path / "rollout.jsonl"
    write_groups(path, drawn)
    assert_same_groups(drawn, read_groups(path))

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    for line in path.read_bytes().split(b"\n")[:-1]:
        json.loads(line, parse_constant=refuse)


def test_a_line_is_one_sample_with_what_people_read_first_and_tokens_last(tmp_path: Path) -> None:
    write_groups(tmp_path / "r.jsonl", [make_group(3, num_samples=2)])
    lines = (tmp_path / "r.jsonl").read_text().splitlines()
    first, second = map(json.loads, lines)
    readable = ["prompt", "response", "label", "reward", "reward_parts", "status", "failure", "response_length"]
    assert list(first)[:8] == list(second)[:8] == readable
    tokens = ["token_ids", "loss_mask", "rollout_logprobs", "weight_versions"]
    assert list(first)[-4:] == list(second)[-4:] == tokens
    assert (second["prompt"], second["response"], second["label"], second["reward"]) == ("6 × 7 = ?", "42", "42", 1.0)
    assert second["response_length"] == 2
    assert "×" in lines[1]
    assert first["group"]["num_samples"] == 2
    assert "group" not in second


def test_neighbouring_groups_of_the_same_id_stay_apart(tmp_path: Path) -> None:
    drawn = [make_group(1, 2), make_group(1, 1), make_group(0, 0), make_group(2, 3)]
    write_groups(tmp_path / "r.jsonl", drawn)
    assert_same_groups(drawn, read_groups(tmp_path / "r.jsonl"))


def test_what_json_can_not_hold_is_made_text_and_numpy_numbers_stay_numbers(tmp_path: Path) -> None:
    loop: dict = {}
    loop["again"] = loop
    metadata = {
        "np": np.float32(0.5),
        "array": np.array([1, 2]),
        "decimal": Decimal("1.5"),
        "path": Path("a"),
        ("a", 1): float("nan"),
        "half": "\ud83d",
    }
    write_groups(tmp_path / "r.jsonl", [make_group(num_samples=1, metadata=metadata, reward=np.float32(0.25))])
    (back,) = read_groups(tmp_path / "r.jsonl")
    stored = dict(back.samples[0].metadata)
    assert math.isnan(stored.pop("('a', 1)"))
    assert stored == {"np": 0.5, "array": [1, 2], "decimal": "1.5", "path": "a", "half": "\ud83d"}
    assert back.samples[0].reward == 0.25
    write_groups(tmp_path / "loop.jsonl", [make_group(num_samples=1, metadata=loop)])
    assert "again" in read_groups(tmp_path / "loop.jsonl")[0].samples[0].metadata


class Unreadable:
    def __str__(self) -> str:
        raise OSError("gone")


@pytest.mark.parametrize("depth", [500, 3000, 100_000])
def test_what_has_no_text_and_what_is_nested_too_deep_ends_no_run(tmp_path: Path, depth: int) -> None:
    value: list = []
    for _ in range(depth):
        value = [value]
    path = tmp_path / "rollout_000000.jsonl"
    write_groups(path, [make_group(metadata={"deep": value, "odd": Unreadable()})])
    (group,) = read_groups(path)
    assert group.samples[0].metadata["odd"] == "<Unreadable that has no text>"


def test_a_missing_file_names_it_and_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no saved rollout .*rollout_000003\.jsonl; .*--save-debug-rollout-data"):
        read_groups(rollout_file(tmp_path, 3))


def broken(lines: list[bytes], case: str) -> tuple[list[bytes], int]:
    """The lines, damaged, and the number of the line at fault."""
    if case == "not json":
        return [lines[0], b"{oops\n", *lines[2:]], 2
    if case == "not an object":
        return [lines[0], b"[1, 2]\n", *lines[2:]], 2
    if case == "a field is missing":
        return [lines[0], lines[1].replace(b'"temperature"', b'"heat"'), *lines[2:]], 2
    if case == "arrays differ in length":
        return [lines[0].replace(b'"token_ids": [5, 6, 7], "loss', b'"token_ids": [5], "loss'), *lines[1:]], 1
    if case == "an unknown status":
        return [*lines[:3], lines[3].replace(b"completed", b"done")], 4
    if case == "the end is missing":
        return lines[:3], 3
    if case == "a sample is missing":
        return [lines[0], *lines[2:]], 2
    return lines[1:], 1  # the first line of a group is missing


@pytest.mark.parametrize(
    "case",
    [
        "not json",
        "not an object",
        "a field is missing",
        "arrays differ in length",
        "an unknown status",
        "the end is missing",
        "a sample is missing",
        "the start is missing",
    ],
)
def test_a_malformed_file_names_file_and_line(tmp_path: Path, case: str) -> None:
    path = tmp_path / "r.jsonl"
    write_groups(path, [make_group(0), make_group(1)])
    lines, at = broken(path.read_bytes().splitlines(keepends=True), case)
    path.write_bytes(b"".join(lines))
    with pytest.raises(DataError, match=rf"r\.jsonl:{at}: ") as caught:
        read_groups(path)
    assert "\n" not in str(caught.value)


def test_the_rollouts_of_a_folder_are_found_in_order(tmp_path: Path) -> None:
    for rollout_id in (12, 3, 1_000_000):
        write_groups(rollout_file(tmp_path / "s", rollout_id), [])
    (tmp_path / "s" / "notes.jsonl").write_text("")
    assert rollout_ids(tmp_path / "s") == [3, 12, 1_000_000]
    assert rollout_ids(tmp_path / "none") == []
    assert read_groups(rollout_file(tmp_path / "s", 3)) == []


def test_rollouts_that_can_not_be_read_or_written_are_one_line(tmp_path, as_nobody):
    (tmp_path / "rollout_000001.jsonl").mkdir()
    with pytest.raises(DataError, match=r"rollout_000001\.jsonl can't be read \(Is a directory\)"):
        read_groups(tmp_path / "rollout_000001.jsonl")
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "file" / "saved"):
        with pytest.raises(TreadleError, match="can't be written"):
            write_groups(folder / "rollout_000001.jsonl", [])
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden").chmod(0)

    def act():
        said = []
        for call in (lambda: rollout_ids(tmp_path / "hidden"), lambda: read_groups(tmp_path / "hidden" / "a")):
            try:
                said.append(f"nothing was said: {call()}")
            except DataError as error:
                said.append(str(error))
        return "\n".join(said)

    lines = as_nobody(act).splitlines()
    (tmp_path / "hidden").chmod(0o700)
    assert len(lines) == 2
    assert all("can't be read (Permission denied)" in line for line in lines)
