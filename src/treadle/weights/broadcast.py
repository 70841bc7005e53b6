"""Weights broadcast from the trainer to all engines, bucket by bucket: gloo between CPUs, NCCL between GPUs.

The sender is rank 0 of a group of its own, apart from any group the trainer or the engine already has. The offer says
where the group meets; whoever receives takes the next free rank, so engines need no numbers. Before the first bucket
every rank says whether it is ready, and if one is not, all stop there. After the last bucket every rank compares a
sum of what it has. A rank that is lost in between breaks the group: engines that were being written refuse to serve,
and the next offer makes a new group.

The meeting point has no password: use it in a network where only the run's own machines reach it.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from treadle.errors import EngineError
from treadle.weights.base import Offer
from treadle.weights.copying import copy_pairs
from treadle.weights.ends import SentWeights, ServedWeights
from treadle.weights.flat import bucket_views, buckets
from treadle.weights.meeting import open_meeting

NAME = "broadcast"
READY, REFUSED = 1, 0


class BroadcastSender:
    """The trainer's end, rank 0. `host` is this machine as the engines reach it."""

    def __init__(
        self,
        weights: SentWeights,
        num_engines: int,
        *,
        host: str = "127.0.0.1",
        backend: str = "gloo",
        bucket_bytes: int = 64 << 20,
        timeout_seconds: float = 120.0,
        device: torch.device | None = None,
    ):
        self._weights = weights
        self._num_engines, self._host, self._backend = num_engines, host, backend
        self._bucket_bytes, self._timeout_seconds = bucket_bytes, timeout_seconds
        self._device = device or torch.device("cuda" if backend == "nccl" else "cpu")
        self._meeting: dict[str, Any] = {}
        self._store: dist.TCPStore | None = None
        self._group: _Group | None = None
        self._offered: int | None = None

    def offer(self, version: int) -> Offer:
        self._weights.take(version)
        if self._store is None:
            timeout = timedelta(seconds=self._timeout_seconds)
            self._store = open_meeting(self._host, 0, timeout)
            self._meeting = {
                "group": uuid.uuid4().hex,
                "host": self._host,
                "port": self._store.port,
                "size": self._num_engines + 1,
                "backend": self._backend,
                "bucket_bytes": self._bucket_bytes,
                "timeout_seconds": self._timeout_seconds,
            }
        self._offered = version
        return Offer(NAME, version, self._weights.specs, self._meeting)

    def deliver(self) -> None:
        assert self._store is not None, "offer first"
        assert self._offered is not None, "offer first"
        version, self._offered = self._offered, None
        try:
            if self._group is None:
                self._group = _Group(self._store, 0, self._meeting, self._device)
            self._group.agree(version, READY)
            total = 0
            for pieces in buckets(self._weights.specs, self._bucket_bytes):
                buffer, views = self._group.bucket(pieces, self._weights.specs)
                sources = (piece.of(self._weights[piece.name]) for piece in pieces)
                copy_pairs(zip(views, sources, strict=True))
                self._group.broadcast(buffer)
                total = _add(total, buffer)
            self._group.agree(version, READY, total)
        except _Refusal:
            raise
        except (RuntimeError, OSError) as error:
            self._leave()
            raise EngineError(
                f"version {version} did not reach all {self._num_engines} engines in {self._timeout_seconds:g} s a step: "
                f"{_line(error)}"
            ) from error

    def _leave(self) -> None:
        self._group = self._store = None

    def close(self) -> None:
        self._leave()


