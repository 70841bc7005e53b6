"""The plan of a rollout: what each rank is given, and that nothing is lost, split wrongly or counted twice."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from treadle.config import batch_arithmetic
from treadle.training.batch import batch_of, concat
from treadle.training.rollout_plan import Planner, TokenNumbers, numbers_at
from treadle.types import Status

FIELDS = {"rollout_batch_size": 4, "n_samples_per_prompt": 3, "max_tokens_per_gpu": 32}


@pytest.fixture
def make_planner(make_config):
    def make(num_ranks: int = 1, **fields) -> Planner:
        config = make_config(**{**FIELDS, **fields})
        return Planner(config, batch_arithmetic(config), num_ranks, pytest.fail)

    return make


def test_one_rank_gets_the_rollout_as_it_is(make_planner, make_groups) -> None:
    groups = make_groups((3, 2, 4, 3))
    planner = make_planner(num_steps_per_rollout=3)
    (share,) = planner.plan(groups)
    expected = batch_of([s for g in groups for s in g.samples])
    assert torch.equal(share.batch.token_ids, expected.token_ids)
    assert share.steps == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11))
    signal = share.batch.shaped != 0
    assert share.trained == tuple(tuple(i for i in indices if signal[i]) for indices in share.steps)
    assert all(share.trained)
    assert share.num_trajectories == 12
    assert share.num_tokens == int(expected.lengths.sum())
    for indices in share.steps:
        part = share.batch.select(indices)
        found = planner.objective.loss_weights(replace(part, loss_weights=None), 4)
        assert torch.equal(part.loss_weights, found)


def test_samples_of_one_trajectory_belong_to_one_step_and_weigh_as_one(make_planner, make_groups) -> None:
    """A trajectory of two samples stands beside eleven of one; by the number of samples it would lie in two steps."""
    groups = list(make_groups((3, 3, 3, 3)))
    first = groups[1].samples[0]  # the fourth trajectory, the last one of the first step
    groups[1] = replace(groups[1], samples=(first, first, *groups[1].samples[1:]))
    (share,) = make_planner(num_steps_per_rollout=3).plan(groups)
    assert share.steps == ((0, 1, 2, 3, 4), (5, 6, 7, 8), (9, 10, 11, 12))
    assert share.num_trajectories == 12
    weights = [float(share.batch.select([i]).loss_weights.sum()) for i in range(13)]
    assert weights[3] + weights[4] == pytest.approx(weights[5])
    assert weights[3] == pytest.approx(weights[4])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 99), num_ranks=st.integers(2, 7), steps=st.sampled_from([1, 2, 3]), dynamic=st.booleans())
def test_every_sample_goes_to_one_rank_with_its_own_numbers(
    make_planner, make_groups, seed, num_ranks, steps, dynamic
) -> None:
    groups = make_groups((3, 2, 4, 3), seed=seed)
    fields = {"num_steps_per_rollout": steps, "use_dynamic_batch_size": dynamic}
    fields |= {} if dynamic else {"micro_batch_size": 2}
    (whole,) = make_planner(**fields).plan(groups)
    shares = make_planner(num_ranks, **fields).plan(groups)
    assert len(shares) == num_ranks

    def rows(batch, indices) -> list[tuple]:
        parts = [batch.select([i]) for i in indices]
        names = ("token_ids", "rewards", "shaped", "loss_weights", "group_ids", "trajectory_ids", "temperatures")
        return [tuple(tuple(getattr(part, name).tolist()) for name in names) for part in parts]

    for step in range(steps):
        found = [row for share in shares for row in rows(share.batch, share.steps[step])]
        assert sorted(found) == sorted(rows(whole.batch, whole.steps[step]))
        trained = [row for share in shares for row in rows(share.batch, share.trained[step])]
        assert sorted(trained) == sorted(rows(whole.batch, whole.trained[step]))
    joined = concat([share.batch for share in shares])
    assert len(joined) == len(whole.batch)
    assert joined.loss_weights.sum().item() == pytest.approx(whole.batch.loss_weights.sum().item(), rel=1e-5)


def test_samples_without_advantage_do_not_unbalance_the_others(make_planner, make_groups) -> None:
    """Half of the groups teach nothing: each rank gets as many of those that do."""
    rewards = [[1.0, 0.0], [1.0, 1.0]] * 4
    groups = make_groups((2,) * 8, rewards=rewards, response_lengths=(4, 4), prompt_lengths=(5,))
    shares = make_planner(4, rollout_batch_size=8, n_samples_per_prompt=2).plan(groups)
    learning = [int((share.batch.shaped != 0).sum()) for share in shares]
    assert learning == [2, 2, 2, 2]
    assert [len(share.batch) for share in shares] == [4, 4, 4, 4]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_step_without_signal_trains_one_group_so_that_it_is_measured(make_planner, make_groups, num_ranks) -> None:
    """Steps of 4 samples: the last two groups teach nothing, so the second step runs what it has of the second group."""
    groups = make_groups((2, 3, 3), rewards=[[1.0, 0.0], [0.5] * 3, [1.0] * 3])
    fields = {"rollout_batch_size": 4, "n_samples_per_prompt": 2, "num_steps_per_rollout": 2}
    shares = make_planner(num_ranks, **fields).plan(groups)

    def trained(shares, step: int) -> list[int]:
        return sorted(share.places[i] for share in shares for i in share.trained[step])

    assert [trained(shares, step) for step in (0, 1)] == [[0, 1], [4]]
    everything = make_planner(num_ranks, **fields, skip_zero_advantage=False).plan(groups)
    assert [trained(everything, step) for step in (0, 1)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    whitened = make_planner(num_ranks, **fields, normalize_advantages=True).plan(groups)
    assert [trained(whitened, step) for step in (0, 1)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_drops_are_counted_on_the_first_rank_only(make_planner, make_groups) -> None:
    groups = make_groups((3, 2, 4, 3))
    failed = replace(groups[0].samples[0], status=Status.FAILED, reward=None)
    groups[0] = replace(groups[0], samples=(failed, *groups[0].samples[1:]))
    first, *others = make_planner(3).plan(groups)
    assert [(m.name, m.value) for m in first.metrics] == [("rollout/dropped/failed", 1.0)]
    assert all(share.metrics == () for share in others)
    assert {share.num_trajectories for share in (first, *others)} == {11}


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_rollout_of_failures_gives_every_rank_nothing(make_planner, make_groups, num_ranks) -> None:
    groups = [
        replace(g, samples=tuple(replace(s, status=Status.FAILED, reward=None) for s in g.samples))
        for g in make_groups((3, 2, 4, 3))
    ]
    shares = make_planner(num_ranks).plan(groups)
    assert [len(share.batch) for share in shares] == [0] * num_ranks
    assert all(share.steps == share.trained == ((),) for share in shares)


def test_moments_of_rewards_are_the_planners_to_remember(make_planner, make_groups) -> None:
    fields = {"normalize_rewards_running": True, "advantage_estimator": "rloo"}
    one, other = make_planner(**fields), make_planner(2, **fields)
    one.plan(make_groups((3, 2, 4, 3)))
    assert one.state()["reward_moments"][0] == 12
    other.load_state(one.state())
    whole = one.plan(make_groups((3, 2, 4, 3), seed=1))[0].batch.shaped
    parts = torch.cat([share.batch.shaped for share in other.plan(make_groups((3, 2, 4, 3), seed=1))])
    assert sorted(parts.tolist()) == sorted(whole.tolist())
    assert make_planner().state() == {}


def test_a_rollout_that_is_dealt_twice_is_prepared_once_and_numbers_find_their_samples(
    make_planner, make_groups
) -> None:
    groups = make_groups((3, 2, 4, 3))
    fields = {"normalize_rewards_running": True, "num_steps_per_rollout": 2}
    planner, once = make_planner(**fields), make_planner(**fields)
    planned = planner.prepare(groups)
    once.plan(groups)
    three, two = planner.deal(planned, 3), planner.deal(planned, 2)
    assert planner.state() == once.state()  # the moments of the rewards count the rollout once
    whole = torch.arange(len(planned.batch.token_ids)).float()
    batch = replace(planned.batch, values=whole)
    parts = [TokenNumbers(s.places, s.batch.lengths, batch.select(s.places).values) for s in three]
    assert sorted(place for share in three for place in share.places) == list(range(len(planned.batch)))
    for share in two:
        assert torch.equal(planned.batch.select(share.places).token_ids, share.batch.token_ids)
        assert torch.equal(numbers_at(share.places, parts), batch.select(share.places).values)
    assert numbers_at((), parts).shape == (0,)
