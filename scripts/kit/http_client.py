"""The HTTP client of scripts: aiohttp's, with errors as text and bodies in pieces, as they arrive.

It has no code in common with kvrouter's relay: a mistake there would go unnoticed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import aiohttp
from yarl import URL

from scripts.kit.script import ScriptError


class HttpError(ScriptError):
    """No answer, or a malformed one."""


class RefusedError(HttpError):
    """No connection: the server has not received the request."""


@dataclass(frozen=True, slots=True)
class Head:
    """Status and headers of an answer; header names in lower case."""

    status: int
    headers: Mapping[str, str]


@dataclass(slots=True)
class _Use:
    """Of a connection by a request."""

    is_reused: bool = False
    is_answered: bool = False


async def _note_use(_session: object, context: Any, _about: object) -> None:
    context.trace_request_ctx.is_reused = True


class Client:
    """Reuses connections; opens another one when all are busy."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def send(
        self,
        method: str,
        url: str,
        on_body: Callable[[bytes], None],
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
    ) -> Head:
        """Send a request, pass on the body in pieces, and return the head at its end. Raises HttpError.

        A connection that is used again may have been closed meanwhile: then it is sent once more.
        """
        kind = {"Content-Type": "application/json"} if body else {}
        headers = {**kind, **(headers or {})}
        while True:
            use = _Use()
            try:
                async with self._opened().request(
                    method, URL(url, encoded=True), data=body or None, headers=headers, trace_request_ctx=use
                ) as answer:
                    use.is_answered = True
                    async for data in answer.content.iter_any():
                        on_body(data)
                    fields = {name.lower(): value for name, value in answer.headers.items()}
                    return Head(answer.status, fields)
            except aiohttp.ClientConnectorError as error:
                reason = f"cannot connect to {error.host}:{error.port}: {error.strerror}"
                raise RefusedError(reason) from error
            except (aiohttp.ClientError, OSError, ValueError) as error:
                was_closed = isinstance(error, aiohttp.ClientConnectionError)
                if not (was_closed and use.is_reused and not use.is_answered):
                    raise HttpError(f"connection lost: {error!r}") from error

    def _opened(self) -> aiohttp.ClientSession:
        """Made at the first request: it belongs to the loop that runs then."""
        if self._session is None:
            traces = aiohttp.TraceConfig()
            traces.on_connection_reuseconn.append(_note_use)
            self._session = aiohttp.ClientSession(
                trace_configs=[traces],
                connector=aiohttp.TCPConnector(limit=0),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"Accept-Encoding": "identity"},
                timeout=aiohttp.ClientTimeout(),
                read_bufsize=1 << 20,
            )
        return self._session

    async def get(self, url: str, headers: Mapping[str, str] | None = None) -> tuple[int, bytes]:
        """Status and body of a GET."""
        body = bytearray()
        head = await self.send("GET", url, body.extend, headers=headers)
        return head.status, bytes(body)

    async def get_json(self, url: str) -> Any:
        """The JSON of a GET; raises HttpError unless the status is 200."""
        return _json(url, *await self.get(url))

    async def total(self, metric: re.Pattern[str], urls: Iterable[str]) -> float:
        """The sum of what the pattern finds in /metrics of these servers: its only group is the value."""
        texts = [(await self.get(f"{url}/metrics"))[1].decode() for url in urls]
        return sum(float(value) for text in texts for value in metric.findall(text))

    async def post_json(self, url: str, body: bytes, headers: Mapping[str, str] | None = None) -> Any:
        """The JSON of a POST; raises HttpError unless the status is 200."""
        answer = bytearray()
        head = await self.send("POST", url, answer.extend, body, headers)
        return _json(url, head.status, bytes(answer))

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


def _json(url: str, status: int, body: bytes) -> Any:
    if status != 200:
        raise HttpError(f"{url} answers {status}: {body[:200].decode(errors='replace')}")
    return json.loads(body)
