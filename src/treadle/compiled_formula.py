"""Formulas that pass once over rows of numbers: compiled into one loop if that pays, else computed tile by tile.

As separate torch operations, a formula reads and writes memory once for each of them. On a CPU that costs as much as
the matmuls beside it. `torch.compile` makes one loop of it. Without a compiler, or for little work, the same operations
pass over tiles that stay in the processor's cache. The engine compiles none of these, because compiling would delay its
first token. Its compiled code is the C++ files of `models/cpu`.
"""

from __future__ import annotations

import functools
import inspect
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from treadle.storage.private_folder import compile_cache

CACHE_BYTES = 2 << 20
"""Tile budget in bytes: the L2 caches of two cores."""
COMPILED_FROM = 1 << 18
"""Number of elements from which a compiled loop pays: 0.1 ms on one core."""


class OnePass:
    """Applies `formula(*by_row, *whole)`, which writes its results into its first arguments.

    Row i of a result depends on row i of the other tensors in `by_row` and on all of `whole`. Sums over rows are added
    to a tensor in `whole`.
    """

    def __init__(self, formula: Callable[..., None]):
        self.formula = inspect.unwrap(formula)  # torch.compile would compile a decorator's checks with it
        self._compiled: Callable[..., None] | None = None
        self._has_failed = False

    @property
    def is_compiled(self) -> bool:
        return self._compiled is not None

    def __call__(self, *by_row: Tensor, whole: tuple[Any, ...] = ()) -> None:
        first = by_row[0]
        if (
            not self._has_failed
            and max(x.numel() for x in by_row) >= COMPILED_FROM
            and not torch.is_inference_mode_enabled()
            and compiles(first.device.type)
        ):
            self._in_one_loop([x.detach() for x in by_row], whole)
        else:
            self._in_tiles(by_row, whole)

    def _in_tiles(self, by_row: Any, whole: tuple[Any, ...]) -> None:
        first = by_row[0]
        row_bytes = sum(x.numel() * x.element_size() for x in by_row) // max(1, len(first))
        for rows in tiles(len(first), row_bytes, first.device):
            self.formula(*(x[rows] for x in by_row), *whole)

    def _in_one_loop(self, by_row: list[Tensor], whole: tuple[Any, ...]) -> None:
        if self._compiled is None:
            keep_compiled_code_private()
            self._compiled = torch.compile(self.formula, dynamic=True, fullgraph=True)
        parts = [x.detach() if isinstance(x, Tensor) else x for x in whole]
        try:
            self._compiled(*by_row, *parts)
        except torch._dynamo.exc.TorchDynamoException as error:  # nothing has run: the loop could not be made
            warnings.warn(
                f"torch.compile failed, going on without it, slower: {str(error)[:300]}; mend the C++ compiler, or set "
                "TORCH_COMPILE_DISABLE=1 to use none",
                stacklevel=2,
            )
            self._has_failed = True
            self._in_tiles(by_row, whole)


@functools.cache
def keep_compiled_code_private() -> None:
    """Make torch keep what it compiles in a folder of this user, unless `TORCHINDUCTOR_CACHE_DIR` is set.

    Torch runs any code it finds in its cache, and another user can create its default folder first, because its name is
    predictable. Torch's precompiled headers ignore the variable, so they are moved by hand.
    """
    chosen = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    from torch._inductor import codecache, config
    from torch._inductor.runtime import cache_dir_utils, runtime_utils

    # Importing torch writes its default folder into the variable.
    if chosen in (None, cache_dir_utils.default_cache_dir()):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(compile_cache())
    modules: tuple[Any, ...] = (codecache, cache_dir_utils, runtime_utils)
    for module in modules:
        if hasattr(module, "default_cache_dir"):
            module.default_cache_dir = lambda: str(compile_cache())
    if hasattr(codecache, "_HEADER_DIR"):
        codecache._HEADER_DIR = str(compile_cache() / "precompiled_headers")
        codecache._HEADER_LOCK_DIR = str(compile_cache() / "precompiled_headers" / "locks")
    else:
        config.cpp_cache_precompile_headers = False


@functools.cache
def compiles(device_type: str) -> bool:
    """Return whether torch can compile loops for such a device here. `TORCH_COMPILE_DISABLE=1` turns it off."""
    if device_type == "cpu":
        return cpp_compiler() is not None
    return device_type == "cuda" and not torch._dynamo.config.disable and torch.utils._triton.has_triton()


def cpp_compiler() -> str | None:
    """Return the C++ compiler of this machine: `$CXX`, or the first one found. None with `TORCH_COMPILE_DISABLE=1`."""
    if torch._dynamo.config.disable:
        return None
    asked = os.environ.get("CXX")
    return next(filter(None, map(shutil.which, [asked] if asked else ["g++", "clang++", "c++"])), None)


def tiles(count: int, row_bytes: int, device: torch.device) -> Iterator[slice]:
    """Yield slices over `count` rows; `row_bytes` is what the operations on one row read and write.

    Other devices than a CPU get one slice.
    """
    step = max(1, CACHE_BYTES // max(1, row_bytes)) if device.type == "cpu" else max(1, count)
    return (slice(start, min(start + step, count)) for start in range(0, count, step))
