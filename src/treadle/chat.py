"""Messages and text to token ids, and back; the only user of tokenizers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from treadle.errors import ModelError, first_line
from treadle.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Codec:
    """A model's tokenizer and chat template, with just what Treadle needs of them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_token_ids: frozenset[int], name: str):
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self.name = name

    @property
    def has_chat_template(self) -> bool:
        return bool(self.tokenizer.chat_template)

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a plain text prompt, with the special tokens the tokenizer adds by itself."""
        return list(self.tokenizer(text)["input_ids"])

    def render_messages(self, messages: Sequence[Message]) -> str:
        """Messages as the text the model sees, ending where its answer begins.

        Raises `ModelError` where there is no chat template or the template refuses the messages.
        """
        if not self.has_chat_template:
            raise ModelError(
                f"the tokenizer of {self.name!r} has no chat template; use plain text prompts without --apply-chat-template, "
                "or an instruct model"
            )
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    [dict(m) for m in messages], tokenize=False, add_generation_prompt=True
                )
            )
        except Exception as error:  # templates are Jinja programs: they raise what they like
            raise ModelError(f"the chat template of {self.name!r} refused the messages: {error}") from error

    def encode_reply(self, turn: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """Return the token ids between a turn the model sampled and its next one: the end of the turn, then the messages.

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
            raise ModelError(f"the chat template of {self.name!r} does not keep the model's earlier answers")
        given, sampled = self.encode_rendered(rest), [int(token) for token in turn]
        most = min(len(given), len(sampled))
        common = next((k for k in range(most, 0, -1) if sampled[-k:] == given[:k]), 0)
        return given[common:]

    def encode_rendered(self, text: str) -> list[int]:
        """Token ids of text that `render_messages` made: its special tokens are already in it."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; for people, rewards and stop strings, never to be tokenised again."""
        return str(
            self.tokenizer.decode(
                list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        )

    def vocabulary(self) -> dict[str, int]:
        """The id of every token, special ones among them."""
        return dict(self.tokenizer.get_vocab())

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files into a model folder."""
        self.tokenizer.save_pretrained(folder)


def _eos_of_generation_config(path: Path) -> set[int]:
    file = path / "generation_config.json"
    if not file.is_file():
        return set()
    value = json.loads(file.read_text()).get("eos_token_id")
    return set() if value is None else set(value) if isinstance(value, list) else {value}


def load_codec(path: str) -> Codec:
    """Load the tokenizer of a model folder or hub id; raises `ModelError` where there is none."""
    from transformers import AutoTokenizer

    if Path(path).is_dir() and not any(Path(path).glob("*token*")) and not any(Path(path).glob("vocab*")):
        raise ModelError(f"no tokenizer in {path!r}; a model folder needs tokenizer.json beside config.json")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # the loader raises many kinds for the same cause
        raise ModelError(
            f"no tokenizer in {path!r}: {first_line(error)}; a model folder needs tokenizer.json beside config.json"
        ) from error
    eos = _eos_of_generation_config(Path(path))
    if tokenizer.eos_token_id is not None:
        eos.add(int(tokenizer.eos_token_id))
    return Codec(tokenizer, frozenset(eos), path)
