"""Every flag of the configuration, with values that nobody sane gives it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_args

from tests.fuzz.case import Bench, Case, Words, rng
from treadle.config.fields import ConfigField, config_fields

MANY_DIGITS = "9" * 5000
NO_NUMBERS = (
    "",
    "abc",
    "nan",
    "inf",
    "-inf",
    "1e400",
    "1,5",
    "0x10",
    "1 2",
    "\x1b[31m",
    "None5",
    "٣٣x",
    "--1",
    "1e",
    "[]",
)
NO_INTEGERS = (*NO_NUMBERS, "1.5", MANY_DIGITS, str(2**63), str(2**64), "-" + str(2**64), "1e30", "-" + MANY_DIGITS)
HUGE_INTEGERS = (str(2**31), str(2**63 - 1), "1000000", "9999999999")
ODD_NUMBERS = ("0", "-1", "1e300", "1e-300", "5e-324", "-0.0", "1e16", "9007199254740993", " 7 ", "1_0", "0.0000001")
TEXTS = (
    "", " ", "x" * 300, "x" * 5000, "~nosuchuser/x", "~nosuchuser", "/dev/zero", "/dev/null", "/dev/zero/x", "/dev/full",
    "pipe", "folder", "loop", "file", "file/below", "missing/a/b", "..", ".", "/", "/proc/self/mem", "/nowhere/x", "a\nb\nc",
    "\x1b]0;title\x07", "\x1b[2J", "\x9b31m", "\u202eevil", "\udcff\udcfe", "💥" * 40, "a:b", "a:b:c", ":", "x.py:y", "os:getcwd",
    "json:loads", "os.path", "../..:x", "-5", "None", "null", "true", "nan", "{}", "[]", "%s%n", "$(id)", "a b c", "\t", "name@[1:2:3]",
    "file@[a:b]", "file@[5:]", "=x", "x=", "x=file", "http://", "://", "reasoning_gym:", "reasoning_gym:nope", "reasoning_gym:chain_sum?size=x",
)  # fmt: skip
PATHS = ("/dev/zero", "pipe", "folder", "~nosuchuser/y", "loop", "file/below", "y" * 256)
BAD_SWITCH_VALUES = ("1", "true", "", "x", "nan")
SAMPLED_TEXTS = 6
BAD_NUMBERS, ODD_NUMBERS_TRIED = 3, 3

# What a flag needs beside it to have an effect.
_PPO = {"--advantage-estimator": "ppo"}
_KL = {"--use-kl-loss": (), "--kl-loss-coef": "0.1"}
_RAY = {"--runtime": "ray"}
_CORRECTION = {"--rollout-correction": "tis"}
_SERVER = {"--rollout-engine": "vllm"}
COMPANIONS: dict[str, dict[str, Any]] = {
    "critic_": _PPO,
    "value_clip": _PPO,
    "num_critic_": _PPO,
    "lambd": _PPO,
    "kl_target": _KL | {"--kl-horizon": "10"},
    "kl_horizon": _KL | {"--kl-target": "0.1"},
    "kl_loss": _KL,
    "ref_": _KL,
    "opd_": {"--opd-teacher-load": "MODEL", "--opd-kl-coef": "0.1"},
    "rm_regex": {"--rm-type": "regex"},
    "rm_weights": {},
    "max_filter_rounds": {"--group-filter": "zero_signal"},
    "over_sampling": {"--group-filter": "zero_signal"},
    "env_": {"--custom-env-path": "file.py:env"},
    "engine_": _SERVER,
    "rollout_external": _SERVER,
    "max_logprob_diff": _SERVER,
    "correction_reject": _CORRECTION | {"--correction-reject-level": "token"},
    "correction_": _CORRECTION,
    "overlong_": {"--overlong-buffer-len": "2"},
    "sapo_": {"--policy-loss": "sapo"},
    "lr_decay_steps": {"--lr-decay-style": "linear"},
    "min_lr": {"--lr-decay-style": "linear"},
    "micro_batch_size": {"--no-use-dynamic-batch-size": ()},
    "eval_": {"--eval-prompt-data": "x=DATA", "--eval-interval": "1"},
    "n_samples_per_eval": {"--eval-prompt-data": "x=DATA", "--eval-interval": "1"},
    "keep_checkpoints": {"--save-interval": "1"},
    "num_epoch": {"--num-rollout": None},
    "load_debug": {"--debug-train-only": ()},
    "fsdp_": _RAY,
    "tensor_parallel": _RAY,
    "ray_": _RAY,
    "actor_": _RAY,
    "rollout_num_gpus": _RAY,
    "num_cpus_per_worker": _RAY,
    "max_lag": _RAY,
    "weight_": _RAY,
}  # fmt: skip


def prepare(folder: Path) -> None:
    """Things of every kind that a path may name."""
    os.mkfifo(folder / "pipe")
    (folder / "folder").mkdir()
    (folder / "file").write_bytes(b"\x00\xff\xfe not text")
    (folder / "loop").symlink_to("loop")
    (folder / "file.py").write_text("class env:\n    pass\n")


def cases() -> Iterator[Case]:
    """All flags × their hostile values, with `plan`, some with `config` and some with `train`."""
    for field in config_fields().values():
        if not field.recipe_only:
            yield from _cases_of(field)
    for name, field in sorted(config_fields().items()):
        for i, value in enumerate(PATHS if field.declared.path else ()):
            given = f"x={value}" if name == "eval_prompt_data" else value
            given += ":reward" if name.startswith("custom_") else ""
            yield _case(
                field,
                ("train", "plan")[i % 2],
                (f"{field.flag}={given}",) if not field.is_list else (field.flag, given),
            )
    yield from _engine_arguments()
    yield from _command_lines()


def _cases_of(field: ConfigField) -> Iterator[Case]:
    random = rng(f"values of {field.name}")
    element = get_args(field.value_type)[0] if field.is_list else field.value_type
    if field.is_switch:
        for value in random.sample(BAD_SWITCH_VALUES, 2):
            yield _case(field, "plan", (f"{field.flag}={value}",), faulty=True)
        return
    if element in (int, float):
        bad = NO_INTEGERS if element is int else (*NO_NUMBERS, MANY_DIGITS)
        for value in random.sample(bad, BAD_NUMBERS):
            yield _case(field, random.choice(("plan", "config")), (field.flag, value), faulty=True)
        odd = (*ODD_NUMBERS, *HUGE_INTEGERS)
        for i, value in enumerate(random.sample(odd, ODD_NUMBERS_TRIED)):
            command = "train" if i < 2 and not _is_work(field, value) else "plan"
            yield _case(field, command, (field.flag, value), faulty=_outside(field, value))
    elif field.choices:
        for value in random.sample(
            ("", "x", field.choices[0].upper(), " ", "None", "💥", "\x1b[0m", f"{field.choices[0]} "), 3
        ):
            yield _case(field, "config", (field.flag, value), faulty=not (field.optional and value == "None"))
    else:
        for i, value in enumerate(random.sample(TEXTS, SAMPLED_TEXTS)):
            yield _case(field, "train" if i < 3 else "plan", (field.flag, value))
    if field.is_list:
        for values in (("a",) * 3, ("x",) * 2000, ("", "", ""), ("\n",)):
            yield _case(field, "plan", (field.flag, *values), faulty=element in (int, float))
        yield _case(field, "plan", (field.flag,))


def _is_work(field: ConfigField, value: str) -> bool:
    """Whether a run would take as long as it was told to: many samples, but not more than memory holds."""
    amounts = "rollout_batch_size n_samples_per_prompt over_sampling_batch_size max_filter_rounds num_rollout num_epoch"
    amounts += " n_samples_per_eval_prompt start_rollout_id env_max_turns"
    return field.name in amounts.split() and 100 < float(value.strip()) < 2**62


def _outside(field: ConfigField, text: str) -> bool:
    """Whether a number is outside the field's bounds, or no integer where one is wanted."""
    number = float(text.strip().replace("_", ""))
    element = get_args(field.value_type)[0] if field.is_list else field.value_type
    if element is int and not re.fullmatch(r"-?\d+", text.strip().replace("_", "")) and number != int(number):
        return True
    signs = {"≥": number.__ge__, ">": number.__gt__, "≤": number.__le__, "<": number.__lt__}
    return not all(
        signs[sign](float(bound)) for sign, bound in (part.split() for part in field.bounds.split(", ") if part)
    )


