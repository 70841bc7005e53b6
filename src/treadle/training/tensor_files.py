"""Named tensors in safetensors files, written and read by many ranks without a second copy of the model anywhere.

Files have a bounded size. Every rank takes part in gathering each tensor, and the ranks write different files at the
same time, so they need a folder that all of them see. What was written by any number of ranks is read by any other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from treadle.errors import CheckpointError, first_line
from treadle.training.ranks import Ranks

MAX_FILE_BYTES = 2 << 30


@dataclass(frozen=True)
class FilePlan:
    """One file: its name, the rank that writes it, and the tensors in it."""

    file: str
    rank: int
    names: tuple[str, ...]


def plan_files(
    stem: str, sizes: Mapping[str, int], num_ranks: int, max_bytes: int = MAX_FILE_BYTES
) -> tuple[FilePlan, ...]:
    """Put tensors of these sizes (bytes) into files in their order; ranks take turns, so each writes its share.

    >>> for plan in plan_files("model", {"a": 2, "b": 3, "c": 4}, 2, max_bytes=6):
    ...     print(plan.file, plan.rank, plan.names)
    model-00001-of-00002.safetensors 0 ('a', 'b')
    model-00002-of-00002.safetensors 1 ('c',)
    """
    # Small models still give every rank something to write.
    limit = max(1, min(max_bytes, -(-sum(sizes.values()) // num_ranks)))
    parts: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not parts or size > room:
            parts.append([])
            room = limit
        parts[-1].append(name)
        room -= size
    count = len(parts)
    return tuple(
        FilePlan(f"{stem}-{i + 1:05d}-of-{count:05d}.safetensors", i % num_ranks, tuple(names))
        for i, names in enumerate(parts)
    )


def write_files(folder: Path, plan: tuple[FilePlan, ...], gather: Callable[[str], Tensor], world: Ranks) -> None:
    """Write the planned files; every rank calls this, and `gather` of a name at the same time as the others.

    A rank holds one file of its own, and one tensor of another's. Raises what writing raises (`OSError`: disk full),
    on every rank, so that none waits for one that failed.
    """
    error: Exception | None = None
    for start in range(0, len(plan), world.size):
        own: dict[str, Tensor] = {}
        for file in plan[start : start + world.size]:
            for name in file.names:
                tensor = gather(name)
                if file.rank == world.rank and error is None:
                    own[name] = tensor.detach().cpu().contiguous()
                del tensor
        mine = next((file for file in plan[start : start + world.size] if file.rank == world.rank), None)
        if mine is not None and error is None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                save_file(own, folder / mine.file, metadata={"format": "pt"})
            except Exception as found:  # the others must hear of it first
                error = found
    failed = world.max(0 if error is None else 1)
    if error is not None:
        raise error
    if failed:
        raise CheckpointError(f"another rank could not write to {str(folder)!r}; its log says why")


def write_index(folder: Path, plan: tuple[FilePlan, ...], sizes: Mapping[str, int]) -> None:
    """Write the index file of a Hugging Face folder with several files."""
    places = {name: file.file for file in plan for name in file.names}
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
    (folder / f"{plan[0].file.split('-')[0]}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{str(file)!r} is no sound safetensors file: {first_line(error)}; use another checkpoint"
        ) from error


class TensorFiles(Mapping[str, Tensor]):
    """The tensors of `<stem>.safetensors`, or of its parts, read one by one as they are asked for.

    Raises `CheckpointError` if one of the files is damaged.
    """

    def __init__(self, folder: Path, stem: str):
        files = sorted({*folder.glob(f"{stem}.safetensors"), *folder.glob(f"{stem}-*-of-*.safetensors")})
        self._handles = [_open(file) for file in files]
        self._places = {name: handle for handle in self._handles for name in handle.keys()}  # noqa: SIM118

    def __getitem__(self, name: str) -> Tensor:
        return self._places[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading it."""
        return tuple(self._places[name].get_slice(name).get_shape())


class Chosen(Mapping[str, Tensor]):
    """Tensors of several mappings under names of one's own, read as they are asked for: name → (mapping, its name)."""

    def __init__(self, places: Mapping[str, tuple[Mapping[str, Tensor], str]]):
        self._places = dict(places)

    def __getitem__(self, name: str) -> Tensor:
        source, own = self._places[name]
        return source[own]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, without reading it if its files tell."""
        source, own = self._places[name]
        return shape_of(source, own)


def shape_of(tensors: Mapping[str, Tensor], name: str) -> tuple[int, ...]:
    """Return the shape of one of the tensors, which is read only if necessary."""
    return tensors.shape(name) if isinstance(tensors, TensorFiles | Chosen) else tuple(tensors[name].shape)
