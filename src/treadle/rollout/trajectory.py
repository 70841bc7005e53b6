"""Build one sample token by token: what was given is masked, what the engine sampled is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from treadle.types import NO_VERSION, Completion, Prompt, Sample, Status


class Trajectory:
    """A growing sequence: the prompt first, then turns of sampled and given tokens.

    Token in, token out: what an engine returned is appended as it is and never tokenised again.
    """

    def __init__(self, prompt: Prompt, index: int, temperature: float):
        self.prompt, self.index, self.temperature = prompt, index, temperature
        self._parts: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
        self.num_sampled = 0
        self.add_given(prompt.token_ids)

    @property
    def token_ids(self) -> list[int]:
        """Every token so far: the prompt of the next turn."""
        return [int(token) for part in self._parts for token in part[0]]

    def add_given(self, token_ids: Sequence[int]) -> None:
        """Append tokens that nobody sampled, such as a tool's result."""
        size = len(token_ids)
        self._parts.append(
            (
                np.asarray(token_ids, dtype=np.int32),
                np.zeros(size, dtype=bool),
                np.zeros(size, dtype=np.float32),
                np.full(size, NO_VERSION, dtype=np.int32),
            )
        )

    def add_sampled(self, completion: Completion) -> None:
        """Append what an engine sampled."""
        trained = np.ones(len(completion.token_ids), dtype=bool)
        self._parts.append((completion.token_ids, trained, completion.logprobs, completion.weight_versions))
        self.num_sampled += len(completion.token_ids)

    def finish(self, status: Status, text: str, failure: str = "") -> Sample:
        """Return the sample so far, ended with this status; `text` is what rewards and people read."""
        tokens, mask, logprobs, versions = (np.concatenate(column) for column in zip(*self._parts, strict=True))
        return Sample(
            group_id=self.prompt.group_id,
            index=self.index,
            token_ids=tokens,
            loss_mask=mask,
            rollout_logprobs=logprobs,
            weight_versions=versions,
            temperature=self.temperature,
            status=status,
            text=text,
            trajectory_id=self.index,
            failure=failure,
            metadata=dict(self.prompt.metadata),
        )


def failed(sample: Sample, why: str) -> Sample:
    """Return the same sample, marked as failed: it is counted and shown, and never trained on."""
    return replace(sample, status=Status.FAILED, reward=None, reward_parts={}, failure=why)
