"""The models of a run as their files describe them: read once, and checked against each other before any weights are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from treadle.chat import Codec, load_codec
from treadle.config import Config
from treadle.errors import ConfigError, ModelError
from treadle.models.bundled import resolve
from treadle.models.load import check_loadable
from treadle.models.model_config import context_length, context_note, embedding_rows, load_config
from treadle.rollout.engines.torch_engine.check import check_generation
from treadle.run.compute import in_short_lived_thread

if TYPE_CHECKING:
    from transformers import PretrainedConfig

POLICY, TEACHER = "--hf-checkpoint", "--opd-teacher-load"


@dataclass(frozen=True, eq=False)
class ModelFile:
    """A model folder and its config.json."""

    path: str
    hf_config: PretrainedConfig


Models = Mapping[str, ModelFile]
"""The models of a run by the flag that names each."""


@dataclass(frozen=True, eq=False)
class ModelFiles:
    """The models of a run, the policy's tokenizer, and the most tokens that a prompt may have."""

    models: Models
    codec: Codec
    max_prompt: int

    @property
    def path(self) -> str:
        """Folder of the model that is trained."""
        return self.models[POLICY].path


def find_model_files(config: Config, *, fetch_missing: bool = True) -> ModelFiles:
    """Find and check the models of a run, and load the tokenizer.

    Args:
        config: the run's configuration.
        fetch_missing: download a bundled model that is not on this machine yet, instead of raising `ModelError`.
    """
    models = read_models(config, fetch_missing=fetch_missing)
    in_short_lived_thread(check_models, config, models)
    codec = load_codec(models[POLICY].path, config.data.template_kwargs)
    check_vocabulary(models, codec)
    return ModelFiles(models, codec, longest_prompt(config, models[POLICY].hf_config))


def read_models(config: Config, *, fetch_missing: bool = True) -> Models:
    """Read the config.json of every model that the run loads."""
    found = {}
    for flag, name in {POLICY: config.model.hf_checkpoint, **config.models_beside}.items():
        path = resolve(name, fetch_missing)
        if path != name and not (Path(path) / "config.json").is_file():
            raise ModelError(f"{name} is not on this machine yet; `treadle model fetch {name}` downloads it")
        found[flag] = ModelFile(path, load_config(path))
    return found


def check_models(config: Config, models: Models) -> None:
    """Check that the architecture of every model of the run is supported.

    Raises:
        ModelError: if Treadle does not compute what the model does, in training or (with the torch engine) token by token.
    """
    for flag, model in models.items():
        probe = check_loadable(model.path, model.hf_config, fused=config.model.fused_ops)
        generates = flag == POLICY and not config.debug.debug_train_only
        if generates and config.rollout.rollout_engine == "torch":
            try:
                check_generation(probe, fused=config.model.fused_ops)
            except ModelError as error:
                raise ModelError(f"{model.path!r}: {error}") from error


def check_vocabulary(models: Models, codec: Codec) -> None:
    """Check that every model of the run has an embedding for every token of the policy's tokenizer.

    Raises:
        ModelError: if a model has fewer rows than the tokenizer has ids.
    """
    largest, token = codec.largest_id
    for flag, model in models.items():
        rows = embedding_rows(model.hf_config)
        if (
            flag != TEACHER and rows is not None and rows <= largest
        ):  # find_teacher compares a teacher's tokens one by one
            raise ModelError(
                f"{flag} {model.path!r} has embeddings for {rows} ids, 0 to {rows - 1}, but the tokenizer of "
                f"{codec.name!r} has tokens up to id {largest} ({token!r}), which the model can't read; use the tokenizer "
                "that belongs to it, or resize its embeddings"
            )


def padding_note(config: Config, files: ModelFiles) -> str | None:
    """Return a note on embeddings that belong to no token of the tokenizer; None if there are none."""
    rows = embedding_rows(files.models[POLICY].hf_config)
    unused = len(files.codec.ids_without_token(rows or 0))
    if not unused:
        return None
    masked = config.rollout.rollout_engine == "torch"
    fate = "these ids are never sampled" if masked else "a sample in which the server draws one of these ids fails"
    return f"{unused} of the model's {rows} embeddings belong to no token of its tokenizer; {fate}"


def longest_prompt(config: Config, hf_config: PretrainedConfig) -> int:
    """Return the most tokens that a prompt may have: as configured, or what the context leaves beside the longest response.

    Raises:
        ConfigError: if prompt and response do not fit the model's context together.
    """
    context = context_length(hf_config)
    response = max(config.rollout.rollout_max_response_len, config.eval.eval_max_response_len or 0)
    asked = config.data.rollout_max_prompt_len
    if context - response < (asked or 1):
        raise ConfigError(
            f"{asked or 1} prompt and {response} response tokens do not fit the model's context of "
            f"{context}{context_note(hf_config)}; lower --rollout-max-prompt-len or --rollout-max-response-len"
        )
    return asked or context - response


def find_teacher(config: Config, files: ModelFiles) -> str | None:
    """Return the folder of the teacher, or None if nothing is distilled.

    Raises:
        ConfigError: if a token of the student is another token of the teacher, or the longest sample is longer than the
            teacher's context.
    """
    teacher, name = files.models.get(TEACHER), config.model.opd_teacher_load
    if teacher is None:
        return None
    theirs, limits = load_codec(teacher.path).vocabulary(), teacher.hf_config.get_text_config()
    needed = files.codec.largest_id[0] + 1
    other = next((token for token, number in files.codec.vocabulary().items() if theirs.get(token) != number), None)
    if other is not None or limits.vocab_size < needed:
        what = f"embeddings for {limits.vocab_size} of {needed} ids" if other is None else f"{other!r} differs"
        raise ConfigError(
            f"opd_teacher_load {name!r} has another vocabulary than {config.model.hf_checkpoint!r} ({what}): distillation "
            "compares the logprob of the same token; choose a teacher with the same tokenizer"
        )
    longest = files.max_prompt + config.rollout.rollout_max_response_len
    if longest > context_length(limits):
        raise ConfigError(
            f"opd_teacher_load {name!r} has a context of {context_length(limits)}, samples may have {longest} tokens; "
            "lower --rollout-max-prompt-len or --rollout-max-response-len"
        )
    return teacher.path
