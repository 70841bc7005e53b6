"""Requests to an engine's server: every one has a deadline that is named, and what goes wrong says which server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from treadle.errors import EngineError, EngineLostError

if TYPE_CHECKING:
    import httpx2

CONNECT_SECONDS = 10.0


class RefusedError(EngineError):
    """The server answered with an error; `status` is HTTP's."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, eq=False)
class HttpCalls:
    """One server. `name` is what messages call it."""

    name: str
    client: httpx2.AsyncClient

    @classmethod
    def to(cls, address: str, name: str) -> HttpCalls:
        """`address` is `host:port` or a URL; the machine's proxy settings do not apply."""
        import httpx2

        url = address if "://" in address else f"http://{address}"
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=2.0)
        return cls(name, httpx2.AsyncClient(base_url=url, trust_env=False, limits=limits))

    async def ask(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        seconds: float | None,
        params: Mapping[str, Any] | None = None,
        method: str = "POST",
    ) -> Any:
        """The JSON that the server answers; None for an empty answer.

        Raises `EngineLostError` where nobody answers, or not within `seconds` (None: the deadline is the caller's), and
        `RefusedError` with what the server says where it refuses.
        """
        import httpx2

        timeout = httpx2.Timeout(seconds, connect=CONNECT_SECONDS)
        try:
            # A server that fails closes its connection after the answer: the next request must not be sent on it.
            headers = {} if seconds is None else {"Connection": "close"}
            reply = await self.client.request(method, path, json=body, params=params, timeout=timeout, headers=headers)
        except httpx2.TimeoutException as error:
            raise EngineLostError(
                f"{self.name} did not answer {path} within {seconds or CONNECT_SECONDS:g} s"
            ) from error
        except (httpx2.HTTPError, OSError, RuntimeError) as error:  # RuntimeError: the client was closed meanwhile
            raise EngineLostError(f"{self.name} is gone: {path} ended with {error!r}") from error
        if reply.status_code >= 400:
            message = f"{self.name} refused {path} ({reply.status_code}): {said(reply.text)}"
            raise RefusedError(message, reply.status_code)
        if not reply.content:
            return None
        try:
            return reply.json()
        except ValueError as error:
            raise EngineError(f"{self.name} answered {path} with no JSON: {reply.text[:200]!r}") from error

    async def close(self) -> None:
        await self.client.aclose()


def said(text: str) -> str:
    """What a server gives as its reason, in one short line."""
    return " ".join(text.split())[:1000]
