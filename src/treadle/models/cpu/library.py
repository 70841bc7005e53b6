"""C++ files of this package as libraries, compiled for this processor by the machine's GCC.

A library is compiled once per machine, in seconds, and kept in `$TREADLE_CACHE/kernels`. Only GCC is used: another
compiler's OpenMP would be a second one beside torch's. The types of arguments and fields are read from the C++ file.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import re
import subprocess
import tempfile
import warnings
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from treadle.compiled_formula import cpp_compiler
from treadle.storage.private_folder import private_cache

FLAGS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-std=c++17", "-fno-fast-math", "-Wno-psabi")
COMPILE_SECONDS = 120.0
_TYPES = {"i64": ctypes.c_int64, "float": ctypes.c_float, "bool": ctypes.c_bool, "void": None}


def load(
    source: Path, constants: dict[str, object] | None = None, needs: Literal["blocks", "tiles"] | None = None
) -> ctypes.CDLL | None:
    """Compile a C++ file and declare its functions.

    Args:
        source: the file.
        constants: macros.
        needs: `blocks` if it needs the instructions that tiles.h uses, `tiles` if it needs AMX tiles.
    Returns:
        The library. None if there is no GCC, if compiling fails (with a warning), or if the processor lacks the
        instructions; the caller then uses torch's operations.
    """
    compiler = cpp_compiler()
    try:
        version = _run([compiler, "--version"]) if compiler else ""
        if compiler is None or "Free Software Foundation" not in version:
            return None
        macros = [f"-D{name}={value}" for name, value in (constants or {}).items()]
        library = _library([compiler, *FLAGS, *macros], source, version)
    except OSError as error:
        warnings.warn(f"could not compile {source.name}, continuing without it, slower: {error}", stacklevel=3)
        return None
    text = source.read_text(encoding="utf-8") + (source.with_name("tiles.h").read_text() if needs else "")
    for result, name, arguments in re.findall(r'extern "C" (\w+) (\w+)\(([^)]*)\)', text):
        function = getattr(library, name, None)
        if function is None:  # left out because the processor lacks the instructions
            continue
        function.restype, function.argtypes = _TYPES[result], [_type(x, source) for x in arguments.split(",") if x]
    if (needs and not library.ready()) or (needs == "tiles" and not library.has_tiles()):
        return None
    return library


@functools.cache
def structure(source: Path, name: str) -> Any:
    """Return the ctypes structure with the fields of a C++ structure, which are pointers, numbers and structures."""
    text = re.sub("//.*", "", source.read_text(encoding="utf-8"))
    found = re.search(rf"struct {name} {{(.*?)}};", text, re.DOTALL)
    assert found, f"{source.name} has no structure {name}"
    fields = [
        (field, _type(declaration, source))
        for declaration in found[1].split(";")
        for field in re.findall(r"(\w+)\s*(?:,|$)", declaration)
    ]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def _type(declaration: str, source: Path) -> Any:
    """Return the ctypes type of a C++ declaration such as `const float* x`."""
    if "*" in declaration:
        return ctypes.c_void_p
    kind = declaration.split()[0]
    return _TYPES.get(kind) or structure(source, kind)


def addresses(**tensors: Tensor | None) -> dict[str, int | None]:
    """Return where each tensor's numbers lie in memory."""
    return {name: None if tensor is None else tensor.data_ptr() for name, tensor in tensors.items()}


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
            os.replace(new, kept)  # atomically: other processes may open it
    return library


def _run(command: list[str]) -> str:
    """Return what a command prints.

    Raises:
        OSError: if the command fails or takes too long.
    """
    with tempfile.TemporaryFile() as file:  # a pipe would stay open until the command's children have exited too
        try:
            code = subprocess.run(command, stdout=file, stderr=file, timeout=COMPILE_SECONDS).returncode
        except subprocess.TimeoutExpired:
            raise OSError(f"{command[0]} did not end within {COMPILE_SECONDS:.0f} s") from None
        file.seek(0)
        output = file.read().decode(errors="replace")
    if code:
        raise OSError(f"{command[0]} ended with {code}: {output[:300]}")
    return output


def _processor() -> str:
    """Describe what `-march=native` depends on: a cache may be shared by machines."""
    found = Path("/proc/cpuinfo")
    lines = found.read_text().splitlines() if found.is_file() else []
    known = [line for line in lines if line.startswith(("flags", "Features", "model name"))][:2]
    return "\n".join([platform.machine(), platform.processor(), *(known or [platform.node()])])
