"""Weights, masters and optimizer state out of the accelerator while others need its memory, and back, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class HostCopies:
    """Memory of tensors that was moved to the host. The tensors stay the same objects; asleep, they have no memory.

    Tensors that share memory are moved once. Host buffers are kept for the next time.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, int], Tensor] = {}  # by the order of storages and their size
        self._asleep: list[tuple[torch.UntypedStorage, Tensor]] = []

    @property
    def is_asleep(self) -> bool:
        return bool(self._asleep)

    def sleep(self, tensors: Iterable[Tensor], *, force: bool = False) -> int:
        """Move what is on an accelerator to the host; returns the bytes freed. `force` moves CPU tensors as well."""
        assert not self._asleep, "asleep already"
        found: dict[int, tuple[torch.UntypedStorage, torch.device]] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() and (force or tensor.device.type != "cpu"):
                assert storage.resizable(), "memory that a file is mapped into can't be freed"
                found[storage.data_ptr()] = storage, tensor.device
        freed = 0
        for place, (storage, device) in enumerate(found.values()):
            host = self._buffer(place, storage.nbytes(), pinned=device.type == "cuda")
            host.copy_(_bytes(storage, device), non_blocking=True)
            freed += storage.nbytes()
            self._asleep.append((storage, host))
        _wait(device for _, device in found.values())
        for storage, _ in self._asleep:
            storage.resize_(0)
        if torch.cuda.is_available() and any(device.type == "cuda" for _, device in found.values()):
            torch.cuda.empty_cache()
        return freed

    def wake(self) -> int:
        """Move everything back to where it was; returns the bytes taken."""
        taken = 0
        devices = []
        for storage, host in self._asleep:
            storage.resize_(host.numel())
            _bytes(storage, storage.device).copy_(host, non_blocking=True)
            taken += host.numel()
            devices.append(storage.device)
        _wait(devices)
        self._asleep = []
        return taken

    def _buffer(self, place: int, size: int, pinned: bool) -> Tensor:
        if (place, size) not in self._buffers:
            self._buffers[place, size] = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        return self._buffers[place, size]


def _bytes(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _wait(devices: Iterable[torch.device]) -> None:
    for device in {device for device in devices if device.type == "cuda"}:
        torch.cuda.synchronize(device)
