"""An environment as its worker process runs it: JSON values in, JSON values out.

An episode lives in this process between its steps. A step whose episode is not here, because another process had it and
died, is answered by a new episode that is first given the earlier turns.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from treadle.plain_json import plain_json
from treadle.rollout.envs.base import Episode, Opening, Step, load_environment
from treadle.rollout.isolation.worker import Handler
from treadle.rollout.rewards.inputs import RewardScore
from treadle.types import Prompt, prompt_from_json, prompt_to_json

LOADER = f"{__name__}:load_handler"
MAX_LIVE = 10_000
"""Episodes that are kept between their steps; one that was dropped is made again from its turns."""


def load_handler(path: str) -> Handler:
    """Import and make an environment and return the function that answers its requests.

    An empty request asks what the environment is like.
    """
    environment = load_environment(path)
    live: OrderedDict[str, tuple[Episode, int]] = OrderedDict()  # by id, with the number of turns it has had

    async def handle(request: Mapping[str, Any]) -> Any:
        if not request:
            return {"opens": environment.opens, "keeps_state": environment.keeps_state}
        key, turns = request["episode"], request["turns"]
        episode, had = live.pop(key, (None, -1))
        if request["closes"]:
            if episode is not None:
                await episode.close()
            return None
        prompt = prompt_from_json(request["prompt"])
        if not turns:
            episode = environment.episode()
            opening = await episode.open(prompt)
            answer: dict[str, Any] = {"messages": opening.messages, "tools": opening.tools}
        else:
            if episode is None or had != len(turns) - 1:
                episode = await environment.resumed(prompt, turns[:-1])
            answer = step_to_json(await episode.step(turns[-1]))
        if environment.keeps_state:
            live[key] = episode, len(turns)
            if len(live) > MAX_LIVE:
                await live.popitem(last=False)[1][0].close()
        return plain_json(answer)

    return handle


def step_to_json(step: Step) -> dict[str, Any]:
    """Return a checked step as JSON values."""
    score = step.reward
    assert score is None or isinstance(score, RewardScore), "read_step makes one"
    reward = None if score is None else {"value": score.value, "parts": dict(score.parts)}
    return {"reply": step.reply, "reward": reward, "fresh": step.fresh}


def opening_from_json(row: Mapping[str, Any]) -> Opening:
    """Return the opening that a worker sent."""
    return Opening(row["messages"], row["tools"])


def step_from_json(row: Mapping[str, Any]) -> Step:
    """Return the step that a worker sent."""
    reward = row["reward"]
    return Step(row["reply"], None if reward is None else RewardScore(reward["value"], reward["parts"]), row["fresh"])


def prompt_row(prompt: Prompt) -> Any:
    """Return a prompt as `request_of` takes it; raises `ValueError` if it is nested too deep."""
    return plain_json(prompt_to_json(prompt))


def request_of(key: str, prompt: Any, turns: list[str], *, closes: bool = False) -> dict[str, Any]:
    """Return the request to open an episode (no turns), to answer the last of its turns, or to close it (no prompt)."""
    return {"episode": key, "prompt": prompt, "turns": turns, "closes": closes}
