"""Offers whose weights can be opened all at once, for engines that load weights in their own way.

This module also runs inside servers, so it needs torch, safetensors and xxhash only.
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
    """Open the offered weights in place while inside; `verify` compares checksums too, if the transport has them."""
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
        tensors.clear()  # the map releases the file with its last tensor


def folder_of(offer: Offer) -> Path:
    """Return the folder of safetensors files that holds the offered weights only. The offer was opened before."""
    if offer.transport == "shm":
        return Path(str(offer.where["path"])).parent
    folder, manifest = find(offer)
    return folder / name_of(manifest.version)


def expected_specs(folder: Path, dtype: torch.dtype, tied: bool) -> dict[str, WeightSpec]:
    """Return names and shapes of the weights in a model folder, in the dtype that the server computes in.

    The head of a tied model is left out. Raises `EngineError` if the folder has no safetensors files.
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
