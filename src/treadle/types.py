"""What flows through Treadle: prompts, samples, groups, and how to sample.

A `Prompt` comes from a data source, an engine turns it into n `Sample`s, and the n samples are one `Group`.
A sample has no prompt/response split. Single turns, tools, partial rollouts and plain text all have one form: a
sequence of tokens, and a mask that says which of them are trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

NO_VERSION = -1
"""The weight version of a token that no engine sampled (a prompt or a tool result)."""

Message = Mapping[str, Any]
"""A chat message: `{"role": "user", "content": "…"}`."""


class Status(StrEnum):
    """How a sample ended."""

    COMPLETED = "completed"  # the model stopped by itself: end of sequence or a stop string
    TRUNCATED = "truncated"  # it ran into the length limit
    ABORTED = "aborted"  # the engine was told to stop; the tokens so far are valid
    FAILED = "failed"  # its reward or environment raised or ran out of time; never trained on


@dataclass(frozen=True, slots=True)
class Prompt:
    """One draw from a data source.

    `group_id` counts draws over the whole run, so the same row drawn in two epochs makes two groups.
    `columns` is the whole row of the data set: what rewards and environments read.
    """

    group_id: int
    token_ids: tuple[int, ...]
    text: str
    label: Any = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    data_name: str = ""
    row: int = 0
    messages: tuple[Message, ...] | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How an engine picks tokens.

    `temperature = 0` is greedy. `top_k = 0`, `top_p = 1` and `min_p = 0` turn that filter off. `seed` determines the
    tokens of sample `i` of a request, whatever else is in the batch. A stop string ends the text and is part of it.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """What an engine returns for one of the n samples of a request; arrays have one entry per new token.

    `logprobs` are those of the distribution the token was drawn from (temperature and cuts applied; for greedy
    decoding that of temperature 1).
    """

    index: int
    token_ids: np.ndarray  # int32 [T]
    logprobs: np.ndarray  # float32 [T]
    weight_versions: np.ndarray  # int32 [T]
    status: Status
    stop_reason: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One finished (or aborted) trajectory; the four arrays have one entry per token of the whole sequence.

    `loss_mask[t]` is True if token t is trained. `rollout_logprobs[t]` and `weight_versions[t]` belong to
    token t itself and are 0 and `NO_VERSION` if no engine sampled it. `trajectory_id` names the rollout that the
    sample was cut from: samples that share one (fan-out) count once in the loss.
    """

    group_id: int
    index: int
    token_ids: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # bool [T]
    rollout_logprobs: np.ndarray  # float32 [T]
    weight_versions: np.ndarray  # int32 [T]
    temperature: float
    status: Status
    text: str = ""
    trajectory_id: int = 0
    reward: float | None = None
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    failure: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        lengths = {len(self.token_ids), len(self.loss_mask), len(self.rollout_logprobs), len(self.weight_versions)}
        assert len(lengths) == 1, f"per-token arrays of a sample differ in length: {sorted(lengths)}"

    @property
    def response_length(self) -> int:
        """Number of trained tokens."""
        return int(self.loss_mask.sum())


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The samples of one prompt, any number of them."""

    prompt: Prompt
    samples: tuple[Sample, ...]

    @property
    def group_id(self) -> int:
        return self.prompt.group_id

    @property
    def trajectories(self) -> list[Sample]:
        """The last sample of each trajectory, which stands for it in statistics of rewards."""
        return list({(sample.trajectory_id, sample.index): sample for sample in self.samples}.values())


_SAMPLE_KEYS = """group_id index trajectory_id status reward reward_parts text failure temperature
    token_ids loss_mask rollout_logprobs weight_versions metadata""".split()
_PROMPT_KEYS = "group_id data_name row text label token_ids messages columns metadata".split()
_DTYPES = {"token_ids": np.int32, "loss_mask": np.bool_, "rollout_logprobs": np.float32, "weight_versions": np.int32}
"""The per-token fields of a sample."""


def sample_to_json(sample: Sample) -> dict[str, Any]:
    """Turn a sample into plain JSON values; `sample_from_json` gives back the same arrays bit for bit."""
    values = {name: getattr(sample, name) for name in _SAMPLE_KEYS}
    values |= {name: values[name].tolist() for name in _DTYPES}
    values |= {name: dict(values[name]) for name in ("reward_parts", "metadata")}
    return values | {"status": str(sample.status), "loss_mask": sample.loss_mask.astype(int).tolist()}


def sample_from_json(row: Mapping[str, Any]) -> Sample:
    """Inverse of `sample_to_json`; raises `KeyError` for a missing field."""
    values = {name: row[name] for name in _SAMPLE_KEYS}
    values |= {name: np.asarray(values[name], dtype=dtype) for name, dtype in _DTYPES.items()}
    return Sample(**values | {"status": Status(values["status"])})


def prompt_to_json(prompt: Prompt) -> dict[str, Any]:
    """Turn a prompt into JSON values; values of columns that JSON can't hold are later written as text."""
    values = {name: getattr(prompt, name) for name in _PROMPT_KEYS}
    values |= {"token_ids": list(prompt.token_ids), "columns": dict(prompt.columns), "metadata": dict(prompt.metadata)}
    return values | {"messages": None if prompt.messages is None else [dict(m) for m in prompt.messages]}


def prompt_from_json(row: Mapping[str, Any]) -> Prompt:
    """Inverse of `prompt_to_json`; raises `KeyError` for a missing field."""
    values = {name: row[name] for name in _PROMPT_KEYS}
    messages = None if values["messages"] is None else tuple(values["messages"])
    return Prompt(**values | {"token_ids": tuple(values["token_ids"]), "messages": messages})
