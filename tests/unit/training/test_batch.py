"""No field of a batch is lost, whatever is done to it; the fields are read from the class, so a new one is covered."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treadle.training.batch import MAX_TRAJECTORIES, Batch, Role, batch_of, concat
from treadle.types import Sample, Status

LENGTHS = (3, 0, 2, 4)


def full_batch(lengths=LENGTHS, seed: int = 0) -> Batch:
    """Every field set in its own dtype, and every number different from the others of its field."""
    generator = torch.Generator().manual_seed(seed)
    values = {}
    for field in fields(Batch):
        role = field.metadata["role"]
        assert role in (Role.PER_TOKEN, Role.PER_SAMPLE), f"teach this test about {field.name}"
        count = sum(lengths) if role == Role.PER_TOKEN else len(lengths)
        numbers = torch.randperm(1000, generator=generator)[:count]
        kind = str(field.type)
        numbers = (
            numbers if kind.startswith("Int") else numbers % 2 == 0 if kind.startswith("Bool") else numbers.float()
        )
        values[field.name] = numbers[:, None] if "S P" in kind else numbers
    return Batch(**{**values, "lengths": torch.tensor(lengths)})


def rows(batch: Batch) -> list[dict[str, list[float]]]:
    """Each sample as plain lists."""
    out = []
    starts = np.cumsum([0, *batch.lengths.tolist()])
    for i in range(len(batch)):
        row = {}
        for field in fields(Batch):
            value = getattr(batch, field.name)
            part = slice(starts[i], starts[i + 1]) if field.metadata["role"] == Role.PER_TOKEN else slice(i, i + 1)
            row[field.name] = None if value is None else value[part].tolist()
        out.append(row)
    return out


@given(st.lists(st.integers(0, len(LENGTHS) - 1), max_size=8))
def test_select_takes_whole_samples_in_any_order_and_number(indices):
    batch = full_batch()
    expected = rows(batch)
    assert rows(batch.select(indices)) == [expected[i] for i in indices]


def test_select_keeps_dtypes_and_absent_fields():
    batch = replace(full_batch(), advantages=None, token_ids=torch.arange(9))
    picked = batch.select([3, 3])
    assert picked.advantages is None
    assert picked.token_ids.tolist() == [5, 6, 7, 8, 5, 6, 7, 8]
    for field in fields(Batch):
        value = getattr(batch, field.name)
        if value is not None:
            assert getattr(picked, field.name).dtype == value.dtype


def test_concat_is_sample_after_sample():
    one, two = full_batch(seed=1), full_batch(lengths=(1, 5), seed=2)
    assert rows(concat([one, two, one])) == rows(one) + rows(two) + rows(one)


def test_concat_of_all_parts_is_the_batch_again():
    batch = full_batch()
    assert rows(concat([batch.select([0]), batch.select([]), batch.select([1, 2, 3])])) == rows(batch)


@pytest.mark.parametrize("name", [f.name for f in fields(Batch) if f.default is None])
def test_a_field_in_some_parts_only_cannot_be_joined(name):
    with pytest.raises(AssertionError, match=f"field {name} is in some of the batches only"):
        concat([full_batch(), replace(full_batch(), **{name: None})])


def test_to_moves_every_field():
    moved = full_batch().to(torch.device("meta"))
    for field in fields(Batch):
        assert getattr(moved, field.name).device.type == "meta", field.name


def test_offsets_and_sample_index():
    batch = full_batch()
    assert batch.offsets.tolist() == [0, 3, 3, 5]
    assert batch.sample_index.tolist() == [0, 0, 0, 2, 2, 3, 3, 3, 3]


def make_sample(group_id: int, trajectory_id: int, length: int, reward: float | None = 0.5) -> Sample:
    return Sample(
        group_id=group_id,
        index=0,
        trajectory_id=trajectory_id,
        token_ids=np.arange(length, dtype=np.int32) + 10 * group_id,
        loss_mask=np.arange(length) > 0,
        rollout_logprobs=np.full(length, -0.25, dtype=np.float32),
        weight_versions=np.zeros(length, dtype=np.int32),
        temperature=0.7,
        status=Status.COMPLETED,
        reward=reward,
    )


def test_batch_of_samples():
    batch = batch_of([make_sample(4, 1, 3), make_sample(2, 0, 2, reward=1.0)])
    assert batch.lengths.tolist() == [3, 2]
    assert batch.group_ids.tolist() == [4, 2]
    assert batch.trajectory_ids.tolist() == [4 * MAX_TRAJECTORIES + 1, 2 * MAX_TRAJECTORIES]
    assert batch.rewards.tolist() == [0.5, 1.0]
    assert batch.temperatures.tolist() == pytest.approx([0.7, 0.7])
    assert batch.token_ids.tolist() == [40, 41, 42, 20, 21]
    assert batch.loss_mask.tolist() == [False, True, True, False, True]
    assert batch.rollout_logprobs.tolist() == [-0.25] * 5
    assert (batch.token_ids.dtype, batch.loss_mask.dtype) == (torch.int64, torch.bool)
    assert [f.name for f in fields(Batch) if getattr(batch, f.name) is None] == [
        "reward_parts",
        "shaped",
        "advantages",
        "loss_weights",
        "old_logprobs",
        "ref_logprobs",
        "teacher_logprobs",
        "entropy",
        "correction",
        "values",
        "returns",
    ]


def test_batch_of_nothing():
    batch = batch_of([])
    assert len(batch) == 0
    assert batch.token_ids.shape == (0,)
    assert batch.select([]).lengths.tolist() == []


def test_an_unscored_sample_never_gets_here():
    with pytest.raises(AssertionError, match="without a reward"):
        batch_of([make_sample(1, 0, 2, reward=None)])
