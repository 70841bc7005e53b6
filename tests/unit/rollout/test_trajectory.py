"""Building one sample: what was given is masked, what was sampled is trained, and nothing is changed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.rollout.trajectory import Trajectory, failed
from treadle.types import NO_VERSION, Completion, Prompt, Status

PROMPT = Prompt(7, (4, 5, 6), "abc", label="x", metadata={"row": 1})


def completion(tokens, version=2, logprob=-0.5):
    size = len(tokens)
    return Completion(
        index=1,
        token_ids=np.array(tokens, dtype=np.int32),
        logprobs=np.full(size, logprob, dtype=np.float32),
        weight_versions=np.full(size, version, dtype=np.int32),
        status=Status.COMPLETED,
    )


def test_one_turn():
    trajectory = Trajectory(PROMPT, index=1, temperature=0.7)
    trajectory.add_sampled(completion([10, 11]))
    sample = trajectory.finish(Status.TRUNCATED, "de")
    assert sample.token_ids.tolist() == [4, 5, 6, 10, 11]
    assert sample.loss_mask.tolist() == [False, False, False, True, True]
    assert sample.rollout_logprobs.tolist() == [0.0, 0.0, 0.0, -0.5, -0.5]
    assert sample.weight_versions.tolist() == [NO_VERSION] * 3 + [2, 2]
    assert (sample.group_id, sample.index, sample.trajectory_id, sample.temperature) == (7, 1, 1, 0.7)
    assert (sample.status, sample.text, sample.failure) == (Status.TRUNCATED, "de", "")
    assert sample.metadata == {"row": 1}
    assert sample.response_length == trajectory.num_sampled == 2
    assert sample.reward is None


def test_turns_with_a_tool_between_them_and_new_weights_in_the_second():
    trajectory = Trajectory(PROMPT, 0, 1.0)
    trajectory.add_sampled(completion([10], version=2))
    assert trajectory.token_ids == [4, 5, 6, 10]
    trajectory.add_given([20, 21])
    assert trajectory.token_ids == [4, 5, 6, 10, 20, 21]  # the prompt of the next turn
    trajectory.add_sampled(completion([12, 13], version=3, logprob=-1.0))
    sample = trajectory.finish(Status.COMPLETED, "")
    assert sample.token_ids.tolist() == [4, 5, 6, 10, 20, 21, 12, 13]
    assert sample.loss_mask.astype(int).tolist() == [0, 0, 0, 1, 0, 0, 1, 1]
    assert sample.rollout_logprobs.tolist() == [0, 0, 0, -0.5, 0, 0, -1.0, -1.0]
    assert sample.weight_versions.tolist() == [-1, -1, -1, 2, -1, -1, 3, 3]
    assert trajectory.num_sampled == sample.response_length == 3


def test_nothing_sampled():
    trajectory = Trajectory(PROMPT, 0, 1.0)
    trajectory.add_sampled(completion([]))
    sample = trajectory.finish(Status.ABORTED, "")
    assert sample.token_ids.tolist() == [4, 5, 6]
    assert not sample.loss_mask.any()


@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 97), max_size=6)), max_size=8))
def test_every_token_is_kept_in_order_with_its_own_numbers(turns):
    trajectory = Trajectory(PROMPT, 0, 1.0)
    tokens, mask = list(PROMPT.token_ids), [False] * 3
    for number, (is_sampled, turn) in enumerate(turns):
        tokens += turn
        mask += [is_sampled] * len(turn)
        if is_sampled:
            trajectory.add_sampled(completion(turn, version=number, logprob=-1.0 - number))
        else:
            trajectory.add_given(turn)
        assert trajectory.token_ids == tokens
    sample = trajectory.finish(Status.COMPLETED, "")
    assert sample.token_ids.tolist() == tokens
    assert sample.loss_mask.tolist() == mask
    assert [a.dtype for a in (sample.token_ids, sample.loss_mask, sample.rollout_logprobs, sample.weight_versions)] == [
        np.int32,
        bool,
        np.float32,
        np.int32,
    ]
    assert sample.weight_versions[sample.loss_mask].tolist() == [
        n for n, (s, turn) in enumerate(turns) if s for _ in turn
    ]
    assert (sample.weight_versions[~sample.loss_mask] == NO_VERSION).all()
    assert (sample.rollout_logprobs[~sample.loss_mask] == 0).all()
    assert (sample.rollout_logprobs[sample.loss_mask] <= -1).all()


def test_a_failed_sample_keeps_its_tokens_and_loses_its_reward():
    trajectory = Trajectory(PROMPT, 0, 1.0)
    trajectory.add_sampled(completion([10]))
    sample = failed(trajectory.finish(Status.COMPLETED, "d"), "the tool is gone")
    assert (sample.status, sample.failure, sample.reward) == (Status.FAILED, "the tool is gone", None)
    assert sample.reward_parts == {}
    assert sample.token_ids.tolist() == [4, 5, 6, 10]
    assert sample.text == "d"


def test_the_arrays_of_a_sample_are_of_one_length():
    trajectory = Trajectory(PROMPT, 0, 1.0)
    broken = completion([10, 11])
    object.__setattr__(broken, "logprobs", broken.logprobs[:1])
    trajectory.add_sampled(broken)
    with pytest.raises(AssertionError, match="differ in length"):
        trajectory.finish(Status.COMPLETED, "")
