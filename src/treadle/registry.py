"""One resolver for every name in the config that stands for code.

A value is a registered name, `package.module:object`, or `file.py:object`.

    >>> resolve("advantage", "grpo", {"grpo": len})("abc")
    3
    >>> resolve("reward", "math:gcd", {})(6, 4)
    2
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

from treadle.errors import ConfigError

T = TypeVar("T")


def suggestion(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the known name nearest to a wrong one, or nothing where none is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


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
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        raise ConfigError(f"{kind} {name!r}: {location} can't be imported: {_reason(error)}") from error
    return module


def _import_module(kind: str, name: str, location: str) -> ModuleType:
    try:
        return importlib.import_module(location)
    except Exception as error:  # user code runs here: it raises what it likes
        file = Path(*location.split(".")).with_suffix(".py")
        hint = f"; for the file here write {file}:{name.rpartition(':')[2]}" if file.is_file() else ""
        raise ConfigError(f"{kind} {name!r}: {location!r} can't be imported: {_reason(error)}{hint}") from error


def resolve(kind: str, name: str, registry: Mapping[str, T]) -> T:
    """The object a config value names: a key of `registry`, `package.module:object` or `file.py:object`.

    `kind` is the word for it in errors ("reward"). An object of the user's is returned as it is; whoever calls it
    checks what it gives back. Raises `ConfigError` that names the nearest registered name.
    """
    if name in registry:
        return registry[name]
    location, colon, path = name.rpartition(":")
    if not colon or not location or not path:
        known = f" (known: {', '.join(sorted(registry))})" if registry else ""
        raise ConfigError(
            f"unknown {kind} {name!r}{suggestion(name, registry)}{known}; "
            "your own is package.module:object or file.py:object"
        )
    module = _import_file(kind, name, location) if location.endswith(".py") else _import_module(kind, name, location)
    found: Any = module
    for part in path.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise ConfigError(f"{kind} {name!r}: {location} has no {part!r}{suggestion(part, dir(found))}") from None
    return cast(T, found)
