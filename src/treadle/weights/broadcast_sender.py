"""What all broadcasts share. The sender: open the rendezvous, count the offers, and leave the group if a step fails.

What differs (how the group is made, what a bucket is) is a `BroadcastGroup` in each broadcast's own file.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from traceback import clear_frames
from typing import Any, Protocol

import torch
import torch.distributed as dist

from treadle.errors import EngineError
from treadle.weights.base import Offer
from treadle.weights.rendezvous import open_rendezvous
from treadle.weights.served_weights import SentWeights


class RefusedOffer(EngineError):
    """An engine refused an offer; nothing was sent."""


class BroadcastGroup(Protocol):
    """Rank 0's part in the groups of one rendezvous."""

    def send(self, offer: Offer, weights: SentWeights) -> None:
        """Send the offered weights once all ranks are ready.

        Raises `RefusedOffer` if one is not, `RuntimeError` or `OSError` if one died or is late.
        """
        ...


@dataclass(frozen=True)
class BroadcastKind:
    """What differs between broadcasts: the name in offers, and how rank 0's part at a rendezvous is opened."""

    name: str
    open_group: Callable[[dist.Store, Offer, torch.device], BroadcastGroup]


class BroadcastSender:
    """The trainer's end of a broadcast, rank 0.

    Args:
        kind: which broadcast it is.
        weights: what is sent.
        num_receivers: ranks that receive; an engine that is divided among GPUs has one for each.
        host: this machine's address as the engines reach it.
        bucket_bytes: size of a bucket.
        timeout_seconds: deadline of each step.
        device: where buckets are; by default the current GPU with nccl, else the CPU.
    """

    def __init__(
        self,
        kind: BroadcastKind,
        weights: SentWeights,
        num_receivers: int,
        *,
        host: str = "127.0.0.1",
        backend: str = "gloo",
        bucket_bytes: int = 64 << 20,
        timeout_seconds: float = 120.0,
        device: torch.device | None = None,
    ):
        self._kind, self._weights = kind, weights
        self._fixed: dict[str, Any] = {
            "host": host,
            "receivers": num_receivers,
            "backend": backend,
            "bucket_bytes": bucket_bytes,
            "timeout_seconds": timeout_seconds,
        }
        self._device = device or torch.device("cuda" if backend == "nccl" else "cpu")
        self._store: dist.TCPStore | None = None
        self._where: dict[str, Any] = {}
        self._offered: Offer | None = None
        self._group: BroadcastGroup | None = None

    def offer(self, version: int) -> Offer:
        self._weights.take(version)
        if self._store is None:
            timeout = timedelta(seconds=self._fixed["timeout_seconds"])
            self._store = open_rendezvous(self._fixed["host"], 0, timeout)
            self._where = {**self._fixed, "rendezvous": uuid.uuid4().hex, "port": self._store.port, "number": 0}
        self._where = {**self._where, "number": self._where["number"] + 1}
        self._offered = Offer(self._kind.name, version, self._weights.specs, self._where)
        return self._offered

    def deliver(self) -> None:
        offer, self._offered = self._offered, None
        assert offer is not None, "offer first"
        assert self._store is not None, "offer first"
        try:
            if self._group is None:
                self._group = self._kind.open_group(self._store, offer, self._device)
            self._group.send(offer, self._weights)
        except RefusedOffer:
            raise
        except (RuntimeError, OSError) as error:
            clear_frames(error.__traceback__)  # they would keep the group alive, and the engines waiting for it
            self.close()
            raise EngineError(
                f"version {offer.version} did not reach all {self._fixed['receivers']} ranks of the engines in "
                f"{self._fixed['timeout_seconds']:g} s a step: {one_line(error)}"
            ) from error

    def close(self) -> None:
        """Leave the group and the rendezvous; the next offer opens new ones."""
        self._group = self._store = None


@contextmanager
def entering(offer: Offer, refusal: EngineError | None, leave: Callable[[], None]) -> Iterator[None]:
    """Enter a receiver into the rendezvous of an offer inside; every failure is an `EngineError`.

    If another rank refused, this rank's own `refusal` is raised instead. If the group broke, `leave` is called.
    """
    try:
        yield
    except RefusedOffer as error:
        raise refusal or error from None
    except (RuntimeError, OSError) as error:
        leave()
        raise EngineError(one_line(error)) from error
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(f"this offer names no rendezvous ({error!r}): {dict(offer.where)}") from error


def one_line(error: BaseException) -> str:
    """Return the error's text in one line."""
    return " ".join(str(error).split())[:400]
