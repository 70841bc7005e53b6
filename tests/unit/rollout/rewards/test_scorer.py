import asyncio
import json

import pytest

from treadle.config.sections import RewardSection
from treadle.errors import ConfigError, RewardError
from treadle.rollout.rewards import build_scorer
from treadle.types import Prompt, Status

PROMPT = Prompt(0, (1, 2), "the prompt")


def test_several_rewards_are_added_by_weight_and_their_parts_kept(score, path):
    settings = {
        "rm_type": ("last_number", "exact", path("parts")),
        "custom_rm_path": path("scored"),
        "rm_weights": (1.0, 2.0, 0.5, -1.0),
    }
    right, wrong = score(settings, ["72", "it is 72"], label="72")
    parts = {"parts": 1.5, "parts.a": 1.0, "parts.b.c": 0.5, "scored": 2.0, "scored.detail": 7.0}
    assert right.reward == pytest.approx(1.0 + 2.0 + 0.75 - 2.0)
    assert right.reward_parts == {"last_number": 1.0, "exact": 1.0, **parts}
    assert wrong.reward == pytest.approx(1.0 + 0.0 + 0.75 - 2.0)
    assert wrong.reward_parts == {"last_number": 1.0, "exact": 0.0, **parts}
    assert right.status is Status.COMPLETED
    assert right.failure == ""


def test_what_a_reward_is_given(score, path, tmp_path):
    file = tmp_path / "seen.json"
    columns = {"file": str(file), "x": (1, {2: None})}
    messages = ({"role": "user", "content": "hi"},)
    (sample,) = score({"custom_rm_path": path("everything")}, ["é\ud800"], label=4, columns=columns, messages=messages)
    assert sample.failure == ""
    assert json.loads(file.read_text()) == {
        "response": "é\ud800",
        "prompt": "the prompt",
        "label": 4,
        "columns": {"file": str(file), "x": [1, {"2": None}]},
        "messages": [{"role": "user", "content": "hi"}],
        "token_ids": [30, 40, 50],
        "num_tokens": 3,
        "status": "completed",
    }


class Unreadable:
    def __str__(self):
        raise OSError("gone")


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (nested(500), "it is nested more than 100 deep"),
        (nested(100_000), "it is nested more than 100 deep"),
        (Unreadable(), "gone"),
    ],
)
@pytest.mark.parametrize("name", ["length", "async_length", "trl_rank"])
def test_a_row_that_rewards_can_not_be_given_fails_its_samples_only(score, path, value, why, name):
    samples = score({"custom_rm_path": path(name)}, ["a", "b"], columns={"x": value}, row=7, data_name="d.jsonl")
    assert {s.failure for s in samples} == {f"reward {name}: can't be given row 7 of d.jsonl: {why}"}


def test_trl_style_with_columns(score, path):
    columns = {"answer": "4", "topic": "sums"}
    samples = score({"custom_rm_path": path("trl_equals")}, ["4", "5", "4"], columns=columns)
    assert [s.reward for s in samples] == [1.0, 0.0, 1.0]
    assert samples[0].reward_parts == {"trl_equals": 1.0}


def test_trl_style_with_messages_token_ids_and_async(score, path):
    chat = {"messages": ({"role": "system", "content": "s"}, {"role": "user", "content": "u"})}
    assert [s.reward for s in score({"custom_rm_path": path("trl_messages")}, ["abc", ""], **chat)] == [204.0, 201.0]
    both = {"rm_type": (path("trl_token_count"), path("trl_async"))}
    assert [s.reward for s in score(both, ["abc", ""])] == [6.0, 3.0]


def test_none_of_a_trl_style_reward_is_no_reward(score, path):
    samples = score({"rm_type": (path("trl_some"), "exact")}, ["skip", "x"], label="skip")
    assert [(s.reward, s.reward_parts) for s in samples] == [
        (1.0, {"exact": 1.0}),
        (1.0, {"trl_some": 1.0, "exact": 0.0}),
    ]
    skipped, scored = score({"rm_type": (path("trl_some"),)}, ["skip", "x"])
    assert (skipped.status, skipped.reward) == (Status.FAILED, None)
    assert skipped.failure == "no reward gave this sample a value: all returned None"
    assert (scored.status, scored.reward) == (Status.COMPLETED, 1.0)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_a_group_is_scored_in_the_order_of_its_indices(path, sample, order):
    async def run():
        async with build_scorer(RewardSection(custom_rm_path=path("trl_rank"))) as scorer:
            group = scorer.open_group(PROMPT, 4)
            tasks = {}
            for index in order:
                tasks[index] = asyncio.create_task(group.score(sample(f"text {index % 2}", index)))
                await asyncio.sleep(0.01)
            assert not any(task.done() for task in tasks.values()), "the fourth sample is still open"
            group.missing()
            return [(await tasks[i]).reward for i in range(3)]

    assert asyncio.run(run()) == [2.0, 12.0, 22.0]


def test_a_failed_sample_counts_as_missing_and_comes_back_as_it_was(path, sample):
    async def run():
        async with build_scorer(RewardSection(custom_rm_path=path("trl_rank"))) as scorer:
            group = scorer.open_group(PROMPT, 2)
            failed = sample("x", 0, Status.FAILED)
            assert await group.score(failed) is failed
            return await group.score(sample("y", 1))

    assert asyncio.run(run()).reward == 1.0


