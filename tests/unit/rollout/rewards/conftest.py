"""Samples and scorers for the reward tests."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from treadle.config.sections import RewardSection
from treadle.rollout.rewards import build_scorer
from treadle.types import Prompt, Sample, Status

FUNCTIONS = Path(__file__).with_name("reward_functions.py")


def make_sample(text: str, index: int = 0, status: Status = Status.COMPLETED) -> Sample:
    """A sample of two prompt tokens and three sampled ones."""
    return Sample(
        group_id=0,
        index=index,
        token_ids=np.array([1, 2, 30, 40, 50], dtype=np.int32),
        loss_mask=np.array([False, False, True, True, True]),
        rollout_logprobs=np.zeros(5, dtype=np.float32),
        weight_versions=np.zeros(5, dtype=np.int32),
        temperature=1.0,
        status=status,
        text=text,
    )


def score_group(settings: dict[str, Any], texts: list[str], **prompt: Any) -> list[Sample]:
    """Score one group's responses with the rewards of a `[reward]` section."""

    async def run() -> list[Sample]:
        async with build_scorer(RewardSection(**settings)) as scorer:
            group = scorer.open_group(
                Prompt(**{"group_id": 0, "token_ids": (1, 2), "text": "the prompt"} | prompt), len(texts)
            )
            return list(await asyncio.gather(*(group.score(make_sample(t, i)) for i, t in enumerate(texts))))

    return asyncio.run(run())


@pytest.fixture
def score():
    return score_group


@pytest.fixture
def sample():
    return make_sample


@pytest.fixture
def path():
    """`file.py:name` of a function in reward_functions.py."""
    return lambda name: f"{FUNCTIONS}:{name}"
