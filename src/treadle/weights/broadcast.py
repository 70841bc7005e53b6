"""Weights broadcast from the trainer to all engines, bucket by bucket: gloo between CPUs, NCCL between GPUs.

The sender is rank 0 of a process group of its own, apart from any group the trainer or the engine already has. The
offer names the rendezvous; each receiver takes the next free rank there, so engines need no numbers. The group is kept
for the next offer, unless a receiver joins that was not in it: a restarted engine. Before the first bucket every rank
reports whether it is ready, and if one is not, nothing is sent. After the last bucket all ranks compare a checksum of
what they have. If a rank dies in between, the group breaks: engines that were being written refuse to serve, and the
next offer makes a new group.

The rendezvous has no password: use it in a network that only the run's own machines reach.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from treadle.errors import EngineError
from treadle.weights.base import Offer
from treadle.weights.broadcast_sender import BroadcastKind, BroadcastSender, RefusedOffer, entering
from treadle.weights.parallel_copy import copy_pairs
from treadle.weights.rendezvous import join_rendezvous, process_group
from treadle.weights.served_weights import SentWeights, ServedWeights
from treadle.weights.tensor_layout import Piece, bucket_views, buckets
from treadle.weights.transport import Transport

NAME = "broadcast"
READY, REFUSED = 1, 0
NEW, SAME = "new", "same"


class BroadcastReceiver:
    """The engine's end: joins the group that an offer names, then copies each bucket into the engine's weights."""

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
        self._ranks: _Ranks | None = None
        self._entered: _Group | None = None

    def enter(self, offer: Offer, device: torch.device, refusal: EngineError | None = None) -> None:
        """Join the offer's group and report whether this rank is ready. Nothing is sent before this returns.

        A rank that refuses joins too, because the others wait for it. Raises its refusal, or that another rank refused.
        """
        with entering(offer, refusal, self.leave):
            group = self._join(offer.where, device)
            group.agree(offer.version, READY if refusal is None else REFUSED)
            self._entered = group

    def _join(self, where: Mapping[str, Any], device: torch.device) -> _Group:
        if self._ranks is None or self._ranks.rendezvous != where["rendezvous"]:
            self.leave()
            here = torch.device("cpu") if where["backend"] == "gloo" else device
            self._ranks = _Ranks(where["rendezvous"], join_rendezvous(where), here)
        return self._ranks.group(where, receives=True)

    def buckets(self, offer: Offer) -> Iterator[list[tuple[Piece, Tensor]]]:
        """Yield the pieces of each bucket, as views that the next bucket overwrites.

        At the end all ranks compare checksums.
        If a rank stops before the end or fails, the group breaks and the others fail as well.
        """
        if self._entered is None:
            raise EngineError(f"the broadcast of version {offer.version} was not entered first; push it again")
        group, self._entered, ranks, total = self._entered, None, self._ranks, 0
        try:
            for pieces in buckets(offer.specs, int(offer.where["bucket_bytes"])):
                buffer, views = group.bucket(pieces, offer.specs)
                group.broadcast(buffer)
                total = _add(total, buffer)
                yield list(zip(pieces, views, strict=True))
            group.agree(offer.version, READY, total)
        except BaseException:
            if self._ranks is ranks:
                self.leave()
            raise

    def weights(self, offer: Offer, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Yield each weight on `device` as soon as it is complete, in its own memory; one is assembled at a time."""
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
        self._entered = self._ranks = None


class _Ranks:
    """The ranks at one rendezvous, and their newest group."""

    def __init__(self, rendezvous: str, store: dist.Store, device: torch.device):
        self.rendezvous, self._store, self._device = rendezvous, store, device
        self._group: _Group | None = None

    def send(self, offer: Offer, weights: SentWeights) -> None:
        """Send all weights as rank 0."""
        group, total = self.group(offer.where, receives=False), 0
        group.agree(offer.version, READY)
        for pieces in buckets(offer.specs, int(offer.where["bucket_bytes"])):
            buffer, views = group.bucket(pieces, offer.specs)
            sources = (piece.of(weights[piece.name]) for piece in pieces)
            copy_pairs(zip(views, sources, strict=True))
            group.broadcast(buffer)
            total = _add(total, buffer)
        group.agree(offer.version, READY, total)

    def group(self, where: Mapping[str, Any], *, receives: bool) -> _Group:
        """Wait for all ranks; return the group of the previous offer, or a new one if any of them was not in it."""
        offer, receivers = f"offer-{where['number']}", int(where["receivers"])
        rank = self._arrive(offer, receivers) if receives else 0
        if self._store.get(f"{offer}-all").decode() == NEW:  # waits for it until the store's deadline
            self._group = None
            self._group = _Group(dist.PrefixStore(offer, self._store), rank, where, self._device)
        assert self._group is not None, "only a rank that has a group can say that it stays"
        return self._group

    def _arrive(self, offer: str, receivers: int) -> int:
        """Take a rank; the last rank to arrive tells all others which group it is."""
        if self._group is None:
            self._store.add(f"{offer}-new", 1)
        rank = self._store.add(f"{offer}-here", 1)
        if rank > receivers:
            raise EngineError(f"engine number {rank} came to a broadcast for {receivers}")
        if rank == receivers:
            self._store.set(f"{offer}-all", NEW if self._store.add(f"{offer}-new", 0) else SAME)
        return rank


class _Group:
    """A process group outside torch's default one, and its bucket."""

    def __init__(self, store: dist.Store, rank: int, where: Mapping[str, Any], device: torch.device):
        self._size, self._device = int(where["receivers"]) + 1, device
        self._group = process_group(store, rank, where)
        self._bucket = torch.empty(int(where["bucket_bytes"]), dtype=torch.uint8, device=device)

    def bucket(self, pieces: Sequence[Any], specs: Any) -> tuple[Tensor, list[Tensor]]:
        """Return the bytes to send for these pieces, and a flat view of each piece in them."""
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
                raise RefusedOffer(
                    f"engine {rank} of {self._size - 1} refused version {words[0]}; its own error says why"
                )
            if not torch.equal(theirs, others[0]):
                raise EngineError(
                    f"engine {rank} of {self._size - 1} has other bytes of version {version} than were sent"
                )


def _add(total: int, buffer: Tensor) -> int:
    """Add a bucket to the running checksum: a sum of int64 words that wraps, cheap on every device."""
    words = buffer.view(torch.int64)
    # On a CPU numpy adds: torch would start OpenMP threads for each calling thread, beside those that compute.
    found = words.numpy().sum() if buffer.device.type == "cpu" else words.sum()
    return (total * 31 + int(found) + (1 << 63)) % (1 << 64) - (1 << 63)


KIND = BroadcastKind(NAME, lambda store, offer, device: _Ranks(offer.where["rendezvous"], store, device))
open_broadcast = partial(BroadcastSender, KIND)
"""Opens the trainer's end, with the arguments of `BroadcastSender` after `kind`."""

TRANSPORT = Transport(
    NAME,
    lambda weights, plan: open_broadcast(weights, plan.num_receivers, **plan.broadcast_settings),
    BroadcastReceiver,
)
