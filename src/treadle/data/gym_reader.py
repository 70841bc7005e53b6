"""Generated exercises with verifiers: `reasoning_gym:task?key=value&key=value`.

A row is made when it is read, from the task's seed and its index. A few tasks (isomorphic_strings, knight_swap,
polynomial_multiplication, ransom_note, word_ladder) also depend on the order of Python sets. Their rows are the same in
all processes only if PYTHONHASHSEED is.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from treadle.errors import DataError, first_line
from treadle.plain_json import plain_json
from treadle.registry import suggestion

GYM_PREFIX = "reasoning_gym:"
DEFAULT_SEED = 0
MAX_ROWS = 10_000_000  # each is made once before the run starts


class GymReader:
    """Reader of one reasoning-gym task.

    The columns `question` and `answer` are text; the answer is None for tasks with many right ones. `task` and
    `task_args` are what `reasoning_gym.create_dataset` takes, `task_index` is the row, and `entry` is the whole
    exercise in JSON values. Raises `DataError` for an unknown task or parameter, and for values that the task refuses.
    """

    columns = ("question", "answer", "task", "task_args", "task_index", "entry")

    def __init__(self, source: str):
        self._source = source
        self._task, given = _split_source(source)
        fields = _parameters(self._task, source)
        for key, value in given.items():
            _check_value(source, key, value, fields)
        self._args = {"seed": DEFAULT_SEED, **given}
        self._dataset = _create(source, self._task, self._args)
        self._args["size"] = len(self._dataset)

    def __len__(self) -> int:
        return int(self._args["size"])

    def row(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)} in {self._source}")
        # One task draws from Python's shared generator instead of its own.
        with _shared_random(f"{self._args['seed']}/{index}"):
            entry = self._dataset[index]
        return {
            "question": str(entry["question"]),
            "answer": None if entry["answer"] is None else str(entry["answer"]),
            "task": self._task,
            "task_args": dict(self._args),
            "task_index": index,
            "entry": plain_json(entry),
        }

    def column(self, name: str, start: int, stop: int) -> list[Any]:
        return [self.row(index).get(name) for index in range(start, stop)]

    def locate(self, index: int) -> str:
        return f"{self._source}, row {index}"


@contextmanager
def _shared_random(seed: str) -> Iterator[None]:
    """Seed Python's shared generator inside the context, and restore its state afterwards."""
    state = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)


def _split_source(source: str) -> tuple[str, dict[str, Any]]:
    task, _, query = source.removeprefix(GYM_PREFIX).partition("?")
    values: dict[str, Any] = {}
    for part in query.split("&") if query else []:
        key, equals, text = part.partition("=")
        if not key or not equals:
            raise DataError(f"{source!r}: {part!r} is not key=value; write {GYM_PREFIX}task?key=value&key=value")
        if key in values:
            raise DataError(f"{source!r} gives {key!r} twice; leave one out")
        try:
            values[key] = json.loads(text)
        except ValueError:
            values[key] = text
    return task, values


def _parameters(task: str, source: str) -> dict[str, Any]:
    """Return the task's parameters and their defaults."""
    from reasoning_gym.factory import DATASETS

    tasks = sorted(set(DATASETS) - {"composite"})  # composite takes a list of tasks: name several sources instead
    if task not in tasks:
        hint = suggestion(task, tasks) or f"; some of them: {', '.join(tasks[:5])}"
        raise DataError(f"{source!r}: reasoning_gym has no task {task!r}{hint} ({len(tasks)} in all)")
    defaults: dict[str, Any] = {}
    for field in dataclasses.fields(DATASETS[task][1]):
        factory: Any = field.default_factory
        defaults[field.name] = field.default if factory is dataclasses.MISSING else factory()
    return defaults


def _check_value(source: str, key: str, value: Any, fields: dict[str, Any]) -> None:
    if key not in fields:
        allowed = ", ".join(sorted(fields))
        raise DataError(f"{source!r}: no parameter {key!r}{suggestion(key, fields)}; allowed: {allowed}")
    default = {"seed": 0, "size": 0}.get(key, fields[key])
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(default, bool) and not isinstance(value, bool):
        raise DataError(f"{source!r}: {key}={value!r} must be true or false")
    if isinstance(default, int | float) and not isinstance(default, bool) and not is_number:
        raise DataError(f"{source!r}: {key}={value!r} must be a number")
    if key in ("seed", "size") and not isinstance(value, int):
        raise DataError(f"{source!r}: {key}={value!r} must be a whole number")
    if key == "size" and value > MAX_ROWS:
        raise DataError(f"{source!r}: size={value} is too many; at most {MAX_ROWS}, each row is made before the start")


def _create(source: str, task: str, args: dict[str, Any]) -> Any:
    import reasoning_gym

    try:
        with _shared_random(str(args["seed"])):
            return reasoning_gym.create_dataset(task, **args)
    except Exception as error:  # each task checks its own values, mostly with assert
        raise DataError(f"{source!r}: the task refuses these values: {first_line(error)}; change them") from error
