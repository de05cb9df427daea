"""A client's request as the request path sees it, whoever has read it from the wire."""

from __future__ import annotations

import random
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeAlias
from urllib.parse import parse_qs

from kvrouter.errors import BodiesFullError
from kvrouter.relay.answer import Served
from kvrouter.relay.exchange import Client

Field: TypeAlias = tuple[str, str]
"""Name in lower case, and value; bytes that are no UTF-8 stand in them as lone surrogates."""

_MOST_ID_CHARACTERS = 128
ARRIVING_BODIES = 8
"""Bodies of the greatest size that may wait for their end, all together; or more of smaller ones."""
_HOST = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[\w.~!$&'()*+,;=%-]*)(?::[0-9]*)?", re.ASCII)
"""RFC 3986: uri-host [ ":" port ], which may be empty."""


def host_error(hosts: Sequence[str], *, is_http_10: bool) -> str:
    """What is wrong with a request's `host` headers (RFC 9112, 3.2); empty if nothing is."""
    if len(hosts) > 1:
        return "more than one host header"
    if not hosts:
        return "" if is_http_10 else "HTTP/1.1 without a host header"
    return "" if _HOST.fullmatch(hosts[0]) else f"host {hosts[0][:100]!r} is not HOST or HOST:PORT"


class Head:
    """What a client says before the body, but for the body's length: many requests may share one.

    `path` is as the client wrote it, query included.
    """

    __slots__ = ("fields", "headers", "method", "passed_on", "path", "route", "wants_keep_alive")

    def __init__(self, method: str, path: str, fields: Sequence[Field], *, wants_keep_alive: bool) -> None:
        self.method = method
        self.path = path
        self.route = path.partition("?")[0]
        self.fields = fields
        self.headers = dict(reversed(fields))
        """The first of each name."""
        self.wants_keep_alive = wants_keep_alive
        self.passed_on: dict[tuple[str, bool], bytes] = {}
        """Kept by request_head.py: the lines of it that workers get."""


class Request:
    """A request whose head has been read. `body` is None while it is still arriving: see `read`."""

    __slots__ = ("_arriving", "body", "client", "head", "headers")

    def __init__(
        self,
        head: Head,
        client: Client,
        body: bytes | None = None,
        arriving: Callable[[], Awaitable[bytes]] | None = None,
    ) -> None:
        """`arriving` waits for a body that is not here."""
        self.head = head
        self.headers = head.headers
        self.client = client
        self.body = body
        self._arriving = arriving

    async def read(self) -> bytes:
        """The body, whole. Raises BadRequestError or RequestTooLargeError."""
        if self.body is None:
            self.body = await self._arriving() if self._arriving is not None else b""
        return self.body

    @property
    def content_type(self) -> str:
        """The type of the body, in lower case, without parameters."""
        kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        return kind if "/" in kind else "application/octet-stream"

    def in_query(self, name: str) -> str | None:
        """The first value that the query gives to this name."""
        query = self.head.path.partition("?")[2]
        return parse_qs(query, errors="surrogateescape").get(name, [None])[0] if query else None


def request_id_of(headers: Mapping[str, str]) -> str:
    """The client's own id of the request, or a new one."""
    given = headers.get("x-request-id")
    return given if given and _is_plain_word(given) else new_request_id()


def _is_plain_word(text: str) -> bool:
    short = len(text) <= _MOST_ID_CHARACTERS
    return short and text.isascii() and text.isprintable() and " " not in text


def new_request_id() -> str:
    """One that nobody else has, though anybody might guess it: names, not secrets."""
    return random.getrandbits(128).to_bytes(16, "big").hex()


class ArrivingBytes:
    """The bytes of bodies that are not whole yet, of all clients: they could begin any number of them."""

    def __init__(self, max_body_bytes: int) -> None:
        self.most = ARRIVING_BODIES * max_body_bytes
        self.count = 0

    def take(self, size: int) -> None:
        """So many more. Raises BodiesFullError."""
        if self.count + size > self.most:
            raise BodiesFullError(f"{self.count} bytes of unfinished request bodies wait here already")
        self.count += size

    def give_back(self, size: int) -> None:
        """Their body is whole, or will never be."""
        self.count -= size


Serve: TypeAlias = Callable[[Request], Awaitable[Served]]
"""Serves a request to its end; the answer goes to the request's client."""
