"""Convert messages and text to token ids, and back; the only user of tokenizers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.chat.template_process import TemplateProcess
from treadle.errors import ModelError, first_line
from treadle.hub import work_offline_if_cut_off
from treadle.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_CONTINUED = "\N{WHITE SQUARE}continued\N{WHITE SQUARE} "


class Codec:
    """A model's tokenizer and chat template, with just what Treadle needs of them.

    `template_kwargs` are variables that every rendering of the chat template gets, such as `enable_thinking`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        eos_token_ids: frozenset[int],
        name: str,
        template_kwargs: Mapping[str, Any] | None = None,
    ):
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self.name = name
        self.template_kwargs = dict(template_kwargs or {})
        self._templates: dict[str, TemplateProcess] = {}

    @property
    def has_chat_template(self) -> bool:
        return bool(self.tokenizer.chat_template)

    def encode_text(self, text: str) -> list[int]:
        """Return the token ids of a plain text prompt, with the special tokens that the tokenizer puts before a text.

        A text that already starts with them, such as a pre-rendered prompt, is not given them twice. Special tokens
        that the tokenizer puts behind a text, such as an end of sequence, are left out: the prompt goes on.

        Raises:
            ModelError: if the tokenizer can't encode the text.
        """
        starts, behind = self._added_around
        if text.startswith(starts):
            return self.encode_rendered(text)
        token_ids = self._encode(text, add_special_tokens=True)
        return token_ids[: -len(behind)] if behind and token_ids[-len(behind) :] == behind else token_ids

    @cached_property
    def _added_around(self) -> tuple[tuple[str, ...], list[int]]:
        """What a prompt may start with already, as text, and the ids the tokenizer puts behind a text."""
        before, behind = self._encode("", add_special_tokens=True), []
        for probe in ("a", "1", " "):
            plain, whole = self._encode(probe, add_special_tokens=False), self._encode(probe, add_special_tokens=True)
            places = [i for i in range(len(whole)) if plain and whole[i : i + len(plain)] == plain]
            if places:
                before, behind = whole[: places[0]], whole[places[0] + len(plain) :]
                break
        starts = (self.tokenizer.bos_token, self.decode(before) if before else None)
        return tuple(str(start) for start in starts if start), behind

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            return list(self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])
        except Exception as error:  # a tokenizer without an unknown token raises for characters it lacks
            raise ModelError(
                f"the tokenizer of {self.name!r} can't encode {text[:40]!r}: {first_line(error)}"
            ) from error

    def render_messages(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        continue_final: bool = False,
    ) -> str:
        """Return messages as the text that the model reads, up to the point at which its answer begins.

        Args:
            messages: the conversation.
            tools: JSON schemas of the functions that the model may call.
            continue_final: end inside the last message, which the model continues, instead of with a new answer.
        Raises:
            ModelError: if there is no chat template, or it refuses the messages or has to be stopped.
        """
        if not self.has_chat_template:
            raise ModelError(
                f"the tokenizer of {self.name!r} has no chat template; use plain text prompts without "
                "--apply-chat-template, or an instruct model"
            )
        given = [dict(message) for message in messages]
        if continue_final:
            given[-1]["content"] = f"{given[-1]['content']}{_CONTINUED}"
        try:
            text = self._apply_template(
                given, None if tools is None else [dict(tool) for tool in tools], continue_final
            )
        except Exception as error:  # templates are Jinja programs: they raise what they like
            raise ModelError(
                f"the chat template of {self.name!r} refused the messages: {first_line(error)[:500]}"
            ) from error
        if not continue_final:
            return text
        head, found, behind = text.rpartition(_CONTINUED.strip())
        if not found:
            raise ModelError(
                f"the chat template of {self.name!r} does not keep the last message, which can't be continued then; "
                "leave out --continue-final-message"
            )
        return head if behind.startswith(" ") else head.rstrip()  # a template that strips contents strips this one

    def _apply_template(self, messages: list[Any], tools: list[Any] | None, continue_final: bool) -> str:
        from transformers import PreTrainedTokenizerBase

        tokenizer = self.tokenizer
        given: dict[str, Any] = {"tools": tools, "add_generation_prompt": not continue_final}
        if type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:
            return str(  # a library's own code instead of a template that came with the model
                tokenizer.apply_chat_template(messages, tokenize=False, **given, **self.template_kwargs)
            )
        template = tokenizer.get_chat_template(tools=tools)
        if template not in self._templates:
            self._templates[template] = TemplateProcess(template)
        special = tokenizer.special_tokens_map
        context = {**special, **self.template_kwargs, "messages": messages, "documents": None, **given}
        return self._templates[template].render(context)

    def encode_reply(self, turn: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """Return the token ids between a sampled turn and the model's next one: the turn's end, then the messages.

        The chat template renders the messages after an answer. What its text there and the sampled turn have in common,
        usually the end-of-turn token, is left out. A turn that ended otherwise (by a stop string, or by another
        end-of-sequence token) is given the template's end.

        Args:
            turn: token ids of the model's last turn, as sampled.
            messages: what follows it.
        Raises:
            ModelError: if the chat template refuses the messages or can't continue a conversation.
        """
        mark = "\N{WHITE SQUARE}answer\N{WHITE SQUARE}"
        before: list[Message] = [{"role": "user", "content": "-"}, {"role": "assistant", "content": mark}]
        whole = self.render_messages([*before, *messages])
        _, found, rest = whole.partition(mark)
        if not found:
            raise ModelError(
                f"the chat template of {self.name!r} does not keep the model's earlier answers; use a model that "
                "converses over several turns"
            )
        given, sampled = self.encode_rendered(rest), [int(token) for token in turn]
        most = min(len(given), len(sampled))
        common = next((k for k in range(most, 0, -1) if sampled[-k:] == given[:k]), 0)
        if not common and sampled and sampled[-1] in self.eos_token_ids and sampled[-1] in given:
            end = given.index(sampled[-1])
            if self.decode(given[:end]).isspace():  # Llama 2's template puts a space before the end
                common = end + 1
        return given[common:]

    def encode_rendered(self, text: str) -> list[int]:
        """Return the token ids of text that `render_messages` made, which already holds its special tokens."""
        return self._encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included; never to be tokenised again."""
        return str(
            self.tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

    def response_text(self, token_ids: Sequence[int], stop_token_ids: Sequence[int] = ()) -> str:
        """Return what the model said, for rewards, environments and people.

        The tokens that only end a response (end of sequence, padding, special tokens among `stop_token_ids`) are left
        out at its end. All others stay, special or not: a special `<answer>` is part of the answer. Stop strings and
        stop tokens that are plain text stay as well.
        """
        special_stops = self._special_ids.intersection(stop_token_ids)
        ends, length = {*self.eos_token_ids, self.tokenizer.pad_token_id, *special_stops}, len(token_ids)
        while length and int(token_ids[length - 1]) in ends:
            length -= 1
        return self.decode(token_ids[:length])

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        """The ids of the tokenizer's special tokens."""
        return frozenset(self.tokenizer.all_special_ids)

    def vocabulary(self) -> dict[str, int]:
        """Return the id of every token, including special ones."""
        return dict(self.tokenizer.get_vocab())

    @cached_property
    def _is_token(self) -> np.ndarray:
        """bool [largest id + 1]: True at the ids that stand for a token."""
        ids = np.fromiter(self.tokenizer.get_vocab().values(), dtype=np.int64)
        known = np.zeros(ids.max(initial=-1) + 1, dtype=bool)
        known[ids] = True
        return known

    @property
    def largest_id(self) -> tuple[int, str]:
        """The largest id that stands for a token, and the token; (-1, "") without any."""
        return max(((number, token) for token, number in self.vocabulary().items()), default=(-1, ""))

    def ids_without_token(self, count: int) -> list[int]:
        """Return which of the ids 0 to `count` - 1 stand for no token, ascending.

        A model whose embeddings are padded has rows for such ids, which mean nothing.
        """
        return self.strangers(np.arange(count)).tolist()

    def strangers(self, token_ids: np.ndarray) -> np.ndarray:
        """Return those of the ids [N] that stand for no token, in their order."""
        known = self._is_token
        inside = (token_ids >= 0) & (token_ids < len(known))
        return token_ids[~(inside & known[np.where(inside, token_ids, 0)])] if len(known) else token_ids

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files into a model folder."""
        self.tokenizer.save_pretrained(folder)


def _read_json(path: str, name: str) -> dict[str, Any]:
    """Read a JSON file of a model folder or hub id; empty if the model has no such file.

    Raises:
        ModelError: if the file can't be read or is no JSON object.
    """
    from transformers.utils.hub import cached_file

    try:
        file = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
        if file is None:
            return {}
        value = json.loads(Path(file).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(
            f"{name} of {path!r} can't be read ({first_line(error)}); restore the file, or delete it if it is "
            "generation_config.json"
        ) from error
    if not isinstance(value, dict):
        raise ModelError(f"{name} of {path!r} holds a JSON {type(value).__name__}, not an object; restore the file")
    return value


def _eos_ids(path: str, num_known: int) -> set[int]:
    """Return the ids that end an answer according to generation_config.json and config.json.

    Args:
        path: model folder or hub id.
        num_known: number of tokens that the tokenizer has.

    Only what the files say counts: class defaults of transformers name tokens that the model may not have.

    Raises:
        ModelError: if a file can't be read or names an id that is no token of the model.
    """
    generation, config = _read_json(path, "generation_config.json"), _read_json(path, "config.json")
    nested = config.get("text_config")
    text_config = nested if isinstance(nested, dict) else {}
    sizes = [size for size in (config.get("vocab_size"), text_config.get("vocab_size")) if isinstance(size, int)]
    limit = max([num_known, *sizes])
    found: set[int] = set()
    for name, table in (
        ("generation_config.json", generation),
        ("config.json", config),
        ("text_config in config.json", text_config),
    ):
        value = table.get("eos_token_id")
        for item in value if isinstance(value, list) else [] if value is None else [value]:
            if type(item) is not int or not 0 <= item < limit:
                raise ModelError(
                    f"eos_token_id in {name} of {path!r} holds {item!r}; it must be a token id from 0 to {limit - 1}, "
                    "or a list of them: correct the file"
                )
            found.add(item)
    return found


def load_codec(path: str, template_kwargs: Mapping[str, Any] | None = None) -> Codec:
    """Load the tokenizer of a model folder or hub id; `template_kwargs` are variables of its chat template.

    An answer ends with any end-of-sequence id of the tokenizer, generation_config.json or config.json.

    Raises:
        ModelError: if there is no tokenizer, or an end-of-sequence id can't be read.
    """
    from transformers import AutoTokenizer

    if Path(path).is_dir() and not any(Path(path).glob("*token*")) and not any(Path(path).glob("vocab*")):
        raise ModelError(f"no tokenizer in {path!r}; a model folder needs tokenizer.json beside config.json")
    work_offline_if_cut_off(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # the loader raises many kinds for the same cause
        raise ModelError(
            f"no tokenizer in {path!r}: {first_line(error)}; a model folder needs tokenizer.json beside config.json"
        ) from error
    try:
        tokenizer.decode(tokenizer("a", add_special_tokens=False)["input_ids"])
    except Exception as error:  # faulty settings are loaded without an error and fail in use
        raise ModelError(
            f"the tokenizer in {path!r} can't encode and decode a letter: {first_line(error)}; restore its files"
        ) from error
    eos = _eos_ids(path, len(tokenizer))
    if tokenizer.eos_token_id is not None:
        eos.add(int(tokenizer.eos_token_id))
    return Codec(tokenizer, frozenset(eos), path, template_kwargs)
