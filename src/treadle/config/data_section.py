"""Settings of the data and of evaluation."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator

from treadle.config.conditions import IN_THE_RUN, absent, given, needs, when
from treadle.config.section import Section, setting
from treadle.config.template_kwargs import as_words, template_kwargs
from treadle.errors import ConfigError

# fmt: off
_TEMPLATE = when(lambda c: c.data.apply_chat_template,
                 "without apply_chat_template reaches only prompts that are lists of messages, never plain text; set "
                 "apply_chat_template", warn=True, together=True)
_EVALUATED = given("eval_prompt_data", warn=True, together=True)
_WHILE_TRAINING = when(lambda c: c.eval.eval_interval is not None,
                       "without eval_interval is used by `treadle eval` only, never while training; set eval_interval, or drop "
                       "it", warn=True, together=True)
_GENERATES = absent("debug_train_only", "evaluation needs generation", part="run")
_HAS_SETS = needs("eval_prompt_data", "`name=source` for each evaluation set")
# fmt: on
_SET_NAME = re.compile(r"[\w.-]+")


class DataSection(Section):
    """Where prompts come from."""

    prompt_data: tuple[str, ...] = setting((), path=True)
    """Sources: a .jsonl, .json, .parquet or .csv file, a data set folder or hub id, or `reasoning_gym:task?key=value`.
    `path@[a:b]` takes rows a to b."""
    prompt_data_weights: tuple[float, ...] = ()
    """Share of prompts drawn from each source. Default: by size."""
    input_key: str = "input"
    """Column of the prompt: text, or a list of chat messages. Here and in the other three keys, a dotted name reads a
    value inside an object."""
    label_key: str | None = None
    """Column of the answer that rewards compare with, for example `answer` or `reward_model.ground_truth`."""
    metadata_key: str | None = None
    """Column of extra values kept with each prompt."""
    system_prompt: str | None = setting(None, _TEMPLATE)
    """System message put before each prompt (needs the chat template)."""
    tools_key: str | None = setting(None, _TEMPLATE)
    """Column of the tools that the chat template describes to the model: a list of JSON schemas, or its JSON text."""
    apply_chat_template: bool = False
    """Wrap a text prompt as a user message and render it with the model's chat template. Text that is a JSON list of
    messages is taken as those messages."""
    chat_template_kwargs: Annotated[tuple[str, ...], BeforeValidator(as_words)] = setting((), _TEMPLATE)
    """Variables of the chat template: `enable_thinking=false`, a JSON object, or a table in a recipe."""
    continue_final_message: bool = setting(False, _TEMPLATE)
    """Let the model continue the last message of prompts that end with an assistant message. Off refuses them."""
    prompt_suffix: str = ""
    """Text added to the end of each prompt (of the last user message)."""
    rollout_shuffle: bool = False
    """Shuffle the prompts in each epoch; the order depends on the seed and the epoch only."""
    rollout_max_prompt_len: int | None = setting(None, ge=1)
    """Drop and count longer prompts (tokens). Default: what the model's context leaves beside the response."""

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """The variables of the chat template by name."""
        return template_kwargs(self.chat_template_kwargs)


class EvalOverride(Section):
    """Settings of one evaluation set that differ from the others."""

    n_samples_per_eval_prompt: int | None = setting(None, ge=1)
    eval_temperature: float | None = setting(None, ge=0)
    eval_top_p: float | None = setting(None, gt=0, le=1)
    eval_top_k: int | None = setting(None, ge=0)
    eval_max_response_len: int | None = setting(None, ge=1)
    input_key: str | None = None
    label_key: str | None = None
    tools_key: str | None = None
    rm_type: tuple[str, ...] | None = None


class EvalSection(Section):
    """Evaluation before, during and after training."""

    eval_prompt_data: tuple[str, ...] = setting((), _WHILE_TRAINING, path=True)
    """Evaluation sets as `name=source`, with the sources of prompt_data."""
    eval_interval: int | None = setting(None, _GENERATES, _HAS_SETS, IN_THE_RUN, ge=1)
    """Evaluate at the start, every this many rollouts, and at the end."""
    n_samples_per_eval_prompt: int = setting(1, _EVALUATED, ge=1)
    """Samples of each evaluation prompt."""
    eval_temperature: float = setting(0.0, _EVALUATED, ge=0)
    """Sampling temperature of evaluation; 0 is greedy."""
    eval_top_p: float = setting(1.0, _EVALUATED, gt=0, le=1)
    """Nucleus sampling of evaluation: keep the most likely tokens up to this mass."""
    eval_top_k: int = setting(0, _EVALUATED, ge=0)
    """Keep the k most likely tokens in evaluation; 0 keeps all."""
    eval_max_response_len: int | None = setting(None, _EVALUATED, ge=1)
    """Maximum number of new tokens in an answer. Default: rollout_max_response_len."""
    eval_overrides: dict[str, EvalOverride] = setting(dict)
    """Per set (recipe only): `[eval.eval_overrides.NAME]` with any of the settings above."""


def parse_eval_sets(entries: Sequence[str]) -> dict[str, str]:
    """Return the sources by the name of their evaluation set, in order; the first `=` of an entry ends its name.

    Raises `ConfigError` for an entry without a name, a name twice, or a name that could not be part of a metric's name.

        >>> parse_eval_sets(["sums=reasoning_gym:chain_sum?size=64"])
        {'sums': 'reasoning_gym:chain_sum?size=64'}
    """
    sets: dict[str, str] = {}
    for entry in entries:
        name, _, source = entry.partition("=")
        if not _SET_NAME.fullmatch(name) or not source:
            raise ConfigError(
                f"eval_prompt_data {entry!r} must be name=source (name: letters, digits, '_', '.', '-') but has no "
                f"name; write name={entry}"
            )
        if name in sets:
            raise ConfigError(f"eval_prompt_data names {name!r} twice; give each set its own name")
        sets[name] = source
    return sets
