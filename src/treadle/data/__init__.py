"""Prompts: readers of rows, data sets of prompts, and the stream that a run draws from."""

from __future__ import annotations

from dataclasses import replace

from treadle.chat import Codec
from treadle.config import DataSection, EvalOverride, EvalSection, parse_eval_sets
from treadle.data.column_key import has_key
from treadle.data.dataset import PromptDataset
from treadle.data.readers import Reader, open_reader, source_name
from treadle.data.rendering import PromptFormat
from treadle.data.source import PromptSource
from treadle.errors import ConfigError
from treadle.registry import suggestion

__all__ = ["PromptDataset", "PromptFormat", "PromptSource", "Reader", "build_eval_sets", "build_source", "open_reader"]


def build_source(data: DataSection, *, codec: Codec, max_prompt_len: int, seed: int) -> PromptSource:
    """Return the prompts of a run, drawn from all sources of `prompt_data`."""
    form = _prompt_format(data)
    names: dict[str, str] = {}
    for source in data.prompt_data:
        base = source_name(source)
        name, number = base, 2
        while name in names:
            name, number = f"{base}#{number}", number + 1
        names[name] = source
    datasets = [PromptDataset(name, open_reader(source), codec, form, max_prompt_len) for name, source in names.items()]
    return PromptSource(datasets, data.prompt_data_weights, shuffle=data.rollout_shuffle, seed=seed)


def build_eval_sets(
    data: DataSection, evaluation: EvalSection, *, codec: Codec, max_prompt_len: int
) -> dict[str, PromptDataset]:
    """Return the evaluation sets by name, in their order; each prompt's `group_id` is its row number.

    `metadata_key` and `tools_key` are read if a set has that column.
    """
    sources = parse_eval_sets(evaluation.eval_prompt_data)
    for name in evaluation.eval_overrides.keys() - sources.keys():
        raise ConfigError(f"eval_overrides.{name}: eval_prompt_data has no set of that name{suggestion(name, sources)}")
    form = _prompt_format(data)
    sets: dict[str, PromptDataset] = {}
    for name, source in sources.items():
        override = evaluation.eval_overrides.get(name)
        own = form if override is None else _prompt_format(data, override)
        reader = open_reader(source)
        if own.metadata_key is not None and not has_key(reader, own.metadata_key):
            own = replace(own, metadata_key=None)  # no evaluation setting could name another column
        is_its_own = override is not None and override.tools_key is not None
        if own.tools_key is not None and not is_its_own and not has_key(reader, own.tools_key):
            own = replace(own, tools_key=None)
        sets[name] = PromptDataset(name, reader, codec, own, max_prompt_len)
    return sets


def _prompt_format(data: DataSection, override: EvalOverride | None = None) -> PromptFormat:
    own = override or EvalOverride()
    return PromptFormat(
        input_key=own.input_key or data.input_key,
        label_key=own.label_key or data.label_key,
        metadata_key=data.metadata_key,
        tools_key=own.tools_key or data.tools_key,
        apply_chat_template=data.apply_chat_template,
        continue_final_message=data.continue_final_message,
        system_prompt=data.system_prompt,
        prompt_suffix=data.prompt_suffix,
    )
