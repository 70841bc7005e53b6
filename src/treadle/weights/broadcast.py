"""Weights broadcast from the trainer to all engines, bucket by bucket: gloo between CPUs, NCCL between GPUs.

The sender is rank 0 of a group of its own, apart from any group the trainer or the engine already has. The offer says
where the group meets; each receiver takes the next free rank, so engines need no numbers. The group stays for the
next offer, unless it has a receiver that was not in the group: an engine that was restarted. Before the first bucket every
rank says whether it is ready, and if one is not, all stop there. After the last bucket every rank compares a sum of
what it has. A rank that is lost in between breaks the group: engines that were being written refuse to serve, and the
next offer makes a new group.

The meeting point has no password: use it in a network where only the run's own machines reach it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from traceback import clear_frames
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from treadle.errors import EngineError
from treadle.weights.base import Offer
from treadle.weights.parallel_copy import copy_pairs
from treadle.weights.rendezvous import BroadcastPlace, Offers, come_to, process_group
from treadle.weights.served_weights import SentWeights, ServedWeights
from treadle.weights.tensor_layout import Piece, bucket_views, buckets

NAME = "broadcast"
READY, REFUSED = 1, 0
NEW, SAME = "new", "same"


class BroadcastSender:
    """The trainer's end, rank 0. `host` is this machine as the engines reach it; an engine that is divided among GPUs
    receives in a process for each, and `num_receivers` counts those."""

    def __init__(
        self,
        weights: SentWeights,
        num_receivers: int,
        *,
        host: str = "127.0.0.1",
        backend: str = "gloo",
        bucket_bytes: int = 64 << 20,
        timeout_seconds: float = 120.0,
        device: torch.device | None = None,
    ):
        self._weights = weights
        self._place = BroadcastPlace(host, num_receivers, backend, bucket_bytes, timeout_seconds)
        self._device = device or torch.device("cuda" if backend == "nccl" else "cpu")
        self._offers = Offers(NAME, weights, self._place)
        self._meeting: _Meeting | None = None

    def offer(self, version: int) -> Offer:
        return self._offers.offer(version)

    def deliver(self) -> None:
        offer = self._offers.due()
        if self._meeting is None:
            assert self._offers.store is not None, "offer first"
            self._meeting = _Meeting(offer.where["meeting"], self._offers.store, self._device)
        try:
            self._send(self._meeting, offer)
        except _Refusal:
            raise
        except (RuntimeError, OSError) as error:
            clear_frames(
                error.__traceback__
            )  # they would keep the group, and the engines wait until its end or a deadline
            self._leave()
            raise EngineError(
                f"version {offer.version} did not reach all {self._place.receivers} engines in "
                f"{self._place.timeout_seconds:g} s a step: {_line(error)}"
            ) from error

    def _send(self, meeting: _Meeting, offer: Offer) -> None:
        group, total = meeting.group(offer.where, receives=False), 0
        group.agree(offer.version, READY)
        for pieces in buckets(offer.specs, self._place.bucket_bytes):
            buffer, views = group.bucket(pieces, offer.specs)
            sources = (piece.of(self._weights[piece.name]) for piece in pieces)
            copy_pairs(zip(views, sources, strict=True))
            group.broadcast(buffer)
            total = _add(total, buffer)
        group.agree(offer.version, READY, total)

    def _leave(self) -> None:
        self._meeting = None
        self._offers.leave()

    def close(self) -> None:
        self._leave()


class BroadcastReceiver:
    """The engine's end: joins the group that an offer names, then takes each bucket as it comes."""

    def __init__(self, served: ServedWeights, device: torch.device | None = None):
        self.served = served
        self._device = device or next((tensor.device for tensor in served.tensors.values()), torch.device("cpu"))
        self._intake = BroadcastIntake()

    def receive(self, offer: Offer) -> None:
        refusal: EngineError | None = None
        try:
            self.served.check(offer, NAME)
        except EngineError as error:
            refusal = error
            if offer.transport != NAME:
                raise
        self._intake.enter(offer, self._device, refusal)
        with self.served.writing(offer.version):
            for bucket in self._intake.buckets(offer):
                copy_pairs((piece.of(self.served.tensors[piece.name]), view) for piece, view in bucket)

    def close(self) -> None:
        self._intake.leave()


