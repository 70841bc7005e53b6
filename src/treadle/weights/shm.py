"""Weights through one mapped file in shared memory: trainer and engines on the same machine.

    <folder>/treadle-weights-XXXX/     mode 0700, one for each sender; removed on close, or by the next sender's start
        lock                           flocked for the sender's life, so that a crash is known
        0/model.safetensors, 1/…       slots, mode 0600: a header of whole pages, then all weights

A slot is a file of safetensors, alone in its folder, so that an engine can load it with what it loads any model with.

Slots are written in turn and their pages used again, so only the first pushes pay for fresh memory. The sender locks
a slot to write it and a reader shares that lock for as long as any tensor of its view lives; a slot that somebody
reads is passed over. So the newest whole version stays readable while the next is written, and memory is twice the
weights while readers copy and let go.
"""

from __future__ import annotations

import errno
import fcntl
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
from treadle.weights.base import Offer
from treadle.weights.parallel_copy import digest
from treadle.weights.served_weights import SentWeights, ServedWeights
from treadle.weights.tensor_layout import Layout
from treadle.weights.transport import Transport

NAME = "shm"
PREFIX = "treadle-weights-"
FILE = "model.safetensors"
LENGTH_BYTES = 8  # of the header's length, at the start of every file of safetensors
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
}
"""What safetensors calls the dtypes that can be offered."""
GIB = 2**30


@dataclass(eq=False)
class _Slot:
    path: Path
    size: int
    descriptor: int = -1
    memory: mmap.mmap | None = field(default=None, repr=False)

    def open(self) -> None:
        """Create the file with memory behind every byte, so that a full file system is an error, not a SIGBUS."""
        self.path.parent.mkdir(mode=0o700)
        self.descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            _reserve(self.descriptor, self.path.parent, self.size)
        except OSError as error:
            self.remove()
            raise EngineError(_no_room(self.path.parent.parent, self.size, error)) from error
        self.memory = mmap.mmap(self.descriptor, self.size)

    def is_read(self) -> bool:
        """True where a reader holds the slot; else the sender holds it now."""
        return not _lock(self.descriptor, fcntl.LOCK_EX)

    def release(self) -> None:
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)

    def remove(self) -> None:
        """Readers keep their maps; the memory goes with the last of them."""
        shutil.rmtree(self.path.parent, ignore_errors=True)
        os.close(self.descriptor)
        self.memory = None


class ShmSender:
    """The trainer's end: owns the folder and writes one slot for each version."""

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
        """A slot that nobody reads and that is not the newest, locked for writing."""
        for slot in self._slots:
            if slot is not self._newest and not slot.is_read():
                return slot
        slot = _Slot(self._folder / str(self._made) / FILE, self._header_bytes + self._layout.num_bytes)
        slot.open()
        self._made += 1
        self._slots.append(slot)
        if slot.is_read():
            raise AssertionError(f"nobody else can know the new {slot.path}")
        return slot

    def deliver(self) -> None:
        """Nothing to do: the offer holds everything. Spare slots that slow readers left are given back."""
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
    """The engine's end: maps what is offered, checks it, copies it into the engine's weights."""

    def __init__(self, served: ServedWeights):
        self.served = served

    def receive(self, offer: Offer) -> None:
        self.served.check(offer, NAME)
        self.served.copy_from(map_offer(offer), offer.version)

    def close(self) -> None:
        """Nothing to free: the map of each update goes with its tensors."""


def map_offer(offer: Offer, *, verify: bool = True) -> dict[str, Tensor]:
    """The offered weights without a copy: tensors on the sender's file.

    They stay as they are while any of them lives: the map holds the slot's lock, also once the sender is gone. Writing
    to one changes a private copy of that page. Raises `EngineError` where the file is not the whole of that version:
    its header, written last, is another one, or, unless `verify` is off, the bytes do not match their checksum.
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
        if not _lock(descriptor, fcntl.LOCK_SH):
            raise EngineError(f"{path} is being written; version {offer.version} is gone; take the next")
        size = os.fstat(descriptor).st_size
        start = size - layout.num_bytes
        if start <= 0:
            raise EngineError(f"{path} has {size} bytes, version {offer.version} needs {layout.num_bytes}")
        # The map keeps a duplicate of the descriptor, and with it the lock, until its last tensor is gone.
        memory = mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    expected = _header(layout, offer.version, start, str(offer.where.get("digest")))
    if bytes(memory[: len(expected)]) != expected:
        raise EngineError(f"{path} does not hold version {offer.version} whole; its header is not the offered one")
    views = layout.views(flat[start:])
    if verify and digest(views.values()) != offer.where["digest"]:
        raise EngineError(f"{path} is damaged: the bytes of version {offer.version} do not match their checksum")
    return views


def default_folder() -> Path:
    """Shared memory where the machine has it, else the folder for temporary files."""
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def remove_abandoned(base: Path) -> int:
    """Delete what senders that crashed left in `base`; returns how many there were. Live senders hold their lock."""
    removed = 0
    for folder in base.glob(PREFIX + "*"):
        try:
            if folder.stat().st_uid != os.getuid():
                continue
            descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # another sender's that is just being made or removed
            continue
        try:
            if _lock(descriptor, fcntl.LOCK_EX):
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
    _lock(descriptor, fcntl.LOCK_EX)
    os.rename(folder / "new", folder / "lock")  # locked before anybody can see it and take its owner for dead
    return folder, descriptor


def _reserve(descriptor: int, folder: Path, size: int) -> None:
    if sys.platform == "linux":
        os.posix_fallocate(descriptor, 0, size)
    else:  # no such call on macOS: looking at the free space first is the next best
        if shutil.disk_usage(folder).free < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.ftruncate(descriptor, size)


def _header(layout: Layout, version: int, size: int, checksum: str) -> bytes:
    """The header of a slot, filled up to `size`. Both ends can write it, so a reader compares and never parses."""
    fields: dict[str, Any] = {
        "__metadata__": {"format": "pt", "treadle": "1", "version": str(version), "xxh3": checksum},
        **{
            name: {
                "dtype": DTYPE_NAMES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [layout.offsets[name], layout.offsets[name] + spec.num_bytes],
            }
            for name, spec in layout.specs.items()
        },
    }
    text = json.dumps(fields).encode()
    text += b" " * (size - LENGTH_BYTES - len(text))
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


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
