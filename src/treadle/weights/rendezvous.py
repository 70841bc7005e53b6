"""The rendezvous of a group of processes, and the process group that they make there.

A rendezvous is a store that listens on one address only; torch's own store listens on all addresses of the machine.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from treadle.errors import EngineError

LOOPBACK = ("127.0.0.1", "localhost")


def open_rendezvous(host: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """Open the store that the other processes connect to; port 0 chooses a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, port), family=family)
    taken = listening.getsockname()[1]
    return dist.TCPStore(host, taken, None, True, timeout, wait_for_workers=False, master_listen_fd=listening.detach())


def join_rendezvous(where: Mapping[str, Any]) -> dist.TCPStore:
    """Connect to the rendezvous that an offer names."""
    timeout = timedelta(seconds=float(where["timeout_seconds"]))
    return dist.TCPStore(str(where["host"]), int(where["port"]), None, False, timeout)


def process_group(store: dist.Store, rank: int, where: Mapping[str, Any]) -> Any:
    """Make a group of the offer's ranks outside torch's default one; with gloo, wait until all of them have joined."""
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
    """Make a gloo group.

    On one machine it listens on loopback only, else on the interface of GLOO_SOCKET_IFNAME or the host's.
    """
    kind: Any = dist.ProcessGroupGloo
    if host not in LOOPBACK:
        return kind(store, rank, size, timeout)
    options = kind._Options()
    options._timeout, options._devices = timeout, [kind.create_device(hostname=host)]
    return kind(store, rank, size, options)
