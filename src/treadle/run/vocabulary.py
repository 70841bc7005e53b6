"""Compare the tokens of a run's tokenizer with the rows of its models' embeddings, before any weights are read."""

from __future__ import annotations

from treadle.chat import Codec
from treadle.config import Config
from treadle.errors import ModelError
from treadle.models.bundled import resolve
from treadle.models.model_config import embedding_rows, load_config


def check_vocabulary(config: Config, codec: Codec, model_path: str, *, fetch_missing: bool = True) -> None:
    """Check that every model of the run has an embedding for every token of the tokenizer.

    Args:
        config: the run's configuration.
        codec: the tokenizer of the model that is trained.
        model_path: where that model is.
        fetch_missing: download a bundled model that is not here yet.
    Raises:
        ModelError: if a model has fewer rows than the tokenizer has ids.
    """
    models = {"--hf-checkpoint": model_path}
    for flag, name in config.models_beside.items():
        if flag != "--opd-teacher-load":  # find_teacher compares its tokens one by one
            models[flag] = resolve(name, fetch_missing)
    largest, token = codec.largest_id
    for flag, path in models.items():
        rows = embedding_rows(load_config(path))
        if rows is not None and rows <= largest:
            raise ModelError(
                f"{flag} {path!r} has embeddings for {rows} ids, 0 to {rows - 1}, but the tokenizer of {codec.name!r} has "
                f"tokens up to id {largest} ({token!r}), which the model can't read; use the tokenizer that belongs to it, "
                "or resize its embeddings"
            )


def padding_note(config: Config, codec: Codec, model_path: str) -> str | None:
    """Return what to say of embeddings that belong to no token of the tokenizer; None if there are none."""
    rows = embedding_rows(load_config(model_path))
    unused = len(codec.ids_without_token(rows or 0))
    if not unused:
        return None
    masked = config.rollout.rollout_engine == "torch"
    fate = "these ids are never sampled" if masked else "a sample in which the server draws one of these ids fails"
    return f"{unused} of the model's {rows} embeddings belong to no token of its tokenizer; {fate}"
