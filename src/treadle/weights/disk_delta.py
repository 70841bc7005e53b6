"""Weights through a shared disk: the changes since the previous version, and regularly a snapshot of all weights.

Each delta names the version that it builds on and the digest of those weights. A receiver compares that digest with its
own weights before it changes anything, and the digest of the result afterwards. A new engine, or one whose last update
broke off, starts at the last snapshot and applies the deltas since.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import astuple
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from treadle.errors import EngineError
from treadle.weights.base import Offer
from treadle.weights.delta import Block, apply, encode
from treadle.weights.disk import (
    converted,
    digest_of,
    digest_of_tensors,
    digest_of_weights,
    find,
    open_shards,
    write_shards,
)
from treadle.weights.parallel_copy import spread
from treadle.weights.served_weights import SentWeights, ServedWeights
from treadle.weights.tensor_layout import as_bytes
from treadle.weights.transport import Transport
from treadle.weights.version_folders import Base, Manifest, VersionWriter, check_files, is_sound, read_manifest

NAME = "disk-delta"
FILE = "delta.safetensors"


class DeltaSender:
    """The trainer's end. It holds a copy of the last version on the CPU, in the engine's dtype, to compare with.

    It writes a snapshot first, then every `full_every` versions, and whenever a delta would not be smaller. A version that is
    offered again is written again, as a snapshot, only if its weights changed or its files are damaged.
    """

    def __init__(
        self,
        weights: SentWeights,
        folder: Path,
        *,
        full_every: int = 20,
        max_shard_bytes: int = 1 << 30,
        keep: int = 2,
    ):
        self._weights = weights
        self._writer = VersionWriter(folder)
        self._full_every, self._max_shard_bytes, self._keep = full_every, max_shard_bytes, keep
        self._held: dict[str, Tensor] = {}
        self._digests: dict[str, str] = {}
        self._last: Base | None = None  # the version on disk and in `_held`; None: the next push is a snapshot
        self._deltas = 0  # since the last snapshot

    def offer(self, version: int) -> Offer:
        self._weights.take(version)
        last, self._last = self._last, None  # until this version is written, `_held` matches no version on disk
        is_snapshot = last is None or last.version == version or self._deltas + 1 >= self._full_every
        blocks = self._advance(0 if is_snapshot else self._weights.num_bytes)
        digest = digest_of_weights(self._digests)
        if last != Base(version, digest) or not is_sound(self._writer.folder, version):
            self._write(version, digest, None if blocks is None else last, blocks or {})
        self._last = Base(version, digest)
        self._writer.keep(self._keep)
        where = {"folder": str(self._writer.folder), "digest": digest}
        return Offer(NAME, version, self._weights.specs, where)

    def _advance(self, room: int) -> dict[str, list[tuple[Block, bytes]]] | None:
        """Bring the held copy to the current weights; return the changes, or None if they take `room` bytes or more."""
        changes: dict[str, list[tuple[Block, bytes]]] = {}
        for name in self._weights.specs:
            new = converted(self._weights, name)
            if name not in self._held:
                self._held[name] = torch.empty_like(new)
            held = self._held[name]
            if room > 0:
                changes[name] = encode(held, new)
                room -= sum(len(data) for _, data in changes[name])
                if room <= 0:
                    changes.clear()
            if room <= 0 or changes[name]:
                held.copy_(new)
                self._digests[name] = digest_of(held)
        return changes if room > 0 else None

    def _write(
        self, version: int, digest: str, base: Base | None, changes: dict[str, list[tuple[Block, bytes]]]
    ) -> None:
        def write(folder: Path) -> str:
            if base is None:
                shard_source = iter(self._held.items())
                return write_shards(folder, shard_source, self._weights.specs, self._max_shard_bytes)
            blocks = {name: [astuple(block) for block, _ in found] for name, found in changes.items() if found}
            data = bytearray(b"".join(data for found in changes.values() for _, data in found))
            payload = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
            save_file(
                {"payload": payload}, folder / FILE, metadata={"blocks": json.dumps(blocks, separators=(",", ":"))}
            )
            return digest

        size = sum(len(data) for found in changes.values() for _, data in found)
        self._writer.write(version, write, self._weights.num_bytes if base is None else size, base)
        self._deltas = 0 if base is None else self._deltas + 1

    def deliver(self) -> None:
        """Do nothing: the files hold everything."""

    def close(self) -> None:
        self._held.clear()
        self._last = None
        self._writer.close()


class DeltaReceiver:
    """The engine's end: checks the chain of versions, then applies it to the engine's weights in place."""

    def __init__(self, served: ServedWeights):
        self.served = served

    def receive(self, offer: Offer) -> None:
        served = self.served
        served.check(offer, NAME)
        folder, newest = find(offer)
        is_whole = served.torn is None and served.version is not None
        if is_whole and served.version == offer.version and digest_of_tensors(served.tensors) == newest.digest:
            return
        chain = self._chain(folder, newest)
        files = [check_files(folder, manifest) for manifest in chain]  # checked before anything changes
        with ExitStack() as stack:
            snapshot = None if chain[0].base is not None else open_shards(files.pop(0), offer.specs, stack)
            with served.writing(offer.version):
                if snapshot is not None:
                    served.copy(snapshot)
                for paths in files:
                    spread(lambda part: apply(part[1], part[2], served.tensors[part[0]]), _read_delta(paths))
                found = digest_of_tensors(served.tensors)
                if found != newest.digest:
                    raise EngineError(
                        f"version {offer.version} has digest {found} after the update, expected {newest.digest}; "
                        "the next update starts at the last whole snapshot"
                    )

    def _chain(self, folder: Path, newest: Manifest) -> list[Manifest]:
        """Return the versions to apply, oldest first: those after the engine's own, or from the last snapshot on."""
        chain = [newest]
        while (base := chain[0].base) is not None:
            if self.served.torn is None and self.served.version == base.version:
                found = digest_of_tensors(self.served.tensors)
                if found != base.digest:
                    raise EngineError(
                        f"version {chain[0].version} builds on version {base.version} with digest {base.digest}, the "
                        f"engine's version {base.version} has {found}; restart the engine or wait for a whole snapshot"
                    )
                break
            chain.insert(0, read_manifest(folder, base.version))
            if chain[0].digest != base.digest:
                raise EngineError(
                    f"version {chain[1].version} builds on a version {base.version} that is not in {folder}"
                )
        return chain

    def close(self) -> None:
        """Do nothing: files are open during an update only."""


def _read_delta(paths: list[Path]) -> Iterator[tuple[str, Block, memoryview]]:
    """Yield the changed blocks of a delta's only file, each with the name of its weight and its compressed bytes."""
    (path,) = paths
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            entries = json.loads(file.metadata()["blocks"])
            data = as_bytes(file.get_tensor("payload")).numpy().data
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise EngineError(f"{path} is damaged ({error})") from error
    at = 0
    for name, found in entries.items():
        for start, count, num_changed, gap_bytes, planes in found:
            size = sum(planes)
            yield name, Block(start, count, num_changed, gap_bytes, tuple(planes)), data[at : at + size]
            at += size


TRANSPORT = Transport(
    NAME, lambda weights, plan: DeltaSender(weights, plan.folder), DeltaReceiver, holds_everything=True
)
