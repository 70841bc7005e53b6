"""Where processes of a group meet: a store that listens on one address only. torch's own listens on all of the machine's."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist


def open_meeting(host: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """The store of the process that the others come to; port 0 is any that is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, port), family=family)
    taken = listening.getsockname()[1]
    return dist.TCPStore(host, taken, None, True, timeout, wait_for_workers=False, master_listen_fd=listening.detach())
