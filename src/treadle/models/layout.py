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

import numpy as np
import torch


@dataclass(frozen=True)
class Family:
    """Lengths of one shared prefix and of the suffixes that continue it, in tokens."""

    prefix: int
    suffixes: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return self.prefix + sum(self.suffixes)


@dataclass(frozen=True)
class PackedLayout:
    """A packed row's families, and the index tensors attention needs to lay them side by side."""

    families: tuple[Family, ...]
    device: torch.device = torch.device("cpu")

    @classmethod
    def of_lengths(cls, lengths: Sequence[int], device: torch.device | None = None) -> PackedLayout:
        """Independent sequences: each is a prefix without suffixes."""
        return cls(tuple(Family(n, ()) for n in lengths), device or torch.device("cpu"))

    @property
    def num_tokens(self) -> int:
        return sum(family.num_tokens for family in self.families)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where each family begins in the row."""
        sizes = [family.num_tokens for family in self.families]
        return tuple(int(x) for x in np.cumsum([0, *sizes])[:-1])

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
    def position_ids(self) -> torch.Tensor:
        """int64 [N]: the position of each token in its own sequence."""
        parts: list[np.ndarray] = []
        for family in self.families:
            parts.append(np.arange(family.prefix))
            parts.extend(family.prefix + np.arange(r) for r in family.suffixes)
        return torch.from_numpy(np.concatenate(parts) if parts else np.zeros(0, np.int64)).to(self.device)

    @cached_property
    def prefix_cells(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows [n], cells [n]): prefix token `rows[i]` of the row lies at `cells[i]` of a flat (F, P) grid."""
        width = self.shape[2]
        rows = [start + np.arange(f.prefix) for start, f in zip(self.starts, self.families, strict=True)]
        cells = [i * width + np.arange(f.prefix) for i, f in enumerate(self.families)]
        return self._tensor(rows), self._tensor(cells)

    @cached_property
    def suffix_cells(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows [n], cells [n]): suffix token `rows[i]` of the row lies at `cells[i]` of a flat (F, M, R) grid."""
        _, most, _, width = self.shape
        rows, cells = [], []
        for i, (start, family) in enumerate(zip(self.starts, self.families, strict=True)):
            at = start + family.prefix
            for j, length in enumerate(family.suffixes):
                rows.append(at + np.arange(length))
                cells.append((i * most + j) * width + np.arange(length))
                at += length
        return self._tensor(rows), self._tensor(cells)

    @cached_property
    def prefix_lengths(self) -> torch.Tensor:
        """int64 [F]."""
        return torch.tensor([f.prefix for f in self.families], device=self.device)

    @cached_property
    def sequences(self) -> tuple[tuple[slice, slice], ...]:
        """Each suffix as (prefix slice, suffix slice) of the row; a family without suffixes is not listed."""
        out = []
        for start, family in zip(self.starts, self.families, strict=True):
            at = start + family.prefix
            for length in family.suffixes:
                out.append((slice(start, start + family.prefix), slice(at, at + length)))
                at += length
        return tuple(out)

    def _tensor(self, parts: list[np.ndarray]) -> torch.Tensor:
        joined = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
        return torch.from_numpy(joined.astype(np.int64)).to(self.device)