class BroadcastReceiver:
    """The engine's end: joins the group that an offer names, then takes each bucket as it comes."""

    def __init__(self, served: ServedWeights, device: torch.device | None = None):
        self.served = served
        self._device = device
        self._group: _Group | None = None

    def receive(self, offer: Offer) -> None:
        refusal: EngineError | None = None
        try:
            self.served.check(offer, NAME)
        except EngineError as error:  # said to the others first: they wait for this rank
            refusal = error
            if offer.transport != NAME:
                raise
        try:
            group = self._join(offer)
            group.agree(offer.version, READY if refusal is None else REFUSED)
            with self.served.writing(offer.version):
                self._take(group, offer)
        except _Refusal as error:
            raise refusal or error from None
        except (RuntimeError, OSError) as error:  # EngineError of an update that broke off is a RuntimeError too
            self._group = None
            raise EngineError(_line(error)) from error
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"this offer names no place to meet ({error!r}): {dict(offer.where)}") from error

    def _join(self, offer: Offer) -> _Group:
        if self._group is None or self._group.name != offer.where["group"]:
            meeting = offer.where
            timeout = timedelta(seconds=float(meeting["timeout_seconds"]))
            self._group = None
            store = dist.TCPStore(str(meeting["host"]), int(meeting["port"]), None, False, timeout)
            rank = store.add("joined", 1)
            if rank >= int(meeting["size"]):
                raise EngineError(f"engine number {rank} came to a broadcast for {int(meeting['size']) - 1}")
            here = (
                torch.device("cpu") if meeting["backend"] == "gloo" else next(iter(self.served.tensors.values())).device
            )
            self._group = _Group(store, rank, meeting, self._device or here)
        return self._group

    def _take(self, group: _Group, offer: Offer) -> None:
        total = 0
        for pieces in buckets(offer.specs, int(offer.where["bucket_bytes"])):
            buffer, views = group.bucket(pieces, offer.specs)
            group.broadcast(buffer)
            targets = (piece.of(self.served.tensors[piece.name]) for piece in pieces)
            copy_pairs(zip(targets, views, strict=True))
            total = _add(total, buffer)
        group.agree(offer.version, READY, total)

    def close(self) -> None:
        self._group = None


class _Refusal(EngineError):
    """A rank was not ready; nothing has been sent."""


class _Group:
    """A process group outside torch's default one, and the bucket it sends."""

    def __init__(self, store: dist.Store, rank: int, meeting: Any, device: torch.device):
        self.name = str(meeting["group"])
        self._rank, self._size, self._device = rank, int(meeting["size"]), device
        timeout = timedelta(seconds=float(meeting["timeout_seconds"]))
        backend = str(meeting["backend"])
        prefixed = dist.PrefixStore(self.name, store)
        self._store = store  # the sender's is the server, and lives as long as the group
        if backend == "gloo":
            self._group: Any = dist.ProcessGroupGloo(prefixed, rank, self._size, timeout)
        elif backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = dist.ProcessGroupNCCL(prefixed, rank, self._size, options)
        else:
            raise EngineError(f"broadcast knows the backends gloo and nccl, not {backend!r}")
        self._bucket = torch.empty(int(meeting["bucket_bytes"]), dtype=torch.uint8, device=device)

    def bucket(self, pieces: Sequence[Any], specs: Any) -> tuple[Tensor, list[Tensor]]:
        """The bytes to send for these pieces, and a flat view of them for each piece."""
        views = bucket_views(pieces, specs, self._bucket)
        end = max(view.storage_offset() * view.element_size() + view.nbytes for view in views)
        return self._bucket[: -(-end // 8) * 8], views

    def broadcast(self, buffer: Tensor) -> None:
        self._group.broadcast(buffer, 0).wait()

    def agree(self, *words: int) -> None:
        """Compare these numbers with those of all ranks; raises `EngineError` naming the first that differs."""
        mine = torch.tensor(words, dtype=torch.int64, device=self._device)
        others = [torch.empty_like(mine) for _ in range(self._size)]
        self._group.allgather([others], [mine]).wait()
        for rank, theirs in enumerate(others):
            version, state = theirs[:2].tolist()
            if state != READY:
                raise _Refusal(f"engine {rank} of {self._size - 1} refused version {words[0]}; its own error says why")
            if not torch.equal(theirs, others[0]):
                raise EngineError(
                    f"engine {rank} of {self._size - 1} has other bytes of version {version} than were sent"
                )


def _add(total: int, buffer: Tensor) -> int:
    """A running sum of all bytes sent, as int64 words that wrap; cheap on every device."""
    return (total * 31 + int(buffer.view(torch.int64).sum()) + (1 << 63)) % (1 << 64) - (1 << 63)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:400]
