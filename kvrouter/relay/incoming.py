"""What a client's request says beside its JSON: its body as bytes, its id, its priority."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Mapping

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage

from kvrouter.errors import BadRequestError, BodiesFullError, RequestStalledError, RequestTooLargeError

STALLED_S = 75.0
"""A client that sends nothing more of a body for so long is not waited for; the same on plain connections."""

_WHOLE = re.compile(r"[+-]?[0-9]{1,9}")
_MOST_ID_CHARACTERS = 128


ARRIVING_BODIES = 8
"""Bodies of the greatest size that may wait for their end, all together; or more of smaller ones."""


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


ARRIVING = web.AppKey("arriving", ArrivingBytes)


async def read_body(http: web.Request) -> bytes:
    """The body, whole. Raises BadRequestError, of whatever kind, or BodiesFullError."""
    if http.content_length is not None and http.content_length > http.client_max_size:
        raise too_large(http)
    arriving, body = http.app[ARRIVING], bytearray()
    try:
        await _read_into(body, http, arriving)
    finally:
        arriving.give_back(len(body))
    return bytes(body)


async def _read_into(body: bytearray, http: web.Request, arriving: ArrivingBytes) -> None:
    while True:
        try:
            async with asyncio.timeout(STALLED_S):
                piece = await http.content.readany()
        except TimeoutError:
            raise RequestStalledError(f"no more of the request body has come for {STALLED_S:g} s") from None
        except (web.RequestPayloadError, BadHttpMessage) as error:
            raise BadRequestError(f"the request body cannot be read: {error}") from None
        if not piece:
            return
        arriving.take(len(piece))
        body += piece
        if len(body) > http.client_max_size:
            raise too_large(http)


def too_large(http: web.Request) -> RequestTooLargeError:
    """What the client is told of a body above the limit."""
    most = http.client_max_size
    return RequestTooLargeError(f"the request body is too large: {most} bytes are allowed (--max-body-mb)")


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


def priority_of(headers: Mapping[str, str], in_body: int) -> int:
    """The header `x-kvrouter-priority`, or else the body's. Raises BadRequestError unless it is a number."""
    given = headers.get("x-kvrouter-priority")
    if given is None:
        return in_body
    if not _WHOLE.fullmatch(given):
        raise BadRequestError(
            f"header x-kvrouter-priority: {given!r} is no whole number", param="x-kvrouter-priority"
        )
    return int(given)
