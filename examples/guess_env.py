"""A complete environment and its reward: guess a number, with a hint after each wrong guess.

    treadle train RECIPE --custom-env-path examples/guess_env.py:Guess
    treadle train RECIPE --custom-env-path examples/guess_env.py:reply --custom-rm-path examples/guess_env.py:reward

Both do the same: `Guess` is an episode, which has its state and its reward; `reply` is a function of all turns so far, and
the reward a function of its own. Each row of the data needs a `label` column with the number to guess.
"""

import re

from treadle.rollout.envs import Step


def last_number(text):
    numbers = re.findall(r"\d+", text)
    return int(numbers[-1]) if numbers else None


def hint(guess, wanted):
    return "Say a number." if guess is None else "Higher." if guess < wanted else "Lower."


class Guess:
    """The game of one sample."""

    async def open(self, prompt):
        """Remember the number. Messages that are returned here would replace the prompt."""
        self.wanted, self.tries = int(prompt.label), 0

    async def step(self, turn):
        """Answer a turn of the model: a hint, or the end with what the game was worth."""
        guess, self.tries = last_number(turn), self.tries + 1
        if guess == self.wanted:
            return Step(reward={"found": 1.0, "quick": 0.1 * (3 - self.tries)})
        if self.tries == 3:
            return Step(reward=0.0)
        return [{"role": "user", "content": hint(guess, self.wanted)}]


async def reply(prompt, turns):
    """Called after each turn of the model: return messages to answer with, or None to end the sample."""
    guess, wanted = last_number(turns[-1]), int(prompt.label)
    if guess == wanted or len(turns) == 3:
        return None
    return [{"role": "user", "content": hint(guess, wanted)}]


def reward(sample):
    """Return 1 if the last number is the right one; `sample.response` holds all turns."""
    return 1.0 if last_number(sample.response) == int(sample.label) else 0.0
