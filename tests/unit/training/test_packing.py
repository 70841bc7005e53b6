"""Micro-batches and packed rows, checked token by token against the samples they were made of."""

from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.config import TrainSection
from treadle.models.layout import Family
from treadle.training.batch import Batch, batch_of
from treadle.training.micro_batches import MicroBatches
from treadle.training.packing import pack, plan_micro_batches
from treadle.types import Sample, Status


def sample(group_id: int, tokens: list[int], mask: list[int], temperature: float = 1.0) -> Sample:
    size = len(tokens)
    return Sample(
        group_id=group_id,
        index=0,
        token_ids=np.array(tokens, dtype=np.int32),
        loss_mask=np.array(mask, dtype=bool),
        rollout_logprobs=np.zeros(size, dtype=np.float32),
        weight_versions=np.zeros(size, dtype=np.int32),
        temperature=temperature,
        status=Status.COMPLETED,
        reward=0.0,
    )


@st.composite
def batches(draw, max_samples: int = 8) -> Batch:
    """Samples of a few groups in any order: a common prompt, then anything, masked and trained tokens mixed.

    Few token values, so that responses also begin alike.
    """
    prompts = draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=3))
    samples = []
    for _ in range(draw(st.integers(1, max_samples))):
        group = draw(st.integers(0, len(prompts) - 1))
        rest = draw(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=6))
        tokens, mask = [t for t, _ in rest], [m for _, m in rest]
        prompt = prompts[group]
        temperature = draw(st.sampled_from([0.5, 1.0]))
        samples.append(sample(40 + group, prompt + tokens, [0] * len(prompt) + mask, temperature))
    return batch_of(samples)


def sequences_of_row(packed) -> list[tuple[list[int], list[int]]]:
    """Each fed sequence as (rows of the packed row, token ids)."""
    out, at = [], 0
    for family in packed.layout.families:
        prefix = list(range(at, at + family.prefix))
        at += family.prefix
        for length in family.suffixes:
            rows = prefix + list(range(at, at + length))
            out.append((rows, packed.token_ids[rows].tolist()))
            at += length
    assert at == packed.token_ids.shape[0]
    return out


@settings(max_examples=200, deadline=None)
@given(batches())
def test_every_trained_token_is_predicted_once_from_the_tokens_before_it(batch):
    packed = pack(batch)
    offsets, lengths = batch.offsets.tolist(), batch.lengths.tolist()
    assert sorted(packed.tokens.tolist()) == torch.nonzero(batch.loss_mask).squeeze(1).tolist()
    assert packed.targets.tolist() == batch.token_ids[packed.tokens].tolist()
    assert packed.sample_index.tolist() == batch.sample_index[packed.tokens].tolist()
    assert packed.temperatures.tolist() == batch.temperatures[packed.sample_index].tolist()
    fed = sequences_of_row(packed)
    order = [
        i for group in dict.fromkeys(batch.group_ids.tolist()) for i in range(len(batch)) if batch.group_ids[i] == group
    ]
    assert len(fed) == len(order)
    rows_of_sample = {i: rows for i, (rows, _) in zip(order, fed, strict=True)}
    for i, (_, tokens) in zip(order, fed, strict=True):
        whole = batch.token_ids[offsets[i] : offsets[i] + lengths[i]].tolist()
        assert tokens == whole[:-1]  # the last token predicts nothing
    for k, token in enumerate(packed.tokens.tolist()):
        i = int(packed.sample_index[k])
        place = token - offsets[i]
        assert packed.predictors[k] == rows_of_sample[i][place - 1]


@settings(max_examples=100, deadline=None)
@given(batches())
def test_a_prompt_is_fed_once_for_its_group(batch):
    packed = pack(batch)
    groups = list(dict.fromkeys(batch.group_ids.tolist()))
    assert len(packed.layout.families) == len(groups)
    for group, family in zip(groups, packed.layout.families, strict=True):
        members = [i for i in range(len(batch)) if batch.group_ids[i] == group]
        parts = [batch.select([i]) for i in members]
        shared = 0
        while all(
            shared < int(p.lengths) - 1
            and not p.loss_mask[shared]
            and p.token_ids[shared] == parts[0].token_ids[shared]
            for p in parts
        ):
            shared += 1
        assert family == Family(shared, tuple(int(p.lengths) - 1 - shared for p in parts))


def test_packing_by_hand():
    batch = batch_of(
        [
            sample(7, [1, 2, 3, 4, 5], [0, 0, 1, 1, 1]),
            sample(3, [9, 8], [0, 1], temperature=0.5),
            sample(7, [1, 2, 6], [0, 0, 1]),
        ]
    )
    packed = pack(batch)
    assert packed.layout.families == (Family(2, (2, 0)), Family(1, (0,)))
    assert packed.token_ids.tolist() == [1, 2, 3, 4, 9]
    assert packed.targets.tolist() == [3, 4, 5, 6, 8]
    assert packed.predictors.tolist() == [1, 2, 3, 1, 4]
    assert packed.tokens.tolist() == [2, 3, 4, 9, 6]
    assert packed.sample_index.tolist() == [0, 0, 0, 2, 1]
    assert packed.temperatures.tolist() == [1, 1, 1, 1, 0.5]


def test_a_tool_result_is_fed_but_not_trained():
    packed = pack(batch_of([sample(1, [1, 2, 3, 4, 5], [0, 1, 0, 0, 1])]))
    assert packed.token_ids.tolist() == [1, 2, 3, 4]
    assert packed.targets.tolist() == [2, 5]
    assert packed.predictors.tolist() == [0, 3]


