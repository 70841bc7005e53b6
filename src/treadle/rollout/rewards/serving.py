"""Rewards as a worker process runs them: JSON values in, JSON values out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from treadle.rollout.isolation.worker import Handler
from treadle.rollout.rewards.catalog import RewardSpec, load_reward
from treadle.rollout.rewards.forms import evaluate, evaluate_async
from treadle.rollout.rewards.inputs import RewardInput, RewardScore, input_from_json, input_to_json

LOADER = f"{__name__}:load_handler"


def load_handler(spec: Mapping[str, Any]) -> Handler:
    """Import a reward and return the function that answers its requests."""
    reward = load_reward(RewardSpec.from_json(spec))

    def handle(rows: Sequence[Mapping[str, Any]]) -> Any:
        return _scores_to_json(evaluate(reward, [input_from_json(row) for row in rows]))

    async def handle_async(rows: Sequence[Mapping[str, Any]]) -> Any:
        return _scores_to_json(await evaluate_async(reward, [input_from_json(row) for row in rows]))

    return handle_async if reward.is_async else handle


def request_of(inputs: Sequence[RewardInput]) -> Any:
    """Return what a worker is sent to score these samples."""
    return [input_to_json(item) for item in inputs]


def scores_of(answer: Any) -> list[RewardScore | None]:
    """Return the scores in a worker's answer."""
    return [None if row is None else RewardScore(row["value"], row["parts"]) for row in answer]


def _scores_to_json(scores: Sequence[RewardScore | None]) -> Any:
    return [None if s is None else {"value": s.value, "parts": dict(s.parts)} for s in scores]
