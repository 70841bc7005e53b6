"""What a run says of its steps."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from treadle.errors import CheckpointError, FailedSamplesError
from treadle.metrics import metric
from treadle.observe.run_folder import RunFolder
from treadle.observe.samples import read_groups
from treadle.run.loop import Schedule
from treadle.run.parts import Parts
from treadle.run.record import Record
from treadle.types import Group, Status


@pytest.mark.parametrize(("gap", "warned"), [(0.04, False), (0.2, True)])
def test_a_gap_between_engine_and_trainer_is_warned_about(make_config, gap, warned):
    said: list[str] = []
    ignore = lambda *_: None  # noqa: E731
    outputs = SimpleNamespace(
        sink=SimpleNamespace(write=ignore), progress=SimpleNamespace(step=ignore, warn=said.append)
    )
    record = Record(make_config(max_logprob_diff=0.1), Schedule(0, 9), outputs)
    record.step(7, [metric("train/rollout_logprob_abs_diff", gap)])
    assert [text.startswith("rollout 7: the engine's logprobs are 0.2 nats from the trainer's") for text in said] == (
        [True] if warned else []
    )


@pytest.fixture
def open_record(make_config, tmp_path):
    """`open_record(**config fields)`: a record of a run in `tmp_path`, and what it warned of."""

    def make(**fields):
        said: list[str] = []
        progress = SimpleNamespace(warn=said.append, evaluation=lambda *_: None, phase=lambda *_: None)
        folder = RunFolder.make(tmp_path).open(resumes=True)
        outputs = SimpleNamespace(folder=folder, sink=SimpleNamespace(write=lambda *_: None), progress=progress)
        return Record(make_config(rm_type=("exact",), **fields), Schedule(0, 9), outputs), said

    return make


def with_failures(groups, count):
    """The groups with the first `count` samples failed."""
    failed = iter([True] * count + [False] * 99)
    return [
        Group(
            g.prompt,
            tuple(
                replace(s, status=Status.FAILED, reward=None, failure=f"reward x: {s.index}") if next(failed) else s
                for s in g.samples
            ),
        )
        for g in groups
    ]


def test_a_rollout_with_too_many_failures_ends_the_run_once_it_is_written(open_record, make_groups):
    record, said = open_record()
    groups = make_groups((4, 4), rewards=[[0, 1, 0, 1]] * 2)
    record.rollout(0, with_failures(groups, 4))  # exactly half
    assert said == ["rollout 0: 4 samples failed and are not trained on; first: reward x: 0"]
    with pytest.raises(FailedSamplesError) as caught:
        record.rollout(1, with_failures(groups, 5))
    assert str(caught.value).startswith(
        "rollout 1: 5 of 8 samples failed, more than max_failed_fraction = 0.5 allows; first: reward x: 0; "
    )
    assert sum(s.status is Status.FAILED for g in read_groups(record.out.folder.sample_file(1)) for s in g.samples) == 5
    assert len(said) == 1


def test_how_many_may_fail_can_be_chosen(open_record, make_groups):
    groups = make_groups((4, 4), rewards=[[0, 1, 0, 1]] * 2)
    record, _ = open_record(max_failed_fraction=1.0)
    record.rollout(0, with_failures(groups, 8))
    record, _ = open_record(max_failed_fraction=0.0)
    record.rollout(0, groups)
    with pytest.raises(FailedSamplesError, match="1 of 8 samples failed"):
        record.rollout(1, with_failures(groups, 1))


@pytest.mark.parametrize(
    ("fields", "rewards", "words"),
    [
        ({}, [[0.0, 0.0], [0.0, 0.0]], "every sample got the reward 0: "),
        ({}, [[0.0, 0.0], [1.0, 1.0]], "all samples of a group got the same reward, in every group: "),
        ({"advantage_estimator": "reinforce_plus_plus"}, [[0.0, 0.0], [1.0, 1.0]], ""),
        ({"advantage_estimator": "reinforce_plus_plus"}, [[2.0, 2.0], [2.0, 2.0]], "every sample got the reward 2: "),
        ({"advantage_estimator": "gdpo"}, [[0.0, 0.0], [0.0, 0.0]], ""),
        ({"debug_rollout_only": True}, [[0.0, 0.0], [0.0, 0.0]], ""),
        ({}, [[0.0, 0.0], [0.0, 1.0]], ""),
    ],
)
def test_rewards_that_are_always_the_same_are_warned_about_once(open_record, make_groups, fields, rewards, words):
    record, said = open_record(**fields)
    record.rollout(0, make_groups((2, 2), rewards=rewards))
    record.rollout(1, make_groups((2, 2), rewards=[[0, 1], [0, 1]]))
    for rollout_id in range(2, 10):
        assert not said or rollout_id > 4
        record.rollout(rollout_id, make_groups((2, 2), rewards=rewards if rollout_id != 6 else [[0, 1], [0, 1]]))
    assert [text.startswith(f"in 3 rollouts in a row {words}") for text in said] == ([True] if words else [])


def test_answers_of_an_evaluation_that_could_not_be_scored_are_told(open_record, make_groups):
    record, said = open_record(num_samples_shown=0)
    record.out.progress.show_samples = lambda *_: None
    record.evaluation(3, [("fine", make_groups((2, 2))), ("bad", with_failures(make_groups((2, 2)), 3))], 1.0)
    assert said == ["evaluation of bad: 3 of 4 samples failed and count as reward 0; first: reward x: 0"]
    assert record.eval_fault.startswith("evaluation of bad: 3 of 4 samples failed, more than max_failed_fraction")


def test_a_save_that_fails_is_warned_of_unless_it_is_the_last(open_record):
    async def fail(*_):
        raise CheckpointError("the disk is full")

    record, said = open_record()
    outputs = SimpleNamespace(checkpoints=None, progress=record.out.progress)
    parts = Parts(record.config, record.schedule, outputs, None, SimpleNamespace(save=fail), None, list)
    assert asyncio.run(parts.save(3, last=False)) is None
    assert said == ["the disk is full; training goes on, the next save tries again"]
    for done, last in ((3, True), (9, False)):
        with pytest.raises(CheckpointError, match="the disk is full"):
            asyncio.run(parts.save(done, last=last))
