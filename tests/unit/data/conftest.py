from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from treadle.chat import Codec

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"


def _make_codec(normalizer: Any = None, pre_tokenizer: Any = None, template: str | None = TEMPLATE) -> Codec:
    """A tokenizer with one token for each byte of the (normalised) text and nothing added around it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizer or byte_level
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    wrapped.chat_template = template
    return Codec(wrapped, frozenset({0}), "tiny")


@pytest.fixture(scope="session")
def codec() -> Codec:
    return _make_codec()


@pytest.fixture(scope="session")
def make_codec() -> Callable[..., Codec]:
    return _make_codec


@pytest.fixture(autouse=True)
def cache_in_tmp(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    datasets.disable_progress_bars()


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[[str, Iterable[Any]], Path]:
    def write(name: str, rows: Iterable[Any]) -> Path:
        path = tmp_path / name
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return path

    return write