def _case(field: ConfigField, command: str, words: tuple[str, ...], *, faulty: bool = False) -> Case:
    shown = " ".join(word if len(word) < 30 else f"{word[:20]}…{len(word)}" for word in words[:4])
    name = f"flags/{command} {shown} {len(words)}"
    return Case(name.encode("unicode_escape").decode(), partial(_make, field, command, words), faulty)


def _make(field: ConfigField, command: str, words: tuple[str, ...], folder: Path, bench: Bench) -> Words:
    prepare(folder)
    changes: dict[str, Any] = {}
    for prefix, needed in COMPANIONS.items():
        if field.name.startswith(prefix):
            changes |= needed
            break
    if command == "train" and changes.get("--runtime") == "ray":
        command = "plan"  # a cluster takes longer to start than a case may take
    filled = {"MODEL": str(bench.model), "x=DATA": f"x={bench.data}"}
    changes = {flag: filled.get(value, value) if isinstance(value, str) else value for flag, value in changes.items()}
    return [*bench.words(command, changes | {field.flag: None}), *words]


def _engine_arguments() -> Iterator[Case]:
    """What is passed on to a server, whose names only the server knows."""
    for kind in ("vllm", "sglang"):
        for words in (
            (f"--{kind}-x", ""), (f"--{kind}-",), (f"--{kind}-max-model-len", MANY_DIGITS), (f"--{kind}-x", "\x1b[0m"), (f"--{kind}--x",),
            (f"--{kind}-no-x",), (f"--{kind}-x", *["y"] * 1000), (f"--{kind}-port", "99999999"), (f"--{kind}-x=\n",), (f"--{kind}-é", "1"),
        ):  # fmt: skip
            yield _free_case(f"{kind} {' '.join(words)[:40]} {len(words)}", "plan", words, {"--rollout-engine": kind})
            yield _free_case(f"torch and {kind} {' '.join(words)[:40]} {len(words)}", "config", words, {})


