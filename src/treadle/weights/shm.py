"""Weights through a mapped file in shared memory: trainer and engines on the same machine.

    <folder>/treadle-weights-XXXX/     mode 0700, one for each sender; removed on close, or when the next sender starts
        lock                           locked while the sender lives: an unlocked folder is left from a crash
        0/model.safetensors, 1/…       slots, mode 0600: a header of whole pages, then all weights

A slot is a safetensors file, alone in its folder, so that an engine can load it as it loads any model.

Slots are written in turn and their pages are used again, so only the first pushes allocate memory. The sender locks
a slot to write it. A reader holds a shared lock for as long as any tensor of its view lives, and a slot that is being
read is skipped. The newest complete version therefore stays readable while the next is written. Two slots are enough
if readers release each version before the next push.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treadle.errors import EngineError
from treadle.storage.folder_lock import try_lock, unlock
from treadle.weights.base import SAFETENSORS_NAMES, Offer
from treadle.weights.parallel_copy import digest
from treadle.weights.served_weights import SentWeights, ServedWeights
from treadle.weights.tensor_layout import Layout
from treadle.weights.transport import Transport

NAME = "shm"
PREFIX = "treadle-weights-"
FILE = "model.safetensors"
LENGTH_BYTES = 8  # of the header's length, at the start of every safetensors file
GIB = 2**30


@dataclass(eq=False)
class _Slot:
    path: Path
    size: int
    descriptor: int = -1
    memory: mmap.mmap | None = field(default=None, repr=False)

    def open(self) -> None:
        """Create the file and reserve memory for all of it, so that a full file system is an error, not a SIGBUS."""
        self.path.parent.mkdir(mode=0o700)
        self.descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            _reserve(self.descriptor, self.path.parent, self.size)
        except OSError as error:
            self.remove()
            raise EngineError(_no_room(self.path.parent.parent, self.size, error)) from error
        self.memory = mmap.mmap(self.descriptor, self.size)

    def is_read(self) -> bool:
        """Return True if a reader holds the slot; if not, the sender holds it now."""
        return not try_lock(self.descriptor)

    def release(self) -> None:
        """Let readers in again."""
        unlock(self.descriptor)

    def remove(self) -> None:
        """Remove the file. Readers keep their maps; the memory is freed with the last of them."""
        shutil.rmtree(self.path.parent, ignore_errors=True)
        os.close(self.descriptor)
        self.memory = None


class ShmSender:
    """The trainer's end: owns the folder and writes each version into a slot."""

    def __init__(self, weights: SentWeights, folder: Path | None = None):
        self._weights = weights
        self._layout = Layout.dense(weights.specs)
        base = folder or default_folder()
        remove_abandoned(base)
        self._folder, self._lock = _make_folder(base)
        self._header_bytes = _pages(len(_header(self._layout, 2**63, 0, "f" * 32)))
        self._slots: list[_Slot] = []
        self._newest: _Slot | None = None
        self._made = 0

    def offer(self, version: int) -> Offer:
        self._weights.take(version)
        slot = self._free_slot()
        try:
            assert slot.memory is not None
            slot.memory[:LENGTH_BYTES] = bytes(LENGTH_BYTES)  # no header: what follows is half-written
            flat = torch.frombuffer(slot.memory, dtype=torch.uint8)[self._header_bytes :]
            checksum = self._weights.copy_to(self._layout.views(flat))
            header = _header(self._layout, version, self._header_bytes, checksum)
            slot.memory[LENGTH_BYTES : len(header)] = header[LENGTH_BYTES:]
            slot.memory[:LENGTH_BYTES] = header[:LENGTH_BYTES]
        finally:
            slot.release()
        self._newest = slot
        where = {"path": str(slot.path), "digest": checksum}
        return Offer(NAME, version, self._weights.specs, where)

    def _free_slot(self) -> _Slot:
        """Return a slot that is not being read and is not the newest, locked for writing."""
        for slot in self._slots:
            if slot is not self._newest and not slot.is_read():
                return slot
        slot = _Slot(self._folder / str(self._made) / FILE, self._header_bytes + self._layout.num_bytes)
        slot.open()
        self._made += 1
        self._slots.append(slot)
        if slot.is_read():
            raise AssertionError(f"the new slot {slot.path} is locked by another process")
        return slot

    def deliver(self) -> None:
        """Free the spare slots that slow readers made necessary; the offer holds everything."""
        for slot in self._slots[2:]:
            if slot is not self._newest and not slot.is_read():
                slot.remove()
                self._slots.remove(slot)

    def close(self) -> None:
        for slot in self._slots:
            slot.remove()
        self._slots.clear()
        if self._lock >= 0:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


