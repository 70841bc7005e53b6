"""Weights through safetensors files on a disk that trainer and engines share; each version has all weights, in shards.

A version folder has the index file of a sharded Hugging Face model, so that anything that loads one can read it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from treadle.errors import EngineError
from treadle.weights.base import Offer, WeightSpec, check_specs
from treadle.weights.served_weights import SentWeights, ServedWeights
from treadle.weights.tensor_layout import as_bytes
from treadle.weights.transport import Transport
from treadle.weights.version_folders import Manifest, VersionWriter, check_files, file_paths, read_manifest

NAME = "disk"
INDEX = "model.safetensors.index.json"


class DiskSender:
    """The trainer's end: writes a folder for each version and keeps the newest `keep` of them."""

    def __init__(self, weights: SentWeights, folder: Path, *, max_shard_bytes: int = 1 << 30, keep: int = 2):
        self._weights = weights
        self._writer = VersionWriter(folder)
        self._max_shard_bytes, self._keep = max_shard_bytes, keep

    def offer(self, version: int) -> Offer:
        self._weights.take(version)

        def write(folder: Path) -> str:
            tensors = ((name, converted(self._weights, name)) for name in self._weights.specs)
            return write_shards(folder, tensors, self._weights.specs, self._max_shard_bytes)

        manifest = self._writer.write(version, write, self._weights.num_bytes)
        self._writer.keep(self._keep)
        where = {"folder": str(self._writer.folder), "digest": manifest.digest}
        return Offer(NAME, version, self._weights.specs, where)

    def deliver(self) -> None:
        """Do nothing: the files hold everything."""

    def close(self) -> None:
        self._writer.close()


class DiskReceiver:
    """The engine's end: checks every file, then copies the weights."""

    def __init__(self, served: ServedWeights):
        self.served = served

    def receive(self, offer: Offer) -> None:
        self.served.check(offer, NAME)
        with open_offered(offer) as tensors:
            self.served.copy_from(tensors, offer.version)

    def close(self) -> None:
        """Do nothing: files are open during an update only."""


def find(offer: Offer) -> tuple[Path, Manifest]:
    """Return folder and manifest of the offered version; raise `EngineError` if its number now has other weights."""
    folder = Path(str(offer.where.get("folder")))
    manifest = read_manifest(folder, offer.version)
    if manifest.digest != offer.where.get("digest"):
        raise EngineError(f"version {offer.version} in {folder} is not the one that was offered; push it again")
    return folder, manifest


@contextmanager
def open_offered(offer: Offer, *, verify: bool = True) -> Iterator[dict[str, Tensor]]:
    """Map the offered weights from their files while inside; `verify` compares the files' checksums too."""
    folder, manifest = find(offer)
    paths = check_files(folder, manifest) if verify else file_paths(folder, manifest)
    with ExitStack() as stack:
        yield open_shards(paths, offer.specs, stack)


def converted(weights: SentWeights, name: str) -> Tensor:
    """Return a weight as it is sent: in the engine's dtype, contiguous, on the CPU."""
    return weights[name].to("cpu", weights.specs[name].dtype).contiguous()


def write_shards(
    folder: Path, tensors: Iterator[tuple[str, Tensor]], specs: Mapping[str, WeightSpec], max_shard_bytes: int
) -> str:
    """Write safetensors files and their index; return the digest of the weights.

    One shard at a time is in memory.

    Args:
        folder: where the files go.
        tensors: the weights with their names, contiguous, on the CPU, in the order of `specs`.
        specs: their shapes and dtypes.
        max_shard_bytes: size of a shard; a larger weight has a shard of its own.
    """
    shards = split_by_size(specs, max_shard_bytes)
    files: dict[str, str] = {}
    digests: dict[str, str] = {}
    for i, names in enumerate(shards, start=1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        shard = _apart(dict(next(tensors) for _ in names))
        digests.update((name, digest_of(tensor)) for name, tensor in shard.items())
        save_file(shard, folder / file, metadata={"format": "pt"})
        files.update(dict.fromkeys(names, file))
    total = sum(spec.num_bytes for spec in specs.values())
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": files}))
    return digest_of_weights(digests)


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with memory of their own: of weights tied under two names, all but the first are copies."""
    seen: set[int] = set()
    for name, tensor in tensors.items():
        if tensor.data_ptr() in seen:
            tensors[name] = tensor.clone()
        seen.add(tensor.data_ptr())
    return tensors


def split_by_size(specs: Mapping[str, WeightSpec], max_bytes: int) -> list[list[str]]:
    """Split the names, in order, into parts of at most `max_bytes`; a larger weight is a part of its own."""
    parts: list[list[str]] = [[]]
    size = 0
    for name, spec in specs.items():
        if parts[-1] and size + spec.num_bytes > max_bytes:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += spec.num_bytes
    return parts


def open_shards(paths: list[Path], specs: Mapping[str, WeightSpec], stack: ExitStack) -> dict[str, Tensor]:
    """Map the weights of a version from its files; raise `EngineError` if they are not the offered ones."""
    tensors: dict[str, Tensor] = {}
    for path in paths:
        if path.suffix != ".safetensors":
            continue
        try:
            file = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            tensors.update((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise EngineError(f"{path} is damaged ({error})") from error
    check_specs({name: WeightSpec.of(tensor) for name, tensor in tensors.items()}, specs)
    return tensors


def digest_of(tensor: Tensor) -> str:
    """Return the xxh3-64 of a weight's bytes, which is the same on every device."""
    return xxhash.xxh3_64_hexdigest(as_bytes(tensor.detach().to("cpu").contiguous()).numpy().data)


def digest_of_weights(digests: Mapping[str, str]) -> str:
    """Return one digest of all weights from the digest of each; their order does not matter."""
    return xxhash.xxh3_128_hexdigest(json.dumps(sorted(digests.items())).encode())


def digest_of_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return the digest of all weights as they are now."""
    with torch.no_grad():
        return digest_of_weights({name: digest_of(tensor) for name, tensor in tensors.items()})


TRANSPORT = Transport(NAME, lambda weights, plan: DiskSender(weights, plan.folder), DiskReceiver, holds_everything=True)
