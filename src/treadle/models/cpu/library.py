"""C++ files of this package as libraries, compiled for this processor by the machine's GCC.

A library is made in seconds, once per machine, and kept in `$TREADLE_CACHE/kernels`. Only GCC is used: another compiler's
OpenMP would be a second one beside torch's. Without it the caller gets None and uses torch's operations.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import subprocess
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from treadle.compiled_formula import cpp_compiler
from treadle.storage.private_folder import private_cache

FLAGS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-std=c++17", "-fno-fast-math", "-Wno-psabi")
COMPILE_SECONDS = 120.0


def compiled(source: Path, constants: dict[str, object]) -> ctypes.CDLL | None:
    """Compile a C++ file with `constants` as macros; return None without GCC, or, with a warning, if it fails."""
    compiler = cpp_compiler()
    try:
        version = _run([compiler, "--version"]) if compiler else ""
        if compiler is None or "Free Software Foundation" not in version:
            return None
        macros = [f"-D{name}={value}" for name, value in constants.items()]
        return _library([compiler, *FLAGS, *macros], source, version)
    except OSError as error:
        warnings.warn(f"could not compile {source.name}, going on without it, slower: {error}", stacklevel=3)
        return None


_TYPES = {"p": ctypes.c_void_p, "n": ctypes.c_int64, "f": ctypes.c_float}


def load(
    source: Path,
    functions: Mapping[str, str],
    constants: dict[str, object] | None = None,
    needs: Literal["blocks", "tiles"] | None = None,
) -> ctypes.CDLL | None:
    """Compile a C++ file and declare its functions.

    Args:
        source: the file.
        functions: the arguments of each function, a letter each: p a pointer, n an int64, f a float; `>n` if it returns one.
        constants: macros.
        needs: `blocks` if it needs the instructions that tiles.h uses, `tiles` if it needs AMX tiles.
    Returns:
        The library; None if it can't be compiled or the processor lacks the instructions.
    """
    library = compiled(source, constants or {})
    if library is None or (needs and not _says(library.ready)) or (needs == "tiles" and not _says(library.has_tiles)):
        return None
    for name, letters in functions.items():
        arguments, _, result = letters.partition(">")
        function = getattr(library, name)
        function.argtypes, function.restype = [_TYPES[letter] for letter in arguments], _TYPES.get(result)
    return library


def _says(function: Any) -> bool:
    function.restype = ctypes.c_bool
    return bool(function())


def _library(command: list[str], source: Path, version: str) -> ctypes.CDLL:
    """Run a compile command on a source, and keep the library in the cache, if there is one, for the next process."""
    texts = [path.read_text(encoding="utf-8") for path in (source, *sorted(source.parent.glob("*.h")))]
    made_of = "\n".join([*command, version, _processor(), *texts])
    name = f"{hashlib.sha256(made_of.encode()).hexdigest()[:20]}.so"
    cache = private_cache("kernels")
    kept = cache / name if cache and (os.access(cache, os.W_OK) or (cache / name).is_file()) else None
    if kept is not None and kept.is_file():
        with contextlib.suppress(OSError):  # damaged: compiled again
            return ctypes.CDLL(str(kept))
    with tempfile.TemporaryDirectory(dir=kept and kept.parent) as folder:
        new = Path(folder) / name
        _run([*command, str(source), "-o", str(new)])
        library = ctypes.CDLL(str(new))
        if kept is not None:
            os.replace(new, kept)  # whole or not at all: other processes may look for it
    return library


def _run(command: list[str]) -> str:
    """Return what a command prints; raises OSError if it fails or takes too long."""
    with tempfile.TemporaryFile() as file:  # a pipe would be waited for until its children are gone too
        try:
            code = subprocess.run(command, stdout=file, stderr=file, timeout=COMPILE_SECONDS).returncode
        except subprocess.TimeoutExpired:
            raise OSError(f"{command[0]} did not end within {COMPILE_SECONDS:.0f} s") from None
        file.seek(0)
        said = file.read().decode(errors="replace")
    if code:
        raise OSError(f"{command[0]} ended with {code}: {said[:300]}")
    return said


def _processor() -> str:
    """Describe what `-march=native` depends on: a cache may be shared by machines."""
    found = Path("/proc/cpuinfo")
    lines = found.read_text().splitlines() if found.is_file() else []
    known = [line for line in lines if line.startswith(("flags", "Features", "model name"))][:2]
    return "\n".join([platform.machine(), platform.processor(), *(known or [platform.node()])])