class BroadcastIntake:
    """A receiving rank's part in a group, whatever it does with the weights: `enter`, then `buckets` or `weights`."""

    def __init__(self) -> None:
        self._meeting: _Meeting | None = None
        self._entered: _Group | None = None

    def enter(self, offer: Offer, device: torch.device, refusal: EngineError | None = None) -> None:
        """Join the offer's group and say whether this rank is ready; nothing has moved when this returns or raises.

        A rank that refuses has to come too: the others wait for it. Raises its refusal, or that another rank refused.
        """
        try:
            group = self._join(offer.where, device)
            group.agree(offer.version, READY if refusal is None else REFUSED)
            self._entered = group
        except _Refusal as error:
            raise refusal or error from None
        except (RuntimeError, OSError) as error:
            self.leave()
            raise EngineError(_line(error)) from error
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"this offer names no place to meet ({error!r}): {dict(offer.where)}") from error

    def _join(self, where: Mapping[str, Any], device: torch.device) -> _Group:
        if self._meeting is None or self._meeting.name != where["meeting"]:
            self.leave()
            here = torch.device("cpu") if where["backend"] == "gloo" else device
            self._meeting = _Meeting(where["meeting"], come_to(where), here)
        return self._meeting.group(where, receives=True)

    def buckets(self, offer: Offer) -> Iterator[list[tuple[Piece, Tensor]]]:
        """The pieces of each bucket, as views that the next one overwrites; at the end all ranks compare their sums.

        A rank that stops before the end, or an error, breaks the group: the others then fail as well.
        """
        if self._entered is None:
            raise EngineError(f"the broadcast of version {offer.version} was not entered first; push it again")
        group, self._entered, meeting, total = self._entered, None, self._meeting, 0
        try:
            for pieces in buckets(offer.specs, int(offer.where["bucket_bytes"])):
                buffer, views = group.bucket(pieces, offer.specs)
                group.broadcast(buffer)
                total = _add(total, buffer)
                yield list(zip(pieces, views, strict=True))
            group.agree(offer.version, READY, total)
        except BaseException:
            if self._meeting is meeting:
                self.leave()
            raise

    def weights(self, offer: Offer, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Each weight on `device` as soon as it is whole, in memory of its own; one at a time is being put together."""
        flat = torch.empty(0)
        for bucket in self.buckets(offer):
            for piece, view in bucket:
                spec = offer.specs[piece.name]
                if piece.start == 0:
                    flat = torch.empty(spec.num_elements, dtype=spec.dtype, device=device)
                piece.of(flat).copy_(view)
                if piece.stop == spec.num_elements:
                    yield piece.name, flat.view(spec.shape)

    def leave(self) -> None:
        self._entered = self._meeting = None


class _Refusal(EngineError):
    """A rank was not ready; nothing has been sent."""


class _Meeting:
    """The store where a sender's ranks find each other, and their group of now."""

    def __init__(self, name: str, store: dist.Store, device: torch.device):
        self.name, self._store, self._device = name, store, device
        self._group: _Group | None = None

    def group(self, where: Mapping[str, Any], *, receives: bool) -> _Group:
        """When all ranks have come: the group of the last offer, or a new one where any of them was not in it."""
        offer, receivers = f"offer-{where['number']}", int(where["receivers"])
        rank = self._arrive(offer, receivers) if receives else 0
        if self._store.get(f"{offer}-all").decode() == NEW:  # waits for it as long as the store's deadline
            self._group = None
            self._group = _Group(dist.PrefixStore(offer, self._store), rank, where, self._device)
        assert self._group is not None, "only who has a group can say that it stays"
        return self._group

    def _arrive(self, offer: str, receivers: int) -> int:
        """Take a rank; the last one to come tells all others what it finds."""
        if self._group is None:
            self._store.add(f"{offer}-new", 1)
        rank = self._store.add(f"{offer}-here", 1)
        if rank > receivers:
            raise EngineError(f"engine number {rank} came to a broadcast for {receivers}")
        if rank == receivers:
            self._store.set(f"{offer}-all", NEW if self._store.add(f"{offer}-new", 0) else SAME)
        return rank


class _Group:
    """A process group outside torch's default one, and the bucket it sends."""

    def __init__(self, store: dist.Store, rank: int, where: Mapping[str, Any], device: torch.device):
        self._size, self._device = int(where["receivers"]) + 1, device
        self._group = process_group(store, rank, where)
        self._bucket = torch.empty(int(where["bucket_bytes"]), dtype=torch.uint8, device=device)

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
    words = buffer.view(torch.int64)
    # By numpy on a CPU: torch would start a team of OpenMP threads for whichever thread asks, beside the computing one's.
    found = words.numpy().sum() if buffer.device.type == "cpu" else words.sum()
    return (total * 31 + int(found) + (1 << 63)) % (1 << 64) - (1 << 63)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:400]
