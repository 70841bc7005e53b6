"""Scored groups of given tokens, for benches of what comes after a rollout."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from treadle.types import NO_VERSION, Group, Prompt, Sample, Status


def group_of(
    group_id: int, prompt: Sequence[int], responses: Sequence[Sequence[int]], rewards: Sequence[float], text: str = ""
) -> Group:
    """One prompt with a finished sample for each response, all of whose tokens are trained."""
    samples = []
    for index, (response, reward) in enumerate(zip(responses, rewards, strict=True)):
        total = len(prompt) + len(response)
        samples.append(
            Sample(
                group_id=group_id,
                index=index,
                trajectory_id=index,
                token_ids=np.array([*prompt, *response], dtype=np.int32),
                loss_mask=np.arange(total) >= len(prompt),
                rollout_logprobs=np.full(total, -1.0, dtype=np.float32),
                weight_versions=np.full(total, NO_VERSION, dtype=np.int32),
                temperature=1.0,
                status=Status.COMPLETED,
                text=text,
                reward=reward,
            )
        )
    return Group(Prompt(group_id=group_id, token_ids=tuple(prompt), text=""), tuple(samples))
