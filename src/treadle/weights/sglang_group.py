"""Weights broadcast into the process group that SGLang makes itself: gloo between CPUs, NCCL between GPUs.

A server joins a group when it is told where, and takes a bucket when it is told which weights are in it. It does not look
whether they fit, and it waits half an hour for a rank that is missing. So the clients of all servers meet the trainer first,
in the same kind of meeting as for `broadcast`: each says how many ranks its server has and whether what is offered fits,
the last one to come tells all what it found, and if any of them refuses, no server is told of the offer. Then the ranks
of the servers make the group with the trainer, who is rank 0, unless all of them are in the one of the last offer.

A rank that is lost on the way breaks the group: with gloo all others are told at once. Servers that were being written
refuse to serve, and the next offer has a new meeting. Nothing of Treadle runs in the server, so no checksums are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from treadle.errors import EngineError
from treadle.weights.base import Offer, WeightSpec
from treadle.weights.parallel_copy import copy_pairs
from treadle.weights.rendezvous import BroadcastPlace, Offers, come_to, process_group
from treadle.weights.served_weights import SentWeights
from treadle.weights.tensor_layout import Layout

NAME = "sglang-group"
REFUSED, NEW, SAME = "refused", "new", "same"


class GroupSender:
    """The trainer's end, rank 0. `host` is this machine as the servers reach it; `num_receivers` counts the ranks of all
    servers."""

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
        self._group: Any = None

    def offer(self, version: int) -> Offer:
        return self._offers.offer(version)

    def deliver(self) -> None:
        offer = self._offers.due()
        assert self._offers.store is not None, "offer first"
        place, what = self._place, f"version {offer.version}"
        try:
            # Waits for it as long as the store's deadline.
            verdict = self._offers.store.get(f"{_key(offer)}-all").decode()
            if verdict == REFUSED:
                raise _Refusal(f"an engine refused {what}; its own error says why")
            if verdict == NEW:
                self._group = None
                self._group = process_group(_store_of_group(self._offers.store, offer.where), 0, offer.where)
            self._send(list(whole_buckets(offer.specs, place.bucket_bytes)))
        except _Refusal:
            raise
        except (RuntimeError, OSError) as error:
            self._leave()
            raise EngineError(
                f"{what} did not reach all {place.receivers} ranks of the servers in {place.timeout_seconds:g} s a step: "
                f"{' '.join(str(error).split())[:400]}"
            ) from error

    def _send(self, layouts: Sequence[Layout]) -> None:
        seconds = timedelta(seconds=self._place.timeout_seconds)
        size = max((layout.num_bytes for layout in layouts), default=0)
        bucket = torch.empty(size, dtype=torch.uint8, device=self._device)
        for layout in layouts:
            flat = bucket[: layout.num_bytes]
            copy_pairs((view, self._weights[name]) for name, view in layout.views(flat).items())
            self._group.broadcast(flat, 0).wait(
                seconds
            )  # given a deadline it waits for a GPU too: the bucket is used again

    def _leave(self) -> None:
        self._group = None
        self._offers.leave()

    def close(self) -> None:
        self._leave()


@dataclass(frozen=True)
class Joining:
    """What the server is to be told: the group of this offer, and its own first rank in it where the group is a new one."""

    group: str
    is_new: bool
    first_rank: int


class ServerSeat:
    """One server's part in meetings, which its client takes: who is in a group keeps it until `leave`."""

    def __init__(self) -> None:
        self._meeting: str | None = None
        self._store: dist.Store | None = None
        self.group: str | None = None

    def enter(self, offer: Offer, ranks: int, refusal: EngineError | None = None) -> Joining:
        """Say that the server's ranks are there and whether the offer fits; returns when all have said so.

        Who refuses has to come too: the others wait for it. Raises its refusal, or that another one refused.
        """
        try:
            return self._enter(offer, ranks, refusal)
        except _Refusal as error:
            raise refusal or error from None
        except (RuntimeError, OSError) as error:
            self.leave()
            raise EngineError(" ".join(str(error).split())[:400]) from error
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"this offer names no place to meet ({error!r}): {dict(offer.where)}") from error

    def _enter(self, offer: Offer, ranks: int, refusal: EngineError | None) -> Joining:
        where, key = offer.where, _key(offer)
        if self._store is None or self._meeting != where["meeting"]:
            self.leave()
            self._store, self._meeting = come_to(where), str(where["meeting"])
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
            raise _Refusal(f"another engine refused version {offer.version}; its own error says why")
        if verdict == SAME:
            assert self.group is not None, "only who has a group can say that it stays"
            return Joining(self.group, False, 0)
        return Joining(group_name(where), True, last_rank - ranks + 1)

    def leave(self) -> None:
        self._store = self._meeting = self.group = None


class _Refusal(EngineError):
    """An engine does not take what is offered; no server was told of it."""


def whole_buckets(specs: Mapping[str, WeightSpec], bucket_bytes: int) -> Iterator[Layout]:
    """Buckets of whole weights, for a server that can't put parts together: a weight larger than a bucket has one alone.

    In each the weights lie as SGLang's `flattened_bucket` wants them: without gaps, in the order of `offsets`.
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
    """The name of a group that is made for an offer."""
    return f"treadle-{where['meeting']}-{where['number']}"


def _key(offer: Offer) -> str:
    return f"offer-{offer.where['number']}"


def _store_of_group(store: dist.Store, where: Mapping[str, Any]) -> dist.Store:
    """The part of a store where ranks of a group look for each other that was made as SGLang makes it.

    SGLang prefixes all keys with the group's name, and torch (`_new_process_group_helper`) with that again and then with
    the first device of the backend.
    """
    name = group_name(where)
    device = "cuda" if where["backend"] == "nccl" else "cpu"
    return dist.PrefixStore(f"{device}/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store)))
