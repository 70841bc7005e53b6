"""Model folders: odd configurations, damaged weights, tokenizers, templates and generation configs."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tests.fuzz.case import Bench, Case, Words, rng
from tests.fuzz.damage import DAMAGES, JSON_DAMAGES, flip

COMMANDS = ("info", "plan", "train", "export", "eval")

VALUES: tuple[Any, ...] = (
    None, 0, -1, 1, 3, 100_000, 2**31, 2**63, 2**64, 10**30, 1.5, -0.5, float("nan"), float("inf"), 1e300, True, False, "", "x", "2", "\x1b[31m",
    [], [1], [None], {}, {"a": 1}, {"rope_type": "nope"}, "llama", "gelu", "../x",
)  # fmt: skip
FIELDS = (
    "architectures", "attention_bias", "attention_dropout", "bos_token_id", "dtype", "eos_token_id", "head_dim", "hidden_act", "hidden_size", "initializer_range",
    "intermediate_size", "max_position_embeddings", "mlp_bias", "model_type", "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "pad_token_id",
    "pretraining_tp", "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "tie_word_embeddings", "transformers_version", "use_cache", "vocab_size", "sliding_window", "quantization_config",
    "auto_map", "text_config", "layer_types", "attn_implementation", "_name_or_path", "torch_dtype", "is_encoder_decoder", "output_attentions", "return_dict", "id2label", "num_labels", "tokenizer_class", "partial_rotary_factor",
)  # fmt: skip
VALUES_OF_A_FIELD = 3
MODEL_TYPES = (
    "bert", "t5", "gpt2", "qwen2", "mistral", "whisper", "clip", "mamba", "vit", "gemma3", "bart", "nope", "qwen2_moe", "phi3", "llama4", "opt", "deepseek_v3", "olmo", "rwkv", "encoder-decoder",
)  # fmt: skip

SHAPES: dict[str, dict[str, Any]] = {
    "no layers": {"num_hidden_layers": 0},
    "100,000 layers": {"num_hidden_layers": 100_000},
    "a million layers": {"num_hidden_layers": 1_000_000},
    "huge vocabulary": {"vocab_size": 2**40},
    "vocabulary of one": {"vocab_size": 1},
    "no vocabulary": {"vocab_size": 0},
    "no width": {"hidden_size": 0, "head_dim": 0},
    "huge width": {"hidden_size": 2**40},
    "odd heads": {"num_attention_heads": 3, "num_key_value_heads": 2},
    "more key heads": {"num_key_value_heads": 8},
    "no heads": {"num_attention_heads": 0, "num_key_value_heads": 0},
    "odd head": {"head_dim": 7},
    "context of 1": {"max_position_embeddings": 1},
    "context of 0": {"max_position_embeddings": 0},
    "negative context": {"max_position_embeddings": -5},
    "theta 0": {"rope_parameters": {"rope_type": "default", "rope_theta": 0}},
    "theta negative": {"rope_parameters": {"rope_type": "default", "rope_theta": -1.0}},
    "yarn without numbers": {"rope_parameters": {"rope_type": "yarn"}},
    "longrope without numbers": {"rope_parameters": {"rope_type": "longrope"}},
    "linear of text": {"rope_parameters": {"rope_type": "linear", "factor": "x"}},
    "more layers than weights": {"num_hidden_layers": 3},
    "fewer layers than weights": {"num_hidden_layers": 1},
    "other width": {"hidden_size": 64},
    "other vocabulary": {"vocab_size": 50},
    "larger vocabulary": {"vocab_size": 500},
    "head apart": {"tie_word_embeddings": False},
    "epsilon": {"rms_norm_eps": -1.0},
}

TEMPLATES: dict[str, str] = {
    "empty": "",
    "syntax": "{% for m in messages %}",
    "unknown": "{{ nope.nope }}",
    "raises": "{{ raise_exception('\x1b[31mno\nno') }}",
    "divides": "{{ 1 / 0 }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "long": "{{ 'x' * 100000000 }}",
    "loops": "{% for i in range(100000000) %}{% for j in range(100000000) %}{% endfor %}{% endfor %}",
    "imports": "{% import 'os' as os %}{{ os.system('id') }}",
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "drops": "x",
    "number": "{{ messages | length }}",
    "controls": "\x1b[31m{{ messages[0].content }}\x00",
    "surrogate": "{{ '\\ud800' }}",
}

TOKENIZER_FIELDS: dict[str, tuple[Any, ...]] = {
    "eos_token": (None, "", "nope", 1, [], {"content": "x"}, "\x1b[31m"),
    "pad_token": (None, "nope", 1),
    "tokenizer_class": ("Nope", "LlamaTokenizer", "BertTokenizer", 1, None, "../x", "PreTrainedTokenizerFast"),
    "model_max_length": ("x", -1, 0, 1e30, None),
    "extra_special_tokens": (1, {"a": 1}, ["a", 1], None),
    "added_tokens_decoder": (1, {"0": 1}, {"x": {}}, {"0": {"content": "<eos>"}}),
    "auto_map": ({"AutoTokenizer": ["x.y", None]}, 1),
    "chat_template": (1, [], "{%", {"a": "b"}),
    "add_bos_token": ("x", True),
    "backend": ("nope", 1),
}

GENERATION: dict[str, Any] = {
    "temperature without sampling": {"temperature": 0.7},
    "eos of text": {"eos_token_id": "x"},
    "eos of nulls": {"eos_token_id": [None]},
    "eos far": {"eos_token_id": 10**12},
    "eos negative": {"eos_token_id": [-1, -2]},
    "eos nested": {"eos_token_id": [[1]]},
    "eos of a number": {"eos_token_id": 1.5},
    "unknown": {"nope": 1},
    "top_p": {"top_p": 7, "do_sample": True},
    "max_length": {"max_length": "x"},
    "repetition": {"repetition_penalty": -1},
    "bad lists": {"bad_words_ids": 1, "suppress_tokens": "x"},
    "watermark": {"watermarking_config": 1},
    "cache": {"cache_implementation": "nope"},
}


def cases() -> Iterator[Case]:
    """Every field of config.json with odd values, every file of the folder with every damage."""
    for field in FIELDS:
        random = rng(f"model {field}")
        for i, value in enumerate(random.sample(VALUES, VALUES_OF_A_FIELD)):
            yield _config_case(f"{field} = {json.dumps(value)}", COMMANDS[i % 3], {field: value})
    for name, changes in SHAPES.items():
        for command in COMMANDS[:3]:
            yield _config_case(name, command, changes)
    for kind in MODEL_TYPES:
        for command in COMMANDS[:2]:
            yield _config_case(f"model type {kind}", command, {"model_type": kind, "architectures": None})
    for file in (
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
    ):
        damages = DAMAGES | (JSON_DAMAGES if file.endswith(".json") else {})
        for i, (name, damage) in enumerate(damages.items()):
            for command in ("train", COMMANDS[i % 2]):
                yield Case(f"models/{command} {file} {name}", partial(_make_damaged, command, file, damage))
    for number in range(60):
        file = ("config.json", "model.safetensors", "tokenizer.json")[number % 3]
        yield Case(
            f"models/train {file} bytes {number}", partial(_make_damaged, "train", file, flip(f"model {number}", 3))
        )
    for name, header in HEADERS.items():
        for command in ("train", "export"):
            yield Case(f"models/{command} weights {name}", partial(_make_weights, command, header), faulty=True)
    for name, template in TEMPLATES.items():
        yield Case(f"models/train template {name}", partial(_make_template, template))
    for field, values in TOKENIZER_FIELDS.items():
        for value in values:
            changed = partial(_make_json, "train", "tokenizer_config.json", {field: value})
            yield Case(f"models/train tokenizer {field} = {json.dumps(value)}", changed)
    for name, changes in GENERATION.items():
        for command in ("train", "export"):
            yield Case(
                f"models/{command} generation {name}", partial(_make_json, command, "generation_config.json", changes)
            )
    for key in ("model", "added_tokens", "decoder", "pre_tokenizer", "normalizer", "post_processor", "version"):
        for value in (None, 1, [], {}, {"type": "nope"}, [1]):
            yield Case(
                f"models/plan tokenizer.json {key} = {json.dumps(value)}",
                partial(_make_json, "plan", "tokenizer.json", {key: value}),
            )


def _config_case(name: str, command: str, changes: dict[str, Any]) -> Case:
    return Case(f"models/{command} config {name}", partial(_make_json, command, "config.json", changes))


def words_for(command: str, model: Path, bench: Bench) -> Words:
    """The command on this model folder."""
    if command == "info":
        return ["model", "info", str(model)]
    if command == "export":
        return ["model", "export", str(model), "exported", "--dtype", "float32"]
    changes: dict[str, Any] = {"--hf-checkpoint": str(model), "--apply-chat-template": ()}
    if command == "eval":
        changes |= {"--eval-prompt-data": f"x={bench.data}"}
    if command == "train":
        changes |= {"--save-interval": "1"}
    return bench.words(command, changes)


def _make_json(command: str, file: str, changes: dict[str, Any], folder: Path, bench: Bench) -> Words:
    model = bench.copy_model(folder)
    values = json.loads((model / file).read_text())
    (model / file).write_text(json.dumps(values | changes))
    return words_for(command, model, bench)


def _make_damaged(command: str, file: str, damage: Any, folder: Path, bench: Bench) -> Words:
    model = bench.copy_model(folder)
    damage(model / file)
    return words_for(command, model, bench)


def _make_template(template: str, folder: Path, bench: Bench) -> Words:
    model = bench.copy_model(folder)
    (model / "chat_template.jinja").write_text(template)
    return words_for("train", model, bench)


def _make_weights(command: str, header: bytes, folder: Path, bench: Bench) -> Words:
    model = bench.copy_model(folder)
    (model / "model.safetensors").write_bytes(header)
    return words_for(command, model, bench)


def _file(header: Any, body: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


_ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
HEADERS: dict[str, bytes] = {
    "header too long": _file({}, length=2**62),
    "no header": struct.pack("<Q", 0),
    "header is a list": _file([]),
    "header is no json": _file(b"nope"),
    "no tensors": _file({}),
    "unknown dtype": _file({"x": _ENTRY | {"dtype": "X9"}}, bytes(8)),
    "offsets beyond": _file({"x": _ENTRY | {"data_offsets": [0, 2**40]}}, bytes(8)),
    "offsets negative": _file({"x": _ENTRY | {"data_offsets": [-8, 0]}}, bytes(8)),
    "offsets swapped": _file({"x": _ENTRY | {"data_offsets": [8, 0]}}, bytes(8)),
    "shape huge": _file({"x": _ENTRY | {"shape": [2**40, 2**40]}}, bytes(8)),
    "shape negative": _file({"x": _ENTRY | {"shape": [-2]}}, bytes(8)),
    "other names": _file({"\x1b[31m": _ENTRY}, bytes(8)),
    "only one": _file({"model.norm.weight": _ENTRY | {"shape": [32], "data_offsets": [0, 128]}}, bytes(128)),
    "wrong shape": _file({"model.norm.weight": _ENTRY}, bytes(8)),
}