@pytest.mark.parametrize("act", [pack, lambda b: plan_micro_batches(b, max_tokens=9, micro_batch_size=None)])
def test_a_trained_first_token_is_refused(act):
    batch = batch_of([sample(1, [1, 2], [0, 1]), sample(2, [1, 2], [1, 1])])
    with pytest.raises(ValueError, match="sample 1 trains its first token, which nothing predicts"):
        act(batch)


def test_to_moves_every_tensor():
    packed = pack(batch_of([sample(1, [1, 2], [0, 1])])).to(torch.device("meta"))
    assert packed.layout.position_ids.device.type == "meta"
    for field in fields(packed):
        if field.name != "layout":
            assert getattr(packed, field.name).device.type == "meta", field.name


def tokens_fed(batch: Batch, indices: list[int]) -> int:
    return int(pack(batch.select(indices)).token_ids.shape[0])


@settings(max_examples=300, deadline=None)
@given(batches(max_samples=12), st.integers(1, 40))
def test_dynamic_micro_batches_hold_every_sample_once_within_the_limit(batch, max_tokens):
    plan = plan_micro_batches(batch, max_tokens=max_tokens, micro_batch_size=None)
    assert sorted(i for indices in plan for i in indices) == list(range(len(batch)))
    sizes = [tokens_fed(batch, indices) for indices in plan]
    for indices, size in zip(plan, sizes, strict=True):
        assert indices
        assert size <= max_tokens or len(indices) == 1


def test_the_limit_is_reached_and_no_further():
    # Each sample alone feeds four tokens: two of the prompt and two of the response.
    batch = batch_of([sample(g, [1, 2, 3, 4, 5], [0, 0, 1, 1, 1]) for g in range(6)])
    for max_tokens, count in [(3, 6), (4, 6), (7, 6), (8, 3), (11, 3), (12, 2), (23, 2), (24, 1)]:
        plan = plan_micro_batches(batch, max_tokens=max_tokens, micro_batch_size=None)
        assert [len(indices) for indices in plan] == [6 // count] * count


def test_micro_batches_are_balanced():
    # Fed alone: 9, 9, 9, 9 and 1 token. Filled one after the other they would be 18 + 18 + 1.
    lengths = (10, 10, 10, 10, 2)
    batch = batch_of([sample(g, [1] * n, [0] + [1] * (n - 1)) for g, n in enumerate(lengths)])
    plan = plan_micro_batches(batch, max_tokens=18, micro_batch_size=None)
    sizes = [tokens_fed(batch, indices) for indices in plan]
    assert len(sizes) == 3
    assert sum(sizes) == 37
    assert max(sizes) == 18
    plan = plan_micro_batches(batch, max_tokens=19, micro_batch_size=None)
    assert sorted(tokens_fed(batch, indices) for indices in plan) == [18, 19]


def test_a_sample_over_the_limit_does_not_take_others_along():
    lengths = (41, 3, 3, 31)
    batch = batch_of([sample(g, [1] * n, [0] + [1] * (n - 1)) for g, n in enumerate(lengths)])
    plan = plan_micro_batches(batch, max_tokens=5, micro_batch_size=None)
    assert sorted(sorted(indices) for indices in plan) == [[0], [1, 2], [3]]


def test_a_group_stays_whole_where_it_fits():
    # Three samples of one prompt of 4: together 4 + 3 · 2 = 10 tokens, alone 6 each.
    group = [sample(g, [g, 1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 1, 1, 1]) for g in (1, 2) for _ in range(3)]
    batch = batch_of([group[i] for i in (0, 3, 1, 4, 2, 5)])
    plan = plan_micro_batches(batch, max_tokens=10, micro_batch_size=None)
    assert sorted(sorted(indices) for indices in plan) == [[0, 2, 4], [1, 3, 5]]
    plan = plan_micro_batches(batch, max_tokens=8, micro_batch_size=None)
    assert sorted(len(indices) for indices in plan) == [1, 1, 2, 2]


@pytest.mark.parametrize(("size", "expected"), [(1, [1] * 5), (2, [2, 2, 1]), (3, [3, 2]), (8, [5])])
def test_static_micro_batches_go_in_order(size, expected):
    batch = batch_of([sample(1, [1, 2], [0, 1]) for _ in range(5)])
    plan = plan_micro_batches(batch, max_tokens=None, micro_batch_size=size)
    assert [len(indices) for indices in plan] == expected
    assert [i for indices in plan for i in indices] == list(range(5))


def test_nothing_to_plan():
    assert plan_micro_batches(batch_of([]), max_tokens=8, micro_batch_size=None) == []
    assert plan_micro_batches(batch_of([]), max_tokens=None, micro_batch_size=8) == []


def test_a_micro_batch_is_filled_whatever_the_lengths_where_attention_goes_by_sequence() -> None:
    # Fed: two of 8 tokens and four of 2. On a CPU like lengths share a micro-batch; on a GPU, fewer are filled.
    samples = [sample(group, [0] + [1] * own, [0] + [1] * own) for group, own in enumerate([8, 2, 8, 2, 2, 2])]
    batch = batch_of(samples)
    section = TrainSection(max_tokens_per_gpu=12)
    plans = {device: MicroBatches(section, torch.device(device)).split(batch, range(6)) for device in ("cpu", "cuda")}
    assert sorted(len(one.samples) for one in plans["cpu"]) == [1, 1, 4]
    assert sorted(len(one.samples) for one in plans["cuda"]) == [3, 3]