class ShmReceiver:
    """The engine's end: maps the offered file, checks it and copies it into the engine's weights."""

    def __init__(self, served: ServedWeights):
        self.served = served

    def receive(self, offer: Offer) -> None:
        self.served.check(offer, NAME)
        self.served.copy_from(map_offer(offer), offer.version)

    def close(self) -> None:
        """Do nothing: the map of each update is freed with its tensors."""


def map_offer(offer: Offer, *, verify: bool = True) -> dict[str, Tensor]:
    """Return the offered weights without a copy, as tensors in the sender's file.

    The file does not change while any of them lives, even after the sender has ended, because the map holds the slot's
    lock. Writing to a tensor changes a private copy of that page.

    Args:
        offer: the offer of a `ShmSender`.
        verify: compare the bytes with their checksum too.
    Raises:
        EngineError: if the file does not hold the complete version: its header, which is written last, differs, or the
            bytes do not match their checksum.
    """
    path = Path(str(offer.where.get("path")))
    layout = Layout.dense(offer.specs)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise EngineError(
            f"version {offer.version} is not at {path} ({error.strerror}); is the trainer gone?"
        ) from error
    try:
        if not try_lock(descriptor, shared=True):
            raise EngineError(
                f"{path} is being overwritten, so version {offer.version} is gone; receive the next version"
            )
        size = os.fstat(descriptor).st_size
        start = size - layout.num_bytes
        if start <= 0:
            raise EngineError(f"{path} has {size} bytes, version {offer.version} needs {layout.num_bytes}")
        # The map keeps a duplicate of the descriptor, and with it the lock, until its last tensor is freed.
        memory = mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    expected = _header(layout, offer.version, start, str(offer.where.get("digest")))
    if bytes(memory[: len(expected)]) != expected:
        raise EngineError(
            f"{path} does not hold version {offer.version} whole; its header differs from the offered one"
        )
    views = layout.views(flat[start:])
    if verify and digest(views.values()) != offer.where["digest"]:
        raise EngineError(f"{path} is damaged: the bytes of version {offer.version} do not match their checksum")
    return views


def default_folder() -> Path:
    """Return the folder of shared memory if the machine has one, else the folder for temporary files."""
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def remove_abandoned(base: Path) -> int:
    """Remove the folders in `base` of senders that crashed, and return their number. Live senders hold their lock."""
    removed = 0
    for folder in base.glob(PREFIX + "*"):
        try:
            if folder.stat().st_uid != os.getuid():
                continue
            descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # another sender is creating or removing it
            continue
        try:
            if try_lock(descriptor):
                shutil.rmtree(folder, ignore_errors=True)
                removed += 1
        finally:
            os.close(descriptor)
    return removed


def _make_folder(base: Path) -> tuple[Path, int]:
    try:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        descriptor = os.open(folder / "new", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise EngineError(f"{base} can't be written ({error.strerror}); give another folder for weights") from error
    try_lock(descriptor)
    os.rename(folder / "new", folder / "lock")  # locked before another sender can find it and remove it as abandoned
    return folder, descriptor


def _reserve(descriptor: int, folder: Path, size: int) -> None:
    if sys.platform == "linux":
        os.posix_fallocate(descriptor, 0, size)
    else:  # macOS has no such call, so only the free space is compared
        if shutil.disk_usage(folder).free < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.ftruncate(descriptor, size)


def _header(layout: Layout, version: int, size: int, checksum: str) -> bytes:
    """Return the header of a slot, padded to `size`.

    Both ends can write it, so a reader compares and never parses it.
    """
    fields: dict[str, Any] = {
        "__metadata__": {"format": "pt", "treadle": "1", "version": str(version), "xxh3": checksum},
        **{
            name: {
                "dtype": SAFETENSORS_NAMES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [layout.offsets[name], layout.offsets[name] + spec.num_bytes],
            }
            for name, spec in layout.specs.items()
        },
    }
    text = json.dumps(fields).encode()
    text += b" " * (size - LENGTH_BYTES - len(text))
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _no_room(folder: Path, size: int, error: OSError) -> str:
    if error.errno != errno.ENOSPC:
        return f"{folder} can't hold weights ({error.strerror}); give another folder"
    free = shutil.disk_usage(folder).free
    return (
        f"{folder} has {free / GIB:.2f} GiB free, one version of the weights needs {size / GIB:.2f} GiB and two are "
        "kept; free some space, enlarge it (Docker: --shm-size) or give another folder"
    )


TRANSPORT = Transport(
    NAME, lambda weights, plan: ShmSender(weights), ShmReceiver, needs_one_node=True, holds_everything=True
)
