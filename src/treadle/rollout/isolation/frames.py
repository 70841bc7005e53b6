"""Length-prefixed JSON over a socket: how the run and its worker processes talk. Nothing is ever unpickled."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

_HEADER = struct.Struct(">Q")


def encode_frame(value: Any) -> bytes:
    """Return one value as the bytes of a frame."""
    body = json.dumps(value).encode()
    return _HEADER.pack(len(body)) + body


def decode_frames(buffer: bytearray) -> list[Any]:
    """Take all whole frames off the front of a buffer and return their values."""
    found = []
    while len(buffer) >= _HEADER.size:
        end = _HEADER.size + _HEADER.unpack_from(buffer)[0]
        if len(buffer) < end:
            break
        found.append(json.loads(bytes(buffer[_HEADER.size : end])))
        del buffer[:end]
    return found


def receive_frame(connection: socket.socket) -> Any:
    """Receive one value from a blocking socket; raises `EOFError` if the other side closed it."""
    (length,) = _HEADER.unpack(_receive_exactly(connection, _HEADER.size))
    return json.loads(_receive_exactly(connection, length))


def _receive_exactly(connection: socket.socket, count: int) -> bytes:
    chunks = bytearray()
    while len(chunks) < count:
        try:
            chunk = connection.recv(min(count - len(chunks), 1 << 20))
        except ConnectionResetError:
            chunk = b""
        if not chunk:
            raise EOFError("the other side closed the connection")
        chunks += chunk
    return bytes(chunks)
