"""Two rewards of your own, complete: one that looks at a sample, one that looks at a whole group.

treadle train my_recipe.toml --custom-rm-path examples/rewards.py:right_and_short
treadle train my_recipe.toml --custom-rm-path examples/rewards.py:agrees_with_most
"""

import re
from collections import Counter

from treadle.rollout.rewards import RewardInput


def last_number(text: str) -> str | None:
    found = re.findall(r"-?\d+", text.replace(",", ""))
    return found[-1] if found else None


def right_and_short(sample: RewardInput) -> dict[str, float]:
    """Per sample: 1 for the right number and up to 0.2 for saying it in few words; the two are added up.

    Each entry is logged on its own, as `right_and_short.right` and `right_and_short.short`.
    """
    right = float(last_number(sample.response) == last_number(str(sample.label)))
    num_words = len(sample.response.split())
    return {"right": right, "short": right * 0.2 / max(1, num_words)}


def agrees_with_most(completions: list, **columns: list) -> list[float | None]:
    """Per group, written as for TRL: 1 for the number most samples of the group end with. It needs no label.

    A completion is text, or a list of messages where the prompt is a chat. `columns` holds the rest: `prompts`,
    `label` and the data's columns, each a list with one entry per sample.
    """
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    numbers = [last_number(text) for text in texts]
    votes = Counter(number for number in numbers if number is not None)
    if not votes:
        return [0.0] * len(texts)
    winner, _ = min(votes.items(), key=lambda item: (-item[1], item[0]))  # equal votes: always the same one
    return [float(number == winner) for number in numbers]
