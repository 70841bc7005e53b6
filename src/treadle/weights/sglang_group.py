"""Weights broadcast into the process group that SGLang makes itself: gloo between CPUs, NCCL between GPUs.

A server joins a group when it is told where, and takes a bucket when it is told which weights are in it. It does not
check whether they fit, and it waits half an hour for a rank that is missing. The clients of all servers therefore come
to the trainer's rendezvous first. Each reports how many ranks its server has and whether the offer fits, and the last
one publishes the verdict. If any of them refuses, no server is told of the offer. Then the ranks of the servers make
the group with the trainer, which is rank 0, unless all of them are in the group of the previous offer.

If a rank dies on the way, the group breaks; with gloo all others notice at once. Servers that were being written
refuse to serve, and the next offer has a new rendezvous. The server contains no code of Treadle, so checksums are not
compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from treadle.errors import EngineError
from treadle.weights.base import Offer, WeightSpec
from treadle.weights.broadcast_sender import BroadcastKind, BroadcastSender, RefusedOffer, entering
from treadle.weights.parallel_copy import copy_pairs
from treadle.weights.rendezvous import join_rendezvous, process_group
from treadle.weights.served_weights import SentWeights, ServedWeights
from treadle.weights.tensor_layout import Layout
from treadle.weights.transport import Transport

NAME = "sglang-group"
REFUSED, NEW, SAME = "refused", "new", "same"


class _Trainer:
    """Rank 0's part at one rendezvous, and its newest group with the servers."""

    def __init__(self, store: dist.Store, device: torch.device):
        self._store, self._device = store, device
        self._group: Any = None

    def send(self, offer: Offer, weights: SentWeights) -> None:
        """Send all weights to servers that accept the offer."""
        where = offer.where
        verdict = self._store.get(f"{_key(offer)}-all").decode()  # waits for it until the store's deadline
        if verdict == REFUSED:
            raise RefusedOffer(f"an engine refused version {offer.version}; its own error says why")
        if verdict == NEW:
            self._group = None
            self._group = process_group(_store_of_group(self._store, where), 0, where)
        layouts = list(whole_buckets(offer.specs, int(where["bucket_bytes"])))
        size = max((layout.num_bytes for layout in layouts), default=0)
        bucket = torch.empty(size, dtype=torch.uint8, device=self._device)
        for layout in layouts:
            flat = bucket[: layout.num_bytes]
            copy_pairs((view, weights[name]) for name, view in layout.views(flat).items())
            # With a deadline, `wait` also waits for the GPU, and the bucket can be used again.
            self._group.broadcast(flat, 0).wait(timedelta(seconds=float(where["timeout_seconds"])))


@dataclass(frozen=True)
class Joining:
    """What the server must be told: the group of this offer and, if it is a new one, the server's first rank in it."""

    group: str
    is_new: bool
    first_rank: int


class ServerRanks:
    """One server's part at the rendezvous, which its client plays for it.

    `group` is the group it is in, until `leave`.
    """

    def __init__(self) -> None:
        self._rendezvous: str | None = None
        self._store: dist.Store | None = None
        self.group: str | None = None

    def enter(self, offer: Offer, ranks: int, refusal: EngineError | None = None) -> Joining:
        """Report that the server's ranks are there and whether the offer fits; return when all have reported.

        A server that refuses must report too, because the others wait for it. Raises its refusal, or that another
        refused.
        """
        with entering(offer, refusal, self.leave):
            return self._enter(offer, ranks, refusal)

    def _enter(self, offer: Offer, ranks: int, refusal: EngineError | None) -> Joining:
        where, key = offer.where, _key(offer)
        if self._store is None or self._rendezvous != where["rendezvous"]:
            self.leave()
            self._store, self._rendezvous = join_rendezvous(where), str(where["rendezvous"])
        store, receivers = self._store, int(where["receivers"])
        if refusal is not None:
            store.add(f"{key}-{REFUSED}", 1)
        if self.group is None:
            store.add(f"{key}-{NEW}", 1)
        last_rank = store.add(f"{key}-here", ranks)
        if last_rank > receivers:
            raise EngineError(f"rank {last_rank} came to a broadcast for {receivers}")
        if last_rank == receivers:
            verdict = next((word for word in (REFUSED, NEW) if store.add(f"{key}-{word}", 0)), SAME)
            store.set(f"{key}-all", verdict)
        verdict = store.get(f"{key}-all").decode()
        if verdict == REFUSED:
            raise RefusedOffer(f"another engine refused version {offer.version}; its own error says why")
        if verdict == SAME:
            assert self.group is not None, "only a server that has a group can say that it stays"
            return Joining(self.group, False, 0)
        return Joining(group_name(where), True, last_rank - ranks + 1)

    def leave(self) -> None:
        self._store = self._rendezvous = self.group = None


def whole_buckets(specs: Mapping[str, WeightSpec], bucket_bytes: int) -> Iterator[Layout]:
    """Yield buckets of whole weights, for a server that cannot join parts; a weight larger than a bucket has its own.

    In each bucket the weights lie as SGLang's `flattened_bucket` needs them: without gaps, in the order of `offsets`.
    """
    held: dict[str, WeightSpec] = {}
    room = bucket_bytes
    for name, spec in specs.items():
        if held and spec.num_bytes > room:
            yield Layout.dense(held)
            held, room = {}, bucket_bytes
        held[name] = spec
        room -= spec.num_bytes
    if held:
        yield Layout.dense(held)


def group_name(where: Mapping[str, Any]) -> str:
    """Return the name of the group that is made for an offer."""
    return f"treadle-{where['rendezvous']}-{where['number']}"


def _key(offer: Offer) -> str:
    return f"offer-{offer.where['number']}"


def _store_of_group(store: dist.Store, where: Mapping[str, Any]) -> dist.Store:
    """Return the part of a store in which the ranks of a group that SGLang made find each other.

    SGLang prefixes all keys with the group's name, and torch (`_new_process_group_helper`) with that again and then
    with the first device of the backend.
    """
    name = group_name(where)
    device = "cuda" if where["backend"] == "nccl" else "cpu"
    return dist.PrefixStore(f"{device}/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store)))


KIND = BroadcastKind(NAME, lambda store, offer, device: _Trainer(store, device))
open_sglang_group = partial(BroadcastSender, KIND)
"""Opens the trainer's end, with the arguments of `BroadcastSender` after `kind`; receivers are the servers' ranks."""


def _no_receiver(served: ServedWeights) -> NoReturn:
    raise EngineError("sglang-group sends to SGLang servers only; use broadcast")


TRANSPORT = Transport(
    NAME,
    lambda weights, plan: open_sglang_group(weights, plan.num_receivers, **plan.broadcast_settings),
    _no_receiver,
)
