"""The contract of rewards, run over every built-in one and the examples. Yours: `check_reward("file.py:name", …)`."""

import json
from pathlib import Path

import pytest

from treadle.rollout.rewards import BUILTIN_REWARDS, RewardInput
from treadle.rollout.rewards.builtin import RewardSettings
from treadle.rollout.rewards.reward_contract import check_reward

EXAMPLES_FILE = Path(__file__).parents[2] / "examples" / "rewards.py"


def gym_columns():
    import reasoning_gym

    arguments = {"size": 2, "seed": 5}
    entry = reasoning_gym.create_dataset("chain_sum", **arguments)[1]
    return {"task": "chain_sum", "task_args": arguments, "entry": json.loads(json.dumps(entry))}


@pytest.fixture(scope="module")
def examples():
    columns = gym_columns()
    answer = columns["entry"]["answer"]
    return [
        RewardInput(f"The answer is {answer}.", "2 + 2 =", f"so\n#### {answer}", columns, token_ids=(1, 2, 3)),
        RewardInput(r"\boxed{\frac{1}{2}}", "2 + 2 =", f"so\n#### {answer}", columns, token_ids=(1,)),
    ]


@pytest.mark.parametrize("name", sorted(BUILTIN_REWARDS))
def test_builtin_rewards_hold_the_contract(name, examples):
    check_reward(name, examples, RewardSettings(regex=r"answer is", timeout_seconds=8.0))


@pytest.mark.parametrize("name", ["right_and_short", "agrees_with_most"])
def test_the_examples_hold_the_contract(name, examples):
    check_reward(f"{EXAMPLES_FILE}:{name}", examples)
