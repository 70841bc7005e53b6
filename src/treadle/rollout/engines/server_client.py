"""Requests to an engine's server: each has a deadline, and each error names the server and the request."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from treadle.errors import EngineError, EngineLostError
from treadle.rollout.engines.server_process import ServerProcess

CONNECT_SECONDS = 10.0


@dataclass(frozen=True)
class Call:
    """A request. If it is `slow` (it moves weights), it has the deadline of weight updates."""

    path: str
    body: Mapping[str, Any] | None = None
    params: Mapping[str, Any] | None = None
    method: str = "POST"
    slow: bool = False


class RefusedError(EngineError):
    """The server answered with an error; `status` is HTTP's."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


class ServerClient:
    """Sends requests to one server, whose `process` is known if it was started here.

    Args:
        address: `host:port` or a URL; the machine's proxy settings do not apply.
        name: what messages call the server.
        seconds: deadlines of usual and of slow calls.
    """

    def __init__(self, address: str, name: str, seconds: tuple[float, float], process: ServerProcess | None = None):
        import httpx2

        self.address = address if "://" in address else f"http://{address}"
        self.name, self.process = name, process
        self.seconds = seconds
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=2.0)
        self._http = httpx2.AsyncClient(base_url=self.address, trust_env=False, limits=limits)
        self.close = self._http.aclose

    async def ask(self, call: Call, seconds: float | None = None) -> Any:
        """Send a request and return the JSON of the answer, None if it is empty.

        Args:
            seconds: its deadline, unless that of its kind applies; infinite if the caller keeps one.
        Raises:
            EngineLostError: if nothing answers in time.
            RefusedError: with the server's reason, if it refuses.
        """
        import httpx2

        seconds = self.seconds[call.slow] if seconds is None else seconds
        is_endless = seconds == math.inf
        timeout = httpx2.Timeout(None if is_endless else seconds, connect=CONNECT_SECONDS)
        # A server that fails closes its connection after the answer: the next request must not be sent on it.
        headers = {} if is_endless else {"Connection": "close"}
        try:
            reply = await self._http.request(
                call.method, call.path, json=call.body, params=call.params, timeout=timeout, headers=headers
            )
        except httpx2.TimeoutException as error:
            waited = CONNECT_SECONDS if is_endless else seconds
            raise self.lost(f"did not answer {call.path} within {waited:g} s") from error
        except (httpx2.HTTPError, OSError, RuntimeError) as error:  # RuntimeError: the client was closed meanwhile
            raise self.lost(f"is gone: {call.path} ended with {error!r}") from error
        if reply.status_code >= 400:
            reason = " ".join(reply.text.split())[:1000]
            message = f"{self.name} refused {call.path} ({reply.status_code}): {reason}"
            raise RefusedError(message, reply.status_code)
        try:
            return reply.json() if reply.content else None
        except ValueError as error:
            raise EngineError(f"{self.name} answered {call.path} with no JSON: {reply.text[:200]!r}") from error

    async def ask_numbers(self, path: str, *names: str) -> dict[str, int]:
        """Return the named numbers of the answer at a path; raises `EngineError` if one is missing."""
        reply = await self.ask(Call(path, method="GET"))
        try:
            return {name: int(reply[name]) for name in names}
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"{self.name} does not report its {', '.join(names)}: {str(reply)[:300]}") from error

    def lost(self, what: str) -> EngineLostError:
        """Return the error that the server died or hangs; it quotes the log of a process that has ended."""
        ended = self.process is not None and not self.process.is_alive
        return EngineLostError(f"{self.name} {what}" + (self.log_end if ended else ""))

    @property
    def log_end(self) -> str:
        return "" if self.process is None else f"; its log ends with: {self.process.tail()}"
