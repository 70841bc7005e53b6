"""What a reward is given and what it gives back: small frozen records of plain JSON values.

The same record reaches a reward wherever it runs (in a worker process, on an event loop, in line), so a score
never depends on the place. What JSON can't hold (dates, images) arrives as text, a tuple as a list, and a
dictionary's keys as text: the same as after a resume.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from treadle.plain_json import plain_json
from treadle.types import Message, Prompt, Sample, Status


@dataclass(frozen=True, slots=True)
class RewardInput:
    """One finished sample as a reward sees it.

    `response` is the sampled text and `token_ids` are its trained tokens; `prompt` is the text the model saw.
    `messages` is the prompt as chat messages if it was made from some. `label` is the column `label_key`
    names, `columns` the whole row of the data set. `status` tells a finished answer from a cut one.
    """

    response: str
    prompt: str = ""
    label: Any = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Message, ...] | None = None
    token_ids: tuple[int, ...] = ()
    status: Status = Status.COMPLETED

    @property
    def num_tokens(self) -> int:
        """How many tokens of the sample are trained: the length of the response."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class RewardScore:
    """A reward with named parts beside it; `parts` are logged and do not change `value`."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)


def prompt_view(prompt: Prompt) -> RewardInput:
    """Return the input that the samples of a group share, with an empty response."""
    return RewardInput(
        response="",
        prompt=prompt.text,
        label=plain_json(prompt.label),
        columns=plain_json(prompt.columns),
        messages=None if prompt.messages is None else tuple(plain_json(m) for m in prompt.messages),
    )


def sample_view(shared: RewardInput, sample: Sample) -> RewardInput:
    """Return the input of one sample, made from its group's."""
    tokens = tuple(sample.token_ids[sample.loss_mask].tolist())
    return replace(shared, response=sample.text, token_ids=tokens, status=sample.status)


def input_to_json(item: RewardInput) -> dict[str, Any]:
    """Turn an input into JSON values; `input_from_json` gives back an equal one."""
    return {
        "response": item.response,
        "prompt": item.prompt,
        "label": item.label,
        "columns": item.columns,
        "messages": None if item.messages is None else list(item.messages),
        "token_ids": list(item.token_ids),
        "status": str(item.status),
    }


def input_from_json(row: Mapping[str, Any]) -> RewardInput:
    """Inverse of `input_to_json`; raises `KeyError` for a missing field."""
    messages = row["messages"]
    return RewardInput(
        response=row["response"],
        prompt=row["prompt"],
        label=row["label"],
        columns=row["columns"],
        messages=None if messages is None else tuple(messages),
        token_ids=tuple(row["token_ids"]),
        status=Status(row["status"]),
    )
