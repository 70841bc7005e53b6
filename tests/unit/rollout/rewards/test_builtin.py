import json

import pytest

from treadle.rollout.rewards.builtin import BUILTIN_REWARDS, RewardSettings
from treadle.rollout.rewards.forms import RewardFault
from treadle.rollout.rewards.inputs import RewardInput

GSM8K = (
    "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nNatalia sold 48+24 = <<48+24=72>>72 clips altogether.\n#### 72"
)
GSM8K_COMMA = "The profit is 200,000-130,000=$<<200000-130000=70000>>70,000\n#### 70,000"


def make(name, **settings):
    return BUILTIN_REWARDS[name].make(RewardSettings(**settings))


@pytest.fixture(scope="module")
def math():
    return make("math", timeout_seconds=8.0)


@pytest.mark.parametrize(
    ("label", "response", "value"),
    [
        (GSM8K, "24 + 48 = 72.", 1),
        (GSM8K, "24 + 48 = 72 clips in all 2 months", 0),
        (GSM8K, "#### 72", 1),
        (GSM8K, "it is 27", 0),
        (GSM8K_COMMA, "He made a profit of $70000.00", 1),
        (GSM8K_COMMA, "He made $70,000", 1),
        (GSM8K_COMMA, "70", 0),
        ("-4", "4 - 8 = -4", 1),
        ("-4", "4", 0),
        (5, "five", 0),
        (5, "", 0),
        ("0.1", "0.10", 1),
        ("0.1", "0.1000000000000000055", 0),
    ],
)
def test_last_number(label, response, value):
    assert make("last_number")(RewardInput(response, label=label)) == value


def test_last_number_needs_a_number_in_the_label():
    with pytest.raises(RewardFault, match="no number in the label 'Paris'"):
        make("last_number")(RewardInput("3", label="Paris"))


@pytest.mark.parametrize(
    ("label", "response", "value"),
    [("Paris", " Paris\n", 1), ("Paris", "paris", 0), (4, "4", 1), ("", "", 1), ("Zürich", "Zürich", 1)],
)
def test_exact(label, response, value):
    assert make("exact")(RewardInput(response, label=label)) == value


def test_exact_needs_a_label():
    with pytest.raises(RewardFault, match="--label-key"):
        make("exact")(RewardInput("x"))


def test_regex_is_searched_anywhere():
    reward = make("regex", regex=r"<answer>\d+</answer>")
    assert reward(RewardInput("so <answer>42</answer> it is")) == 1
    assert reward(RewardInput("<answer>x</answer>")) == 0


@pytest.mark.parametrize(
    ("label", "response", "value"),
    [
        (GSM8K, r"The total is \boxed{72}.", 1),
        (GSM8K, "24 + 48 = 72.", 1),
        (GSM8K, r"\boxed{72} clips, sold in 2 months", 1),
        (GSM8K, r"\boxed{72} no wait \boxed{73}", 0),
        (GSM8K, r"\boxed{1} and \boxed{72}", 1),
        (GSM8K, "so **72**", 1),
        (GSM8K, "", 0),
        (GSM8K, "I do not know", 0),
        (GSM8K_COMMA, r"\boxed{70{,}000}", 1),
        (GSM8K_COMMA, "70000", 1),
        (r"\frac{1}{2}", r"\boxed{0.5}", 1),
        (r"$\frac{1}{2}$", "it is 1/2", 1),
        (r"\boxed{\frac{1}{2}}", r"we get $\frac{2}{4}$", 1),
        (r"2\sqrt{3}", r"\boxed{\sqrt{12}}", 1),
        ("x^2 + 2x + 1", r"\boxed{(x+1)^2}", 1),
        ("x^2 + 2x + 1", r"\boxed{(x-1)^2}", 0),
        ("(1,2)", r"\boxed{(1, 2)}", 1),
        ("(1,2)", r"\boxed{(2, 1)}", 0),
        (18, "18.0", 1),
        ("18.", r"\boxed{18}", 1),
        ("-3", r"\boxed{3}", 0),
    ],
)
def test_math(math, label, response, value):
    assert math(RewardInput(response, label=label)) == value


def test_math_calls_an_answer_it_cannot_check_wrong(math):
    assert math(RewardInput(r"\boxed{9^{9^{9}}}", label="18")) == 0


def test_math_needs_a_label(math):
    with pytest.raises(RewardFault, match="no label"):
        math(RewardInput("18"))


@pytest.fixture(scope="module")
def reasoning_gym():
    return make("reasoning_gym")


def gym_input(response, task, **arguments):
    import reasoning_gym

    entry = reasoning_gym.create_dataset(task, size=1, seed=3, **arguments)[0]
    columns = {"task": task, "task_args": {"size": 1, "seed": 3, **arguments}, "entry": json.loads(json.dumps(entry))}
    return RewardInput(response.format(answer=entry["answer"]), columns=columns)


@pytest.mark.parametrize("task", ["chain_sum", "countdown", "arc_agi"])
def test_reasoning_gym_gives_one_for_the_right_answer_after_json(reasoning_gym, task):
    assert reasoning_gym(gym_input("{answer}", task)) == 1
    assert reasoning_gym(gym_input("I think\n<answer>0</answer> no <answer>\n{answer} </answer>.", task)) == 1
    assert reasoning_gym(gym_input("<answer>zebra</answer>", task)) < 0.1


def test_reasoning_gym_names_the_missing_column(reasoning_gym):
    with pytest.raises(RewardFault, match="no column 'task'"):
        reasoning_gym(RewardInput("4", label="4"))
