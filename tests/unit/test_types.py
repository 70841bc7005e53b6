"""Prompts and samples go through JSON and come back bit for bit."""

import json
from dataclasses import FrozenInstanceError, fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.types import (
    Group,
    Prompt,
    Sample,
    SamplingParams,
    Status,
    prompt_from_json,
    prompt_to_json,
    sample_from_json,
    sample_to_json,
)

ARRAYS = ("token_ids", "loss_mask", "rollout_logprobs", "weight_versions")


def make_sample(**kwargs):
    values = {
        "group_id": 3,
        "index": 1,
        "token_ids": np.array([5, 6, 7], dtype=np.int32),
        "loss_mask": np.array([False, True, True]),
        "rollout_logprobs": np.array([0.0, -0.1, -1e-30], dtype=np.float32),
        "weight_versions": np.array([-1, 4, 5], dtype=np.int32),
        "temperature": 0.7,
        "status": Status.TRUNCATED,
        "text": 'half\n"é',
        "trajectory_id": 9,
        "reward": 0.5,
        "reward_parts": {"math": 1.0},
        "failure": "why",
        "metadata": {"row": [1, {"a": None}]},
    }
    return Sample(**{**values, **kwargs})


def test_every_field_of_a_sample_comes_back():
    sample = make_sample()
    row = json.loads(json.dumps(sample_to_json(sample), allow_nan=False))
    assert row.keys() == {f.name for f in fields(Sample)}
    again = sample_from_json(row)
    for field in fields(Sample):
        one, other = getattr(sample, field.name), getattr(again, field.name)
        if field.name in ARRAYS:
            assert one.dtype == other.dtype
            assert one.tobytes() == other.tobytes()
        else:
            assert one == other
            assert type(one) is type(other)


@given(
    st.lists(st.floats(-(2.0**100), 0, width=32), max_size=20),
    st.sampled_from(list(Status)),
    st.one_of(st.none(), st.floats(allow_nan=False, allow_infinity=False)),
)
def test_arrays_come_back_bit_for_bit(logprobs, status, reward):
    size = len(logprobs)
    sample = make_sample(
        token_ids=np.arange(size, dtype=np.int32),
        loss_mask=np.arange(size) % 2 == 0,
        rollout_logprobs=np.array(logprobs, dtype=np.float32),
        weight_versions=np.full(size, 2**31 - 1, dtype=np.int32),
        status=status,
        reward=reward,
    )
    again = sample_from_json(json.loads(json.dumps(sample_to_json(sample), allow_nan=False)))
    for name in ARRAYS:
        assert getattr(sample, name).tobytes() == getattr(again, name).tobytes()
    assert (again.status, again.reward) == (status, reward)


def test_every_field_of_a_prompt_comes_back():
    prompt = Prompt(
        group_id=2,
        token_ids=(1, 2, 3),
        text="é\n",
        label=[1, "two"],
        columns={"a": 1, "b": {"c": None}},
        data_name="sums",
        row=17,
        messages=({"role": "user", "content": "hi"},),
        metadata={"level": 3},
    )
    row = json.loads(json.dumps(prompt_to_json(prompt)))
    assert row.keys() == {f.name for f in fields(Prompt)}
    assert prompt_from_json(row) == prompt
    bare = Prompt(0, (), "")
    assert prompt_from_json(json.loads(json.dumps(prompt_to_json(bare)))) == bare


@pytest.mark.parametrize("name", [f.name for f in fields(Sample)])
def test_a_missing_field_is_named(name):
    row = sample_to_json(make_sample())
    del row[name]
    with pytest.raises(KeyError, match=name):
        sample_from_json(row)


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_of_different_lengths_are_no_sample(name):
    with pytest.raises(AssertionError, match=r"differ in length: \[2, 3\]"):
        make_sample(**{name: getattr(make_sample(), name)[:2]})


def test_response_length_counts_what_is_trained():
    assert make_sample().response_length == 2
    assert make_sample(loss_mask=np.zeros(3, dtype=bool)).response_length == 0
    assert isinstance(make_sample().response_length, int)


def test_a_group_is_named_by_its_prompt():
    assert Group(Prompt(12, (1,), ""), (make_sample(),)).group_id == 12


def test_records_are_frozen():
    for record in (make_sample(), Prompt(0, (1,), ""), SamplingParams(4)):
        with pytest.raises(FrozenInstanceError):
            setattr(record, fields(record)[0].name, 1)
    assert replace(SamplingParams(4), seed=2).max_new_tokens == 4


def test_words_of_the_statuses():
    assert [str(s) for s in Status] == ["completed", "truncated", "aborted", "failed"]
