"""Where processes of a group meet, and the group that they make there.

A meeting is a store that listens on one address only; torch's own listens on all of the machine's.
"""

from __future__ import annotations

import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from treadle.errors import EngineError
from treadle.weights.base import Offer
from treadle.weights.served_weights import SentWeights

LOOPBACK = ("127.0.0.1", "localhost")


def open_meeting(host: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """The store of the process that the others come to; port 0 is any that is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, port), family=family)
    taken = listening.getsockname()[1]
    return dist.TCPStore(host, taken, None, True, timeout, wait_for_workers=False, master_listen_fd=listening.detach())


@dataclass(frozen=True)
class BroadcastPlace:
    """Rank 0 of a broadcast as the others reach it, how many they are, and how they exchange buckets with it."""

    host: str
    receivers: int
    backend: str
    bucket_bytes: int
    timeout_seconds: float

    def open(self) -> tuple[dist.TCPStore, dict[str, Any]]:
        """A new meeting, and what an offer says of it; offers count from 1 there."""
        store = open_meeting(self.host, 0, timedelta(seconds=self.timeout_seconds))
        where = {
            "meeting": uuid.uuid4().hex,
            "number": 0,
            "host": self.host,
            "port": store.port,
            "receivers": self.receivers,
            "backend": self.backend,
            "bucket_bytes": self.bucket_bytes,
            "timeout_seconds": self.timeout_seconds,
        }
        return store, where


class Offers:
    """What a sender of broadcasts offers, one at a time, and the meeting they name: a new one after `leave`.

    `store` is the meeting; who keeps it elsewhere keeps it open when an error has made the sender leave.
    """

    def __init__(self, name: str, weights: SentWeights, place: BroadcastPlace):
        self._name, self._weights, self._place = name, weights, place
        self._where: dict[str, Any] = {}
        self._offered: Offer | None = None
        self.store: dist.TCPStore | None = None

    def offer(self, version: int) -> Offer:
        self._weights.take(version)
        if self.store is None:
            self.store, self._where = self._place.open()
        self._where = {**self._where, "number": self._where["number"] + 1}
        self._offered = Offer(self._name, version, self._weights.specs, self._where)
        return self._offered

    def due(self) -> Offer:
        """The last offer, which is delivered once."""
        assert self._offered is not None, "offer first"
        offer, self._offered = self._offered, None
        return offer

    def leave(self) -> None:
        self.store = None


def come_to(where: Mapping[str, Any]) -> dist.TCPStore:
    """The store of a meeting that somebody else opened."""
    timeout = timedelta(seconds=float(where["timeout_seconds"]))
    return dist.TCPStore(str(where["host"]), int(where["port"]), None, False, timeout)


def process_group(store: dist.Store, rank: int, where: Mapping[str, Any]) -> Any:
    """A group of the offer's ranks outside torch's default one; with gloo this waits until all of them have come."""
    backend, size = str(where["backend"]), int(where["receivers"]) + 1
    timeout = timedelta(seconds=float(where["timeout_seconds"]))
    if backend == "gloo":
        return _gloo(store, rank, size, str(where["host"]), timeout)
    if backend != "nccl":
        raise EngineError(f"broadcast knows the backends gloo and nccl, not {backend!r}")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


def _gloo(store: dist.Store, rank: int, size: int, host: str, timeout: timedelta) -> Any:
    """A gloo group; on one machine it listens on loopback alone, else where GLOO_SOCKET_IFNAME or the host's name says."""
    kind: Any = dist.ProcessGroupGloo
    if host not in LOOPBACK:
        return kind(store, rank, size, timeout)
    options = kind._Options()
    options._timeout, options._devices = timeout, [kind.create_device(hostname=host)]
    return kind(store, rank, size, options)
