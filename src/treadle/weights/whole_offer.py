"""Weights that lie whole somewhere, for an engine that has its own way of loading them: what it must find, and where.

Needs torch, safetensors and xxhash only: it also runs inside servers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from treadle.errors import EngineError
from treadle.weights.base import Offer, WeightSpec
from treadle.weights.cuda_ipc import open_handles
from treadle.weights.disk import find, open_offered
from treadle.weights.shm import map_offer
from treadle.weights.version_folders import name_of

HEAD = "lm_head.weight"


@contextmanager
def opened(offer: Offer, *, verify: bool) -> Iterator[Mapping[str, Tensor]]:
    """The offered weights, mapped from where they lie; they stay there meanwhile. `verify` compares checksums too, where
    there are any."""
    if offer.transport == "disk":
        with open_offered(offer, verify=verify) as tensors:
            yield tensors
        return
    if offer.transport == "shm":
        tensors = map_offer(offer, verify=verify)
    elif offer.transport == "cuda_ipc":
        tensors = open_handles(offer)
    else:
        raise EngineError(
            f"weights are offered by {offer.transport!r}; a server takes shm, disk, broadcast and cuda_ipc"
        )
    try:
        yield tensors
    finally:
        tensors.clear()  # kept until here: with its last tensor the map lets go of the file


def folder_of(offer: Offer) -> Path:
    """Folder of safetensors that holds the offered weights and nothing else; only for offers that were opened."""
    if offer.transport == "shm":
        return Path(str(offer.where["path"])).parent
    folder, manifest = find(offer)
    return folder / name_of(manifest.version)


def expected_specs(folder: Path, dtype: torch.dtype, tied: bool) -> dict[str, WeightSpec]:
    """Names and shapes of the weights that the model folder holds, in the dtype the server computes in.

    The head of a tied model is not one of them. Raises `EngineError` where the folder has no safetensors.
    """
    index = folder / "model.safetensors.index.json"
    files = (
        sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
        if index.is_file()
        else sorted(folder.glob("*.safetensors"))
    )
    if not files:
        raise EngineError(f"{folder} has no safetensors to compare sent weights with; save the model as safetensors")
    specs: dict[str, WeightSpec] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                if not (tied and name == HEAD):
                    specs[name] = WeightSpec(tuple(file.get_slice(name).get_shape()), dtype)
    return specs
