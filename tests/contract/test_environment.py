"""The contract of environments, with those that come along and with ones that break it."""

import asyncio
from pathlib import Path

import pytest

from treadle.rollout.conversation import SingleTurn
from treadle.rollout.envs import IsolatedEnvironment, ReplyFunction
from treadle.rollout.envs.environment_contract import check_environment
from treadle.types import Prompt

EXAMPLES = Path(__file__).parents[2] / "examples"
PROMPTS = [Prompt(i, (5, 6), f"prompt {i}", label=str(40 + i), columns={"question": "q"}) for i in range(3)]
TURNS = ("", "41", "no idea \N{GRINNING FACE}", "42")

BROKEN = """
from treadle.rollout.envs import Opening, Step

shared = []

class SharesState:
    async def step(self, turn):
        shared.append(turn)
        return str(len(shared))

class Forgets:
    count = 0

    async def step(self, turn):
        Forgets.count += 1
        return str(Forgets.count // 100)

class Tuples:
    async def open(self, prompt):
        return Opening([{"role": "user", "content": "x", "more": (1, 2)}])

    async def step(self, turn):
        return None

class Number:
    async def step(self, turn):
        return 3
"""


@pytest.mark.parametrize("name", ["guess_env.py:reply", "guess_env.py:Guess"])
def test_the_examples_hold_to_the_contract(name):
    check_environment(f"{EXAMPLES / name}", PROMPTS, TURNS)


async def _echo(prompt, turns):
    return [{"role": "user", "content": turns[-1]}] if len(turns) < 4 else None


@pytest.mark.parametrize("environment", [SingleTurn(), ReplyFunction(_echo)])
def test_the_built_in_kinds_hold_to_it(environment):
    check_environment(environment, PROMPTS, TURNS)


def test_an_environment_in_another_process_holds_to_it():
    class InThisLoop:
        """Its worker processes do not belong to an event loop."""

        opens = keeps_state = True

        def __init__(self):
            self.own = asyncio.run(IsolatedEnvironment.open(f"{EXAMPLES / 'guess_env.py'}:Guess", 20.0))

        def episode(self):
            return self.own.episode()

        async def resumed(self, prompt, turns):
            return await self.own.resumed(prompt, turns)

    environment = InThisLoop()
    try:
        check_environment(environment, PROMPTS, TURNS)
    finally:
        asyncio.run(environment.own.close())


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("SharesState", "answered otherwise beside other episodes"),
        ("Tuples", "JSON changes the opening of prompt 0"),
    ],
)
def test_one_that_breaks_it_is_named(tmp_path, name, fault):
    (tmp_path / "broken.py").write_text(BROKEN)
    with pytest.raises(AssertionError, match=fault):
        check_environment(f"{tmp_path}/broken.py:{name}", PROMPTS, TURNS)


def test_a_reply_of_the_wrong_kind_is_refused(tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN)
    with pytest.raises(Exception, match="returned 3 of type int"):
        check_environment(f"{tmp_path}/broken.py:Number", PROMPTS, TURNS)
