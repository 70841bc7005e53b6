"""A complete environment and its reward: guess a number, with a hint after each wrong guess.

    treadle train RECIPE --custom-env-path examples/guess_env.py:reply --custom-rm-path examples/guess_env.py:reward

Each row of the data needs a `label` column with the number to guess.
"""

import re


def last_number(text):
    numbers = re.findall(r"\d+", text)
    return int(numbers[-1]) if numbers else None


async def reply(prompt, turns):
    """Called after each turn of the model: messages to answer with, or None to end the sample."""
    guess, wanted = last_number(turns[-1]), int(prompt.label)
    if guess == wanted or len(turns) == 3:
        return None
    hint = "Say a number." if guess is None else "Higher." if guess < wanted else "Lower."
    return [{"role": "user", "content": hint}]


def reward(sample):
    """1 where the last number said is the right one; `sample.response` holds all turns."""
    return 1.0 if last_number(sample.response) == int(sample.label) else 0.0
