"""Rollouts on disk: one JSON object a line and one line a sample, readable fields first and tokens last.

The first line of a group also carries its whole prompt under `group`, so `read_groups` gives back exactly the groups
that `write_groups` was given. A number that is not finite is written as `{"$float": "nan"}`, which keeps every line
strict JSON.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from treadle.errors import DataError, TreadleError
from treadle.printable_text import harmless_json
from treadle.storage.atomic_file import write_atomically
from treadle.storage.regular_file import read_regular
from treadle.types import Group, Sample, prompt_from_json, prompt_to_json, sample_from_json, sample_to_json

TOKEN_FIELDS = ("token_ids", "loss_mask", "rollout_logprobs", "weight_versions")
_FILE_NAME = re.compile(r"rollout_(\d{6,})\.jsonl")
_MAX_DEPTH = 20


def rollout_file(folder: Path, rollout_id: int) -> Path:
    """Return the file of a rollout in a folder of rollouts: `rollout_000012.jsonl`."""
    return folder / f"rollout_{rollout_id:06d}.jsonl"


def rollout_ids(folder: Path) -> list[int]:
    """Return the ids of the rollouts in a folder, smallest first; none if there is no folder."""
    try:
        names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    except OSError as error:
        raise DataError(f"{folder} can't be read ({error.strerror}); give another folder") from error
    return sorted(int(match[1]) for name in names if (match := _FILE_NAME.fullmatch(name)))


def make_folder(folder: Path) -> None:
    """Make a folder of rollouts and check that it can be written; raises `TreadleError` if the disk refuses."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TreadleError(f"{folder} can't be written ({error.strerror}); give another folder") from error
    probe = folder / ".write-check"
    write_atomically(probe, [b"1"])
    probe.unlink()


def write_groups(path: Path, groups: Iterable[Group]) -> None:
    """Write groups to one file, whole or not at all; makes the folder. Raises `TreadleError` if the disk refuses."""
    if not path.parent.is_dir():
        make_folder(path.parent)
    write_atomically(path, (_encode(row) for group in groups for row in _rows(group)))


def read_groups(path: Path) -> list[Group]:
    """Read groups back: same order, same prompts, arrays bit for bit.

    Raises `DataError` that names the file, and the line if one is malformed.
    """
    groups: list[Group] = []
    try:
        lines = list(io.BytesIO(read_regular(path)))
    except FileNotFoundError as error:
        raise DataError(f"no saved rollout {path}; write it with --save-debug-rollout-data") from error
    except OSError as error:
        raise DataError(f"saved rollout {path} can't be read ({error.strerror}); give another folder") from error
    at = 0
    while at < len(lines):
        group, at = _read_group(path, lines, at)
        groups.append(group)
    return groups


def _rows(group: Group) -> Iterator[dict[str, Any]]:
    """Yield the lines of one group; a group without samples is one line with its prompt."""
    whole = {"num_samples": len(group.samples), **prompt_to_json(group.prompt)}
    if not group.samples:
        yield {"prompt": group.prompt.text, "group": whole}
    for number, sample in enumerate(group.samples):
        yield _row(group, sample, whole if number == 0 else None)


def _row(group: Group, sample: Sample, whole: Mapping[str, Any] | None) -> dict[str, Any]:
    values = sample_to_json(sample)
    row: dict[str, Any] = {
        "prompt": group.prompt.text,
        "response": values.pop("text"),
        "label": group.prompt.label,
        "reward": values.pop("reward"),
        "reward_parts": values.pop("reward_parts"),
        "status": values.pop("status"),
        "failure": values.pop("failure"),
        "response_length": sample.response_length,
    }
    row.update((name, value) for name, value in values.items() if name not in TOKEN_FIELDS)
    if whole is not None:
        row["group"] = whole
    row.update((name, values[name]) for name in TOKEN_FIELDS)
    return row


def _read_group(path: Path, lines: Sequence[bytes], at: int) -> tuple[Group, int]:
    """Return the group whose first line is `lines[at]`, and the index at which the next one begins."""
    first = _decode(path, at + 1, lines[at])
    try:
        whole = first["group"]
        num_samples = int(whole["num_samples"])
        prompt = prompt_from_json(whole)
    except (KeyError, TypeError, ValueError) as error:
        raise _malformed(path, at + 1, f"the first line of a group lacks its prompt ({error!r})") from error
    end = at + max(1, num_samples)
    if end > len(lines):
        raise _malformed(
            path, len(lines), f"the file ends after {len(lines) - at} of the {num_samples} samples of a group"
        )
    samples: list[Sample] = []
    for index in range(at, at + num_samples):
        row = first if index == at else _decode(path, index + 1, lines[index])
        if index > at and "group" in row:
            raise _malformed(path, index + 1, f"a new group begins after {index - at} of {num_samples} samples")
        try:
            samples.append(sample_from_json({**row, "text": row["response"]}))
        except (KeyError, TypeError, ValueError, AssertionError) as error:
            raise _malformed(path, index + 1, f"not a sample ({error!r})") from error
    return Group(prompt, tuple(samples)), end


def _malformed(path: Path, line: int, reason: str) -> DataError:
    return DataError(f"{path}:{line}: {reason}; write the file again with --save-debug-rollout-data")


def _encode(row: Mapping[str, Any]) -> bytes:
    """Return a row as one line of JSON; only rows with values that JSON can't hold take the slow way."""
    try:
        text = json.dumps(row, ensure_ascii=False, allow_nan=False, default=_stand_in)
    except (TypeError, ValueError, RecursionError):
        row = _json_like(row, 0)
        text = json.dumps(row, ensure_ascii=False, allow_nan=False)
    return harmless_json(text).encode() + b"\n"


def _stand_in(value: Any) -> Any:
    """Return what is written for a value that JSON can't hold: numpy's numbers as numbers, everything else as text."""
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else _text(value)


def _text(value: Any) -> str:
    """Return the text of any value, or a stand-in if its own code raises or it is nested too deep."""
    try:
        return str(value)
    except Exception:
        return f"<{type(value).__name__} that has no text>"


def _json_like(value: Any, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        return _text(value)
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": str(float(value))}
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {_text(key): _json_like(inner, depth + 1) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_json_like(inner, depth + 1) for inner in value]
    return _text(value)


def _float_hook(row: dict[str, Any]) -> Any:
    return float(row["$float"]) if row.keys() == {"$float"} and row["$float"] in ("nan", "inf", "-inf") else row


def _decode(path: Path, line: int, data: bytes) -> dict[str, Any]:
    try:
        row = json.loads(data, object_hook=_float_hook)
    except (ValueError, RecursionError) as error:
        raise _malformed(path, line, f"not JSON ({error})") from error
    if not isinstance(row, dict):
        raise _malformed(path, line, f"not a JSON object but {type(row).__name__}")
    return row
