"""How sequences that share prompts lie in one packed row.

A row is a run of *families*: one shared prefix followed by the suffixes that continue it.

    [prefix 0 | suffix 0.0 | suffix 0.1 | prefix 1 | suffix 1.0 | …]

Every suffix continues its own prefix: its positions start at the prefix length, it attends to the prefix and to
itself, and to nothing else. A prefix is computed once for all its suffixes, which changes neither the loss nor
the gradient. A plain sequence is a family with an empty prefix and one suffix, or a prefix alone.

Axis letters: `F` families, `M` most suffixes in a family, `P` longest prefix, `R` longest suffix, `N` tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Family:
    """Lengths of one shared prefix and of the suffixes that continue it, in tokens."""

    prefix: int
    suffixes: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return self.prefix + sum(self.suffixes)


class Run(NamedTuple):
    """A prefix or a suffix: tokens that lie together in the row."""

    family: int
    suffix: int  # its number in the family; -1: a prefix
    prefix: slice  # of the row: what the run continues
    tokens: slice


@dataclass(frozen=True)
class PackedLayout:
    """The families of a packed row, and the index tensors that attention needs to lay them side by side."""

    families: tuple[Family, ...]
    device: torch.device = torch.device("cpu")

    @classmethod
    def of_lengths(cls, lengths: Sequence[int], device: torch.device | None = None) -> PackedLayout:
        """Return the layout of independent sequences: each is a prefix without suffixes."""
        return cls(tuple(Family(n, ()) for n in lengths), device or torch.device("cpu"))

    @property
    def num_tokens(self) -> int:
        return sum(family.num_tokens for family in self.families)

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """The prefixes and suffixes, in the order of the row."""
        found, at = [], 0
        for i, family in enumerate(self.families):
            prefix = slice(at, at + family.prefix)
            found.append(Run(i, -1, slice(at, at), prefix))
            at = prefix.stop
            for j, length in enumerate(family.suffixes):
                found.append(Run(i, j, prefix, slice(at, at + length)))
                at += length
        return tuple(found)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first token of each family."""
        return tuple(run.tokens.start for run in self.runs if run.suffix < 0)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(F, M, P, R)."""
        return (
            len(self.families),
            max((len(f.suffixes) for f in self.families), default=0),
            max((f.prefix for f in self.families), default=0),
            max((r for f in self.families for r in f.suffixes), default=0),
        )

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max((f.prefix + max(f.suffixes, default=0) for f in self.families), default=0)

    @cached_property
    def position_ids(self) -> Tensor:
        """int64 [N]: the position of each token in its own sequence."""
        firsts = [run.prefix.stop - run.prefix.start for run in self.runs]
        return self._spread(firsts, self.runs)

    @cached_property
    def prefix_cells(self) -> tuple[Tensor, Tensor]:
        """(rows [n], cells [n]): prefix token `rows[i]` of the row lies at `cells[i]` of a flat (F, P) grid."""
        runs = [run for run in self.runs if run.suffix < 0]
        width = self.shape[2]
        return self._spread([r.tokens.start for r in runs], runs), self._spread([r.family * width for r in runs], runs)

    @cached_property
    def suffix_cells(self) -> tuple[Tensor, Tensor]:
        """(rows [n], cells [n]): suffix token `rows[i]` of the row lies at `cells[i]` of a flat (F, M, R) grid."""
        runs = [run for run in self.runs if run.suffix >= 0]
        _, most, _, width = self.shape
        cells = [(run.family * most + run.suffix) * width for run in runs]
        return self._spread([run.tokens.start for run in runs], runs), self._spread(cells, runs)

    def _spread(self, firsts: Sequence[int], runs: Sequence[Run]) -> Tensor:
        """Count up from a number for each run, one number for each of its tokens: int64 [n]."""
        spans = [run.tokens.stop - run.tokens.start for run in runs]
        parts = [np.arange(first, first + span) for first, span in zip(firsts, spans, strict=True)]
        return torch.from_numpy(np.concatenate([*parts, np.zeros(0, np.int64)])).to(self.device)
