"""One data set as prompts: rows that fit the model, rendered and tokenised when they are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, overload

import numpy as np

from treadle.chat import Codec
from treadle.data.column_key import find_key
from treadle.data.readers import Reader, adds_nulls
from treadle.data.rendering import PromptFormat, Rendered, Renderer
from treadle.errors import DataError
from treadle.types import Prompt

_BATCH = 1000


class PromptDataset(Sequence[Prompt]):
    """The prompts of a reader's rows, those longer than `max_prompt_len` tokens left out and counted.

    The constructor checks every prompt, so that a fault in any row is found before anything starts. It keeps a row
    number for each prompt, or nothing if no prompt was dropped. `dataset[i]` is the i-th prompt that fits, and its
    `group_id` is its row number.

    Raises `DataError` for a missing column, for a row that is no prompt, and if every prompt is too long.
    """

    def __init__(self, name: str, reader: Reader, codec: Codec, form: PromptFormat, max_prompt_len: int):
        self.name = name
        self.num_rows = len(reader)
        self._reader = reader
        self._form = form
        self._renderer = Renderer(codec, form, adds_nulls(reader))
        self._max_prompt_len = max_prompt_len
        if self.num_rows == 0:
            raise DataError(f"{name!r} is empty: it has no rows; every data set needs at least one")
        self._input = find_key(name, reader, form.input_key)
        self._label, self._metadata, self._tools = (
            None if key is None else find_key(name, reader, key)
            for key in (form.label_key, form.metadata_key, form.tools_key)
        )
        self._kept = self._rows_that_fit()  # int64 [len], None if all rows fit

    @property
    def num_dropped(self) -> int:
        """Number of rows left out because their prompt is too long."""
        return self.num_rows - len(self)

    def __len__(self) -> int:
        return self.num_rows if self._kept is None else len(self._kept)

    @overload
    def __getitem__(self, position: int) -> Prompt: ...
    @overload
    def __getitem__(self, position: slice) -> list[Prompt]: ...
    def __getitem__(self, position: int | slice) -> Prompt | list[Prompt]:
        if isinstance(position, slice):
            return [self[i] for i in range(*position.indices(len(self)))]
        row = self.row_at(position + len(self) if position < 0 else position)
        return self.prompt(row, group_id=row)

    def row_at(self, position: int) -> int:
        """Return the row number of the prompt at a position, 0 ≤ position < len."""
        if not 0 <= position < len(self):
            raise IndexError(f"prompt {position} of {len(self)} in {self.name!r}")
        return position if self._kept is None else int(self._kept[position])

    def prompt(self, row: int, group_id: int) -> Prompt:
        """Return the prompt of a row as the draw `group_id`."""
        columns = self._reader.row(row)
        label, metadata, tools = (
            None if key is None else key.value(columns) for key in (self._label, self._metadata, self._tools)
        )
        rendered, token_ids = self._encoded(row, self._input.value(columns), tools)
        if len(token_ids) > self._max_prompt_len:
            raise DataError(
                f"{self._reader.locate(row)}: the prompt has {len(token_ids)} tokens, more than the limit of "
                f"{self._max_prompt_len} (the bound from its bytes was too low); shorten or remove it"
            )
        return Prompt(
            group_id=group_id,
            token_ids=tuple(token_ids),
            text=rendered.text,
            label=label,
            columns=columns,
            data_name=self.name,
            row=row,
            messages=rendered.messages,
            metadata=_metadata(self._form.metadata_key, metadata),
        )

    def _rows_that_fit(self) -> np.ndarray | None:
        fits = np.ones(self.num_rows, dtype=bool)
        shortest, longest = 0, 0
        for start in range(0, self.num_rows, _BATCH):
            stop = min(start + _BATCH, self.num_rows)
            values = self._input.values(self._reader, start, stop)
            tools = [None] * len(values) if self._tools is None else self._tools.values(self._reader, start, stop)
            for row, (value, schemas) in enumerate(zip(values, tools, strict=True), start):
                length = self._length_if_unsure(row, value, schemas)
                if length > self._max_prompt_len:
                    fits[row] = False
                    longest = max(longest, length)
                    shortest = min(shortest or length, length)
        if not fits.any():
            raise DataError(
                f"all {self.num_rows} prompts of {self.name!r} are longer than {self._max_prompt_len} tokens "
                f"(the shortest has {shortest}, the longest {longest}); raise --rollout-max-prompt-len, "
                "or lower --rollout-max-response-len if the model's context sets the limit"
            )
        return None if fits.all() else np.flatnonzero(fits)

    def _length_if_unsure(self, row: int, value: Any, tools: Any) -> int:
        """Return the number of tokens of a prompt that may be too long, or 0 if it is too short for that."""
        try:
            bound = self._renderer.max_tokens(value, tools)
        except DataError as error:
            raise DataError(f"{self._reader.locate(row)}: {error}") from error
        if bound is not None and bound <= self._max_prompt_len:
            return 0
        _, token_ids = self._encoded(row, value, tools)
        if not token_ids:
            raise DataError(
                f"{self._reader.locate(row)}: column {self._form.input_key!r} is empty; every row needs a prompt"
            )
        return len(token_ids)

    def _encoded(self, row: int, value: Any, tools: Any) -> tuple[Rendered, list[int]]:
        try:
            rendered = self._renderer.render(value, tools)
            return rendered, self._renderer.encode(rendered)
        except DataError as error:
            raise DataError(f"{self._reader.locate(row)}: {error}") from error


def _metadata(key: str | None, value: Any) -> Mapping[str, Any]:
    """Return a dict unchanged, nothing for None, and any other value under the column's name."""
    if value is None:
        return {}
    return dict(value) if isinstance(value, Mapping) else {str(key): value}