def test_the_wait_for_the_rest_of_a_group_has_a_deadline(path, sample):
    async def run():
        section = RewardSection(custom_rm_path=path("trl_rank"))
        async with build_scorer(section, group_wait_seconds=0.05) as scorer:
            return await scorer.open_group(PROMPT, 2).score(sample("x"))

    assert asyncio.run(run()).failure == "reward trl_rank: waited 0.05 s for the other samples of the group"


def test_one_bad_call_fails_the_whole_trl_style_group_only(score, path):
    failed = score({"custom_rm_path": path("trl_raises_on_bad")}, ["good", "bad"])
    assert [s.status for s in failed] == [Status.FAILED, Status.FAILED]
    assert "reward trl_raises_on_bad: raised RuntimeError: one is bad (reward_functions.py:" in failed[0].failure
    few = score({"custom_rm_path": path("trl_too_few")}, ["a", "b"])
    assert [s.failure for s in few] == ["reward trl_too_few: returned 1 rewards for 2 samples"] * 2
    lacking = score({"custom_rm_path": path("trl_wants_solution")}, ["a"], columns={"answer": 1})
    assert "asks for 'solution', which the data lacks; its columns are ['answer']" in lacking[0].failure


def test_nonsense_fails_the_sample_with_a_reason(score, path):
    words = ["none", "nan", "inf", "text", "list", "empty", "fine", "raise", "sys.exit"]
    samples = score({"custom_rm_path": path("misbehaves"), "rm_type": ("exact",)}, words, label="fine")
    by_word = dict(zip(words, samples, strict=True))
    assert by_word["fine"].reward == 2.0
    for word, text in {
        "none": "returned None of type NoneType; a reward is a finite number",
        "nan": "returned nan; a reward is a finite number",
        "inf": "returned inf; a reward is a finite number",
        "text": "returned '1.0' of type str; a reward is a finite number",
        "list": "returned [1.0] of type list; a reward is a finite number",
        "empty": "returned an empty dict",
        "raise": "raised ValueError: bad label (reward_functions.py:",
        "sys.exit": "raised SystemExit: 0 (reward_functions.py:",
    }.items():
        sample = by_word[word]
        assert (sample.status, sample.reward, sample.reward_parts) == (Status.FAILED, None, {})
        assert sample.failure.startswith("reward misbehaves: " + text)


def test_failures_of_several_rewards_are_all_named_and_counted(path, sample):
    async def run():
        section = RewardSection(rm_type=("exact", "last_number", path("length")))
        async with build_scorer(section) as scorer:
            scored = await scorer.open_group(PROMPT, 1).score(sample("x"))
            return scored.failure, dict(scorer.failure_counts), scorer.reward_names

    failure, counts, names = asyncio.run(run())
    text = "the sample has no label; name its column with --label-key"
    assert failure == f"reward exact: {text}; reward last_number: {text}"
    assert counts == {"exact": 1, "last_number": 1}
    assert names == ("exact", "last_number", "length")


def test_a_sum_that_is_not_finite_fails(score, path):
    settings = {"rm_type": (path("length"), path("huge")), "rm_weights": (1.0, 3e38)}
    assert score(settings, ["aaa"])[0].failure == "the weighted sum of the rewards is inf"


def test_the_builtins_run_in_a_worker(score):
    settings = {"rm_type": ("math", "regex"), "rm_regex": "box", "rm_weights": (1.0, 0.5), "rm_timeout_seconds": 8.0}
    texts = [r"\boxed{\frac{2}{4}}", "1/3", r"\boxed{3}"]
    assert [s.reward for s in score(settings, texts, label="a half\n#### 0.5")] == [1.5, 0.0, 0.5]


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({}, RewardError, "no reward is given; set --rm-type"),
        ({"rm_type": ("maths",)}, ConfigError, "unknown reward 'maths'; did you mean 'math'?"),
        ({"rm_type": ("regex",)}, RewardError, "set --rm-regex"),
        ({"rm_type": ("regex",), "rm_regex": "("}, RewardError, "is not a regular expression"),
        ({"rm_type": ("exact", "math"), "rm_weights": (1.0,)}, RewardError, "1 --rm-weights for 2 rewards"),
        ({"rm_type": ("exact", "exact")}, RewardError, "given twice"),
        ({"custom_rm_path": "nowhere.py:f"}, ConfigError, "there is no file 'nowhere.py'"),
    ],
)
def test_mistakes_are_found_when_the_scorer_is_built(settings, error, text):
    try:
        build_scorer(RewardSection(**settings))
    except error as found:
        assert text in str(found)  # noqa: PT017  a regular expression would need escapes
    else:
        pytest.fail(f"{settings} was accepted")


@pytest.mark.parametrize("name", ["two_arguments", "Judge", "number"])
def test_a_reward_of_the_wrong_kind_is_found_when_the_scorer_is_built(path, name):
    with pytest.raises(RewardError, match=f"reward '{name}'"):
        build_scorer(RewardSection(custom_rm_path=path(name)))


def test_equal_names_are_told_apart(tmp_path, score, path):
    other = tmp_path / "other.py"
    other.write_text("def length(sample):\n    return 100\n")
    (sample,) = score({"rm_type": (path("length"), f"{other}:length", path("judge"))}, ["abc"])
    assert sample.reward_parts == {"length": 3.0, "length_2": 100.0, "judge": 1.0}
