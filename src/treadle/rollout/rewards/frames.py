"""Length-prefixed JSON over a socket: how the parent and its reward workers talk. Nothing is ever unpickled."""

from __future__ import annotations

import json
import socket
import struct
import time
from typing import Any

_HEADER = struct.Struct(">Q")


def send_frame(connection: socket.socket, value: Any, deadline: float | None = None) -> None:
    """Send one value; raises `TimeoutError` at the deadline (a `time.monotonic` value)."""
    body = json.dumps(value).encode()
    _set_deadline(connection, deadline)
    try:
        connection.sendall(_HEADER.pack(len(body)) + body)
    except BlockingIOError as error:
        raise TimeoutError from error


def receive_frame(connection: socket.socket, deadline: float | None = None) -> Any:
    """Receive one value; raises `TimeoutError` at the deadline and `EOFError` where the other side is gone."""
    (length,) = _HEADER.unpack(_receive_exactly(connection, _HEADER.size, deadline))
    return json.loads(_receive_exactly(connection, length, deadline))


def _receive_exactly(connection: socket.socket, count: int, deadline: float | None) -> bytes:
    chunks = bytearray()
    while len(chunks) < count:
        _set_deadline(connection, deadline)
        try:
            chunk = connection.recv(min(count - len(chunks), 1 << 20))
        except BlockingIOError as error:
            raise TimeoutError from error
        except ConnectionResetError:
            chunk = b""
        if not chunk:
            raise EOFError("the other side closed the connection")
        chunks += chunk
    return bytes(chunks)


def _set_deadline(connection: socket.socket, deadline: float | None) -> None:
    """At or past the deadline the socket still takes what is there already: a late reader fails nothing."""
    connection.settimeout(None if deadline is None else max(0.0, deadline - time.monotonic()))
