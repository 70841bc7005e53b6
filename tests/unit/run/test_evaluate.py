"""Evaluation: how a set is sampled, and its metrics by hand."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.config import EvalOverride
from treadle.metrics import reduce_metrics
from treadle.run.evaluate import eval_metrics, eval_sampling, pass_at_k
from treadle.types import Group, Prompt, Sample, SamplingParams, Status


def make_group(rewards, lengths=None, truncated=()):
    """A reward of None is a failed answer."""
    samples = []
    for i, reward in enumerate(rewards):
        size = 3 if lengths is None else lengths[i]
        status = Status.FAILED if reward is None else Status.TRUNCATED if i in truncated else Status.COMPLETED
        mask = np.arange(2 + size) >= 2
        zeros = np.zeros(2 + size)
        samples.append(
            Sample(0, i, zeros.astype(np.int32), mask, zeros, zeros.astype(np.int32), 1.0, status, reward=reward)
        )
    return Group(Prompt(0, (1, 2), ""), tuple(samples))


def test_by_hand():
    groups = [
        make_group([1.0, 0.0, 0.0, 1.0], lengths=[1, 2, 3, 4], truncated=(1, 2)),
        make_group([None, 0.5, 0.25, 1.0], lengths=[5, 6, 7, 8]),
        make_group([0.0, 0.0, 0.0, None], lengths=[0, 0, 0, 0]),
    ]
    assert reduce_metrics(eval_metrics("sums", groups)) == pytest.approx(
        {
            "eval/sums/accuracy": (2.0 + 1.75 + 0.0) / 12,  # a failed answer counts as 0
            "eval/sums/response_length_mean": 36 / 12,
            "eval/sums/truncated_fraction": 2 / 12,
            "eval/sums/failed_count": 2,
            "eval/sums/num_samples": 12,
            # 2 right of 4: 1 − C(2, 2)/C(4, 2) = 5/6; 1 right of 4: 1 − C(3, 2)/C(4, 2) = 1/2; half right is not right
            "eval/sums/pass_at_2": (5 / 6 + 1 / 2 + 0) / 3,
            "eval/sums/pass_at_4": 2 / 3,
        }
    )


@pytest.mark.parametrize(("n", "ks"), [(1, []), (2, [2]), (3, [2]), (4, [2, 4]), (9, [2, 4, 8])])
def test_powers_of_two_up_to_the_answers_there_are(n, ks):
    names = {m.name for m in eval_metrics("s", [make_group([1.0] * n)])}
    assert {name for name in names if "pass_at" in name} == {f"eval/s/pass_at_{k}" for k in ks}


@pytest.mark.parametrize(
    ("n", "right", "k", "want"),
    [(1, 1, 1, 1.0), (1, 0, 1, 0.0), (4, 1, 1, 0.25), (4, 1, 2, 0.5), (4, 3, 2, 1.0), (10, 2, 3, 1 - 56 / 120)],
)
def test_pass_at_k(n, right, k, want):
    assert pass_at_k(n, right, k) == pytest.approx(want)


@given(st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_choices_with_a_right_one(case):
    n, right, k = case
    choices = list(itertools.combinations([True] * right + [False] * (n - right), k))
    assert math.isclose(pass_at_k(n, right, k), sum(any(c) for c in choices) / len(choices), abs_tol=1e-12)


def test_sampling_of_a_set(make_config):
    config = make_config(
        eval_temperature=0.6,
        eval_top_p=0.9,
        eval_top_k=40,
        n_samples_per_eval_prompt=4,
        eval_max_response_len=100,
        rollout_max_response_len=256,
        rollout_temperature=1.2,
        rollout_min_p=0.1,
        rollout_stop=("###",),
        rollout_stop_token_ids=(7,),
    )
    common = SamplingParams(100, temperature=0.6, top_p=0.9, top_k=40, stop=("###",), stop_token_ids=(7,))
    assert eval_sampling(config, None) == (common, 4)
    assert eval_sampling(config, EvalOverride()) == (common, 4)
    override = EvalOverride(
        eval_temperature=0.0, eval_top_p=1.0, eval_top_k=0, n_samples_per_eval_prompt=1, eval_max_response_len=9
    )
    own = SamplingParams(9, temperature=0.0, stop=("###",), stop_token_ids=(7,))
    assert eval_sampling(config, override) == (own, 1), "a 0 of its own is a setting too"


def test_evaluation_is_greedy_and_as_long_as_the_rollout_where_nothing_is_given(make_config):
    sampling, n = eval_sampling(make_config(rollout_max_response_len=33, rollout_temperature=1.0), None)
    assert (sampling.temperature, sampling.max_new_tokens, n) == (0.0, 33, 1)
