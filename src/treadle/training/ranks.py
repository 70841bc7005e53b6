"""The processes that train together: joining them, and the few collectives that they need.

Every wait has the deadline of the group; if a rank stops answering, the others end with a `RankError`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from treadle.errors import RankError
from treadle.weights.rendezvous import open_rendezvous

LOOPBACK = "127.0.0.1"
_CPU = torch.device("cpu")
_LOST = ("gloo", "nccl", "timed out", "connection closed", "connection reset", "connection refused", "broken pipe")
"""What the messages of torch's collectives speak of when a rank is lost; it raises plain RuntimeErrors too."""


@dataclass(frozen=True, eq=False)
class Ranks:
    """This process among the ranks that share the samples of a rollout; alone by default.

    Tensors go through `device`, where the group exchanges them, and come back to where they were.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    device: torch.device = _CPU

    @property
    def is_alone(self) -> bool:
        return self.group is None

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over all ranks; a new tensor unless this rank is alone."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def max(self, number: int) -> int:
        """Return the largest of the ranks' numbers."""
        return number if self.is_alone else int(self._reduced(torch.tensor([number]), dist.ReduceOp.MAX))

    def gather(self, values: Tensor) -> Tensor:
        """Return the ranks' vectors, of any lengths, concatenated in the order of the ranks."""
        if self.is_alone:
            return values
        lengths = self.sum(torch.nn.functional.one_hot(torch.tensor(self.rank), self.size) * values.numel()).tolist()
        padded = torch.zeros(max(lengths), dtype=values.dtype, device=self.device)
        padded[: values.numel()] = values
        found = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(found, padded, group=self.group)
        return torch.cat([part[:n] for part, n in zip(found, lengths, strict=True)]).to(values.device)

    def _reduced(self, values: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        if self.is_alone:
            return values
        total = values.detach().to(self.device, copy=True)
        dist.all_reduce(total, op, group=self.group)
        return total.to(values.device)


ALONE = Ranks()


def join_ranks(
    rank: int, size: int, *, at: Path | int, device: torch.device, timeout_seconds: float, address: str = LOOPBACK
) -> None:
    """Join the process group; returns when all ranks are there.

    Args:
        at: where the ranks find each other: a file that is not there yet, in a folder of this user alone, for ranks of
            one machine; else the port that rank 0 listens on, where anybody who reaches it is heard.
        address: of rank 0, as the others reach it.

    Raises:
        RankError: if that takes longer than the timeout, which then bounds every exchange as well.
    """
    if address == LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else gloo asks the resolver for the machine's name
    if device.type == "cuda":
        assert device.index is not None, "say which GPU: cuda:0"
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    with lost_ranks_are_named(f"joining {size} ranks at {address}", rank, size):
        timeout = timedelta(seconds=timeout_seconds)
        dist.init_process_group(
            backend,
            store=_store(rank, size, at, address, timeout),
            rank=rank,
            world_size=size,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )


def _store(rank: int, size: int, at: Path | int, address: str, timeout: timedelta) -> dist.Store:
    if isinstance(at, int):
        return open_rendezvous(address, at, timeout) if rank == 0 else dist.TCPStore(address, at, None, False, timeout)
    store = dist.FileStore(str(at), size)
    store.set_timeout(timeout)
    return store


def leave_ranks() -> None:
    """Leave the process group, if one was joined."""
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def lost_ranks_are_named(doing: str, rank: int, size: int) -> Iterator[None]:
    """Turn the error that torch raises if a rank died or is late into one line that says what was being done."""
    try:
        yield
    except RankError:
        raise
    except (dist.DistError, RuntimeError) as error:
        text = (str(error).splitlines() or [type(error).__name__])[0].split(". ")[0]
        lost = isinstance(error, dist.DistError) or any(word in text.lower() for word in _LOST)
        if size == 1 or not lost or isinstance(error, torch.OutOfMemoryError):
            raise
        raise RankError(
            f"rank {rank} of {size} lost the others while {doing} ({text}); the cause is in the log of the rank that "
            "stopped first, or the work takes longer than --distributed-timeout-seconds"
        ) from error
