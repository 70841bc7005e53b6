"""Rewards as a worker process runs them, and how the run asks it: JSON values in, JSON values out."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from treadle.errors import RewardError
from treadle.rollout.isolation.fault import CallFault, StartFault
from treadle.rollout.isolation.worker import Handler
from treadle.rollout.isolation.worker_pool import Work, WorkerPool
from treadle.rollout.rewards.builtin import RewardSettings
from treadle.rollout.rewards.catalog import RewardSpec, load_reward
from treadle.rollout.rewards.forms import Form, evaluate, evaluate_async
from treadle.rollout.rewards.inputs import RewardInput, RewardScore, input_from_json, input_to_json

LOADER, DESCRIBER = f"{__name__}:load_handler", f"{__name__}:load_description"


def load_handler(spec: Mapping[str, Any]) -> Handler:
    """Import a reward and return the function that answers its requests."""
    reward = load_reward(RewardSpec.from_json(spec))

    def handle(rows: Sequence[Mapping[str, Any]]) -> Any:
        return _scores_to_json(evaluate(reward, [input_from_json(row) for row in rows]))

    async def handle_async(rows: Sequence[Mapping[str, Any]]) -> Any:
        return _scores_to_json(await evaluate_async(reward, [input_from_json(row) for row in rows]))

    return handle_async if reward.is_async else handle


def load_description(spec: Mapping[str, Any]) -> Handler:
    """Import a reward and return a function that tells its form; the run itself never imports it."""
    reward = load_reward(RewardSpec.from_json(spec))
    return lambda request: {"form": reward.form, "is_async": reward.is_async}


@functools.cache
def describe_reward(name: str, target: str) -> tuple[Form, bool]:
    """Return the form of a user's reward, and whether it is `async`, as a worker process sees it.

    Raises:
        ConfigError: if it can't be imported.
        RewardError: if it is of the wrong kind, or if its module ends the process.
    """
    spec = RewardSpec(name, target, RewardSettings())
    pool = WorkerPool(Work(DESCRIBER, [spec.to_json()], timeout_seconds=60.0))
    try:
        answer = pool.submit(0, None).result()
    except CallFault as fault:
        if isinstance(fault, StartFault) and fault.error is not None:
            raise fault.error from fault
        raise RewardError(f"reward {target!r}: {fault}") from fault
    finally:
        pool.close()
    return answer["form"], answer["is_async"]


def request_of(inputs: Sequence[RewardInput]) -> Any:
    """Return what a worker is sent to score these samples."""
    return [input_to_json(item) for item in inputs]


def scores_of(answer: Any) -> list[RewardScore | None]:
    """Return the scores in a worker's answer."""
    return [None if row is None else RewardScore(row["value"], row["parts"]) for row in answer]


def _scores_to_json(scores: Sequence[RewardScore | None]) -> Any:
    return [None if s is None else {"value": s.value, "parts": dict(s.parts)} for s in scores]
