"""One resolver for every name in the config that stands for code.

A value is a registered name, `package.module:object`, or `file.py:object`.

    >>> resolve("advantage", "grpo", {"grpo": len})("abc")
    3
    >>> resolve("reward", "math:gcd", {})(6, 4)
    2
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib
import importlib.util
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, TypeVar, cast

from treadle.errors import ConfigError

T = TypeVar("T")

end_process = os._exit
"""The real `os._exit`: it ends the process even while a user's code runs, when `os._exit` raises (see `user_code`)."""

_MAX_ERROR_CHARS = 300
_MISSING = object()


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name most like this one, or None if none is close.

    >>> nearest("rollout_batch_sise", ["rollout_batch_size", "micro_batch_size"])
    'rollout_batch_size'
    """
    return next(iter(difflib.get_close_matches(name, list(known), n=1)), None)


def suggestion(name: str, known: Iterable[str], most_listed: int = 0) -> str:
    """Return `; did you mean 'x'?` for the known name nearest to a wrong one.

    If none is near, return `; known are …` if they are at most `most_listed`, else nothing.
    """
    names = list(known)
    if found := nearest(name, names):
        return f"; did you mean {found!r}?"
    return f"; known are {', '.join(names)}" if 0 < len(names) <= most_listed else ""


def describe_error(error: BaseException) -> str:
    """Describe an exception for the end of a sentence: its type, its text, and the innermost place that raised it."""
    try:
        said = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
    except Exception:  # an exception's own __str__ may raise
        said = ""
    text = f"{type(error).__name__}: {said}" if said else type(error).__name__
    text = text if len(text) <= _MAX_ERROR_CHARS else text[:_MAX_ERROR_CHARS] + "…"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
    frames = [f for f in frames if f.filename != __file__]
    at = (frames[-1].filename, frames[-1].lineno) if frames else None
    at = (error.filename, error.lineno) if isinstance(error, SyntaxError) and error.filename else at
    place = f" ({Path(at[0]).name}:{at[1]})" if at else ""
    return f"called {error}{place}" if isinstance(error, _ProcessEnd) else f"raised {text}{place}"


def short_repr(value: object) -> str:
    """Return the `repr` of a value for a message, cut after 60 characters. Errors of its `__repr__` are passed on.

    >>> short_repr([1.5]), len(short_repr("x" * 99))
    ('[1.5]', 61)
    """
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "…"


class _ProcessEnd(BaseException):
    """Raised by `os._exit` while a user's code runs in this process; no `except Exception` catches it."""


_inside = threading.local()  # `pid`: the process in which this thread runs a user's code now


@functools.cache
def _catch_exits() -> None:
    """Make `os._exit` raise if a user's code calls it. Elsewhere, and in forked children, it still ends the process."""

    def _exit(status: int) -> NoReturn:
        if getattr(_inside, "pid", None) == os.getpid():
            raise _ProcessEnd(f"os._exit({status!r})")
        end_process(status)

    os._exit = _exit


@contextmanager
def user_code(fault: Callable[[str], Exception]) -> Iterator[None]:
    """Run a user's code, and raise any exception of it as `fault(description)`; see `describe_error`.

    `sys.exit`, `os._exit`, and every other `BaseException` count as faults: none may end a run as if it were complete.
    A real Ctrl-C stays a `KeyboardInterrupt`.
    """
    _catch_exits()
    before = getattr(_inside, "pid", None)
    _inside.pid = os.getpid()
    try:
        with _interrupts() as interrupted:
            try:
                yield
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt) and interrupted:
                    raise
                raise fault(describe_error(error)) from error
    finally:
        _inside.pid = before


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Yield a list that is not empty once SIGINT has arrived; the installed handler is called as before."""
    seen: list[int] = []
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield seen
        return

    def note(signum: int, frame: Any) -> None:
        seen.append(signum)
        handler(signum, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        if signal.getsignal(signal.SIGINT) is note:
            signal.signal(signal.SIGINT, handler)


def _import_file(kind: str, name: str, location: str) -> ModuleType:
    file = Path(location).expanduser()
    if not file.is_file():
        raise ConfigError(f"{kind} {name!r}: there is no file {location!r}; the path is read from the current folder")
    path = file.resolve()
    module_name = f"treadle_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if module_name in sys.modules:  # a file named by two settings is one module, as with any import
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look their module up by name
    if (folder := str(path.parent)) not in sys.path:
        sys.path.append(folder)  # last: a file beside it never hides a module of Python or of a package
    try:
        with user_code(lambda what: ConfigError(f"{kind} {name!r}: {location} can't be imported: it {what}")):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


def _import_module(kind: str, name: str, location: str) -> ModuleType:
    def fault(what: str) -> ConfigError:
        file = Path(*location.split(".")).with_suffix(".py")
        hint = f"; for the file here write {file}:{name.rpartition(':')[2]}" if file.is_file() else ""
        return ConfigError(f"{kind} {name!r}: {location!r} can't be imported: it {what}{hint}")

    with user_code(fault):
        return importlib.import_module(location)


def check_name(kind: str, name: str, registry: Mapping[str, T]) -> None:
    """Raise `ConfigError`, as `resolve` does, if a value is neither a key of `registry` nor a path; imports nothing."""
    location, colon, path = name.rpartition(":")
    if name not in registry and not (colon and location and path):
        known = f" (known: {', '.join(sorted(registry))})" if registry else ""
        raise ConfigError(
            f"unknown {kind} {name!r}{suggestion(name, registry)}{known}; "
            "your own is package.module:object or file.py:object"
        )


def resolve(kind: str, name: str, registry: Mapping[str, T]) -> T:
    """Return the object that a config value names: a key of `registry`, `package.module:object` or `file.py:object`.

    `kind` is the word for it in errors ("reward"). A user's object is returned unchecked; the caller checks its
    results. Raises `ConfigError`, which suggests the nearest registered name.
    """
    if name in registry:
        return registry[name]
    check_name(kind, name, registry)
    location, _, path = name.rpartition(":")
    module = _import_file(kind, name, location) if location.endswith(".py") else _import_module(kind, name, location)
    found: Any = module
    for part in path.split("."):
        with user_code(lambda what: ConfigError(f"{kind} {name!r}: {location} can't be read: it {what}")):
            known, found = found, getattr(found, part, _MISSING)
        if found is _MISSING:
            raise ConfigError(f"{kind} {name!r}: {location} has no {part!r}{suggestion(part, dir(known))}")
    return cast(T, found)
