"""Write and read back the lines of metrics.jsonl."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treadle.errors import DataError
from treadle.storage.regular_file import read_regular


def metric_line(rollout_id: int, values: Mapping[str, float]) -> bytes:
    """Return a line of metrics.jsonl: strict JSON, `rollout_id` first, null for values that are not finite.

    >>> metric_line(3, {"train/loss": float("nan"), "train/entropy": 0.5})
    b'{"rollout_id": 3, "train/loss": null, "train/entropy": 0.5}\\n'
    """
    row: dict[str, Any] = {"rollout_id": int(rollout_id)}
    for name, value in values.items():
        number = float(value)
        row[name] = number if math.isfinite(number) else None
    return json.dumps(row, allow_nan=False).encode() + b"\n"


def read_metric_lines(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """Return every complete line of a metrics file, as bytes and as a row; none if there is no file.

    A last line without its end is left out: the run was killed while writing it. Raises `DataError` if the file can't
    be read, and, with the line number, if any other line is not an object with a `rollout_id`.
    """
    try:
        lines = list(io.BytesIO(read_regular(path)))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DataError(f"{path} can't be read ({error.strerror}); start in another --run-dir") from error
    found: list[tuple[bytes, dict[str, Any]]] = []
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
            break
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict) or not isinstance(row.get("rollout_id"), int):
            raise DataError(f"{path}:{number}: not a line of metrics; remove that line, or start in another --run-dir")
        found.append((line, row))
    return found


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics file in order; none if there is no file."""
    return [row for _, row in read_metric_lines(path)]
