"""Weights by handles to the trainer's GPU memory: trainer and engine are two processes on the same GPU.

The trainer copies nothing if a weight already has the engine's dtype; others are converted into memory that is held
until `deliver`. Handles travel as JSON (base64), not as pickles. The trainer must not change its weights between
`offer` and `deliver`, and calls `deliver` after all engines have received. For servers that read only torch's own
pickles of shared tensors, their client makes the pickle from the offer.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from treadle.errors import EngineError
from treadle.weights.base import Offer, WeightSpec
from treadle.weights.served_weights import SentWeights, ServedWeights
from treadle.weights.transport import Transport

NAME = "cuda_ipc"
Reduced = tuple[Callable[..., Any], tuple[Any, ...]]


class CudaIpcSender:
    """The trainer's end: shares handles of its own tensors."""

    def __init__(self, weights: SentWeights):
        self._weights = weights
        self._held: dict[str, Tensor] = {}

    def offer(self, version: int) -> Offer:
        self._weights.take(version)
        self._held = {
            name: self._weights[name].to(spec.dtype).contiguous() for name, spec in self._weights.specs.items()
        }
        on_cpu = next((name for name, tensor in self._held.items() if not tensor.is_cuda), None)
        if on_cpu is not None:
            raise EngineError(
                f"weight {on_cpu!r} is not on a GPU; cuda_ipc needs all of them there, shm takes CPU memory"
            )
        devices = {tensor.device for tensor in self._held.values()}
        for device in devices:
            torch.cuda.synchronize(device)
        where = {
            "gpus": {str(device.index): str(torch.cuda.get_device_properties(device).uuid) for device in devices},
            "handles": {name: _share(tensor) for name, tensor in self._held.items()},
        }
        return Offer(NAME, version, self._weights.specs, where)

    def deliver(self) -> None:
        """Free the converted weights, which all engines have copied."""
        self._held.clear()

    def close(self) -> None:
        self._held.clear()
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()


class CudaIpcReceiver:
    """The engine's end: opens the handles, copies on the GPU and closes them."""

    def __init__(self, served: ServedWeights):
        self.served = served

    def receive(self, offer: Offer) -> None:
        self.served.check(offer, NAME)
        opened = open_handles(offer)
        with self.served.writing(offer.version):
            self.served.copy(opened)
            for device in {tensor.device for tensor in opened.values() if tensor.is_cuda}:
                torch.cuda.synchronize(device)  # the trainer may change its memory once this returns

    def close(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()


def open_handles(offer: Offer) -> dict[str, Tensor]:
    """Return the offered weights in the trainer's own memory; release them before the trainer continues."""
    try:
        return {
            name: _open(offer.where["handles"][name], offer.where["gpus"], spec) for name, spec in offer.specs.items()
        }
    except EngineError:
        raise
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise EngineError(f"a GPU handle of version {offer.version} can't be opened: {error}") from error


def pickled_handles(offer: Offer) -> bytes:
    """Return a pickle of all offered weights, names with tensors, which opens the handles when it is unpickled.

    No GPU is needed here. A GPU is named by its UUID, as in SGLang, because processes may number GPUs differently.
    """
    where = offer.where
    try:
        found = [
            (name, _Pickled(*reduced(where["handles"][name], where["gpus"], s))) for name, s in offer.specs.items()
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(f"version {offer.version} is not offered by GPU handles: {error!r}") from error
    return bytes(ForkingPickler.dumps(found))


def reduced(shared: Mapping[str, Any] | None, gpus: Mapping[str, str], spec: WeightSpec) -> Reduced:
    """Return the call that opens a handle as a tensor, as `reduce_tensor` returns it in the trainer's process."""
    stride = torch.empty(spec.shape, device="meta").stride()
    if shared is None:
        return reduce_tensor(torch.empty(spec.shape, dtype=spec.dtype))
    gpu, handle, size, at, *counter_and_event = _parts(shared)
    tensor = (Tensor, spec.shape, stride, int(shared["offset"]), torch.storage.TypedStorage, spec.dtype)
    return rebuild_cuda_tensor, (*tensor, gpus[str(gpu)], handle, size, at, False, *counter_and_event)


class _Pickled:
    """An object that is pickled as a call."""

    def __init__(self, call: Callable[..., Any], arguments: tuple[Any, ...]):
        self._reduced = call, arguments

    def __reduce__(self) -> Reduced:
        return self._reduced


def _parts(shared: Mapping[str, Any]) -> list[Any]:
    return [base64.b64decode(part["b"]) if isinstance(part, dict) else part for part in shared["handle"]]


def _share(tensor: Tensor) -> dict[str, Any] | None:
    """Return the eight parts of torch's handle of a CUDA storage, bytes as base64.

    None for a tensor without elements.
    """
    if not tensor.numel():
        return None
    parts = tensor.untyped_storage()._share_cuda_()
    words = [{"b": base64.b64encode(p).decode()} if isinstance(p, bytes) else p for p in parts]
    return {"handle": words, "offset": tensor.storage_offset()}


def _open(shared: Mapping[str, Any] | None, gpus: Mapping[str, str], spec: WeightSpec) -> Tensor:
    if shared is None:
        return torch.empty(spec.shape, dtype=spec.dtype)
    parts = _parts(shared)
    parts[0] = _same_gpu(gpus[str(parts[0])])  # the two processes may number the machine's GPUs differently
    torch.cuda.init()
    storage = torch.UntypedStorage._new_shared_cuda(*parts)
    flat = torch.empty(0, dtype=spec.dtype, device=storage.device)
    return flat.set_(storage, int(shared["offset"]), spec.shape, torch.empty(spec.shape, device="meta").stride())


def _same_gpu(uuid: str) -> int:
    found = [i for i in range(torch.cuda.device_count()) if str(torch.cuda.get_device_properties(i).uuid) == uuid]
    if not found:
        raise EngineError(f"the trainer's weights are on GPU {uuid}, which this engine does not see; use broadcast")
    return found[0]


TRANSPORT = Transport(
    NAME,
    lambda weights, plan: CudaIpcSender(weights),
    CudaIpcReceiver,
    needs_one_node=True,
    needs_gpu=True,
    delivers_after=True,
)
