"""Offload weights, master weights and optimizer state to the host while others need the accelerator's memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class HostCopies:
    """Copies of tensors' memory on the host, moved back bit for bit. The tensors stay the same objects without memory.

    Tensors that share memory are moved once. Host buffers are reused.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, int], Tensor] = {}  # by the order of storages and their size
        self._asleep: list[tuple[torch.UntypedStorage, Tensor]] = []

    @property
    def is_asleep(self) -> bool:
        return bool(self._asleep)

    def sleep(self, tensors: Iterable[Tensor], *, force: bool = False) -> int:
        """Move what is on an accelerator to the host; return the bytes freed. `force` moves CPU tensors as well."""
        assert not self._asleep, "asleep already"
        found: dict[int, torch.UntypedStorage] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() and (force or tensor.device.type != "cpu"):
                assert storage.resizable(), "memory that a file is mapped into can't be freed"
                found[storage.data_ptr()] = storage
        for place, storage in enumerate(found.values()):
            size = storage.nbytes()
            if (place, size) not in self._buffers:
                pinned = storage.device.type == "cuda"
                self._buffers[place, size] = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
            host = self._buffers[place, size]
            host.copy_(_bytes(storage), non_blocking=True)
            self._asleep.append((storage, host))
        self._wait()
        for storage, _ in self._asleep:
            storage.resize_(0)
        if any(storage.device.type == "cuda" for storage, _ in self._asleep):
            torch.cuda.empty_cache()
        return sum(host.numel() for _, host in self._asleep)

    def wake(self) -> int:
        """Move everything back to where it was; return the bytes taken."""
        for storage, host in self._asleep:
            storage.resize_(host.numel())
            _bytes(storage).copy_(host, non_blocking=True)
        self._wait()
        taken = sum(host.numel() for _, host in self._asleep)
        self._asleep = []
        return taken

    def _wait(self) -> None:
        """Wait until the copies of GPUs are done."""
        for device in {storage.device for storage, _ in self._asleep if storage.device.type == "cuda"}:
            torch.cuda.synchronize(device)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
