"""Settings of the data: where prompts come from, and how a row becomes one."""

from __future__ import annotations

# fmt: off  # one field a line: it is a table
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from treadle.config.section import Section
from treadle.config.template_kwargs import as_words, template_kwargs


class DataSection(Section):
    """Where prompts come from."""

    prompt_data: tuple[str, ...] = Field(
        (),
        description="Sources: a .jsonl/.json/.parquet/.csv file, a data set folder or hub id, or `reasoning_gym:task?key=value`; `path@[a:b]` takes rows a to b.",
    )
    prompt_data_weights: tuple[float, ...] = Field(
        (), description="Share of prompts drawn from each source; by size where not given."
    )
    input_key: str = Field(
        "input",
        description="Column of the prompt: text, or a list of chat messages. A dotted key reads an object in a column, for all four keys.",
    )
    label_key: str | None = Field(
        None, description="Column of the answer that rewards compare with, as `answer` or `reward_model.ground_truth`."
    )
    metadata_key: str | None = Field(None, description="Column of extra values kept with each prompt.")
    tools_key: str | None = Field(
        None,
        description="Column of the tools that the chat template describes to the model: a list of JSON schemas, or its JSON text.",
    )
    apply_chat_template: bool = Field(
        False,
        description="Wrap a text prompt as a user message and render it with the model's chat template. Text that is a JSON list of messages is taken as those messages.",
    )
    chat_template_kwargs: Annotated[tuple[str, ...], BeforeValidator(as_words)] = Field(
        (),
        description="Variables of the chat template: `enable_thinking=false`, a JSON object, or a table in a recipe.",
    )
    continue_final_message: bool = Field(
        False,
        description="Let the model continue the last message of prompts that end with an assistant message; they are refused otherwise.",
    )
    system_prompt: str | None = Field(
        None, description="System message put before each prompt (needs the chat template)."
    )
    prompt_suffix: str = Field("", description="Text added to the end of each prompt (of the last user message).")
    rollout_shuffle: bool = Field(
        False, description="Shuffle the prompts anew each epoch; the order depends on the seed and the epoch only."
    )
    rollout_max_prompt_len: int | None = Field(
        None,
        ge=1,
        description="Longer prompts are dropped and counted. Default: what the model's context leaves beside the response.",
    )

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """The variables of the chat template by name."""
        return template_kwargs(self.chat_template_kwargs)