def _command_lines() -> Iterator[Case]:
    """Command lines that are wrong as a whole."""
    known = ("--lr", "--seed", "--prompt-data", "--colocate")
    for words in (
        ("--",), ("-",), ("---",), ("--=",), ("--=1",), ("--lr",), ("--lr", "--seed"), ("--lr=",), ("--lr=1", "--lr=2", "--lr=x"), ("--lr", "1", "2"),
        ("--Lr", "1"), ("--l", "1"), ("--no-lr",), ("--lr", "1", "extra.toml"), ("--no-no-colocate",), ("--colocate", "--no-colocate"), ("\x1b[31m",),
        ("--\x1b[31m", "1"), ("--é", "1"), ("--" + "x" * 5000,), ("--lr" * 1000,), ("--eval-overrides", "x"), ("--vllm", "x"), ("--version",), ("-v",),
        ("--seed", "1 --lr 2"), ("\udcff",), ("--\udcff", "1"), ("💥",), ("--help", "x"), ("-h", "--nope"), ("--lr", "1", "-h"), ("--lr", "x", "--help"),
        *((flag, "") for flag in known), *((flag,) for flag in known[1:]),
    ):  # fmt: skip
        yield _free_case(f"line {' '.join(words)[:40]} {len(words)} {len(' '.join(words))}", "config", words, {})
    for words in (
        (), ("",), (" ",), ("Train",), ("train.toml",), ("-x",), ("--help", "--help"), ("\x1b[31m",), ("💥",), ("x" * 5000,), ("model",), ("model", ""), ("model", "info"),
        ("model", "info", ""), ("model", "info", "x" * 5000), ("model", "info", "pipe"), ("model", "info", "/dev/zero"), ("model", "info", "~nosuchuser"),
        ("model", "info", "folder"), ("model", "info", "file"), ("model", "info", "loop"), ("model", "info", "a/b"), ("model", "info", "../.."), ("model", "info", "\udcff"),
        ("model", "info", "a", "b"), ("model", "export", "folder", "out"), ("model", "export", "pipe", "out"), ("model", "export", "/dev/zero", "out"), ("model", "export", "", ""),
        ("model", "export", "x" * 5000, "out"), ("model", "export", "~nosuchuser", "out"), ("model", "export", "loop", "out"), ("model", "export", "file", "out"),
        ("model", "fetch", ""), ("model", "fetch", "\x1b[31m"), ("model", "fetch", "x", "--out"), ("config", "--docs=", "x"), ("config", "--docs", "flags", "metrics"),
        ("train",), ("eval",), ("plan",), ("config", ""), ("train", ""), ("config", "pipe"), ("config", "/dev/zero"), ("config", "folder"), ("config", "loop"), ("config", "~nosuchuser/x.toml"),
    ):  # fmt: skip
        shown = " ".join(words)[:40].encode("unicode_escape").decode()
        yield Case(f"flags/treadle {shown} {len(words)}", partial(_make_bare, words))


def _free_case(name: str, command: str, words: tuple[str, ...], changes: dict[str, str]) -> Case:
    return Case(f"flags/{name.encode('unicode_escape').decode()}", partial(_make_free, command, words, changes))


def _make_free(command: str, words: tuple[str, ...], changes: dict[str, str], folder: Path, bench: Bench) -> Words:
    prepare(folder)
    return [*bench.words(command, changes), *words]


def _make_bare(words: tuple[str, ...], folder: Path, bench: Bench) -> Words:
    prepare(folder)
    return list(words)
