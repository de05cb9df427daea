"""What a client's request says beside its JSON: its body as bytes, its id, its priority."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Mapping

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage

from kvrouter.errors import BadRequestError, RequestStalledError, RequestTooLargeError

STALLED_S = 75.0
"""A client that sends nothing more of a body for so long is not waited for; the same on plain connections."""

_WHOLE = re.compile(r"[+-]?[0-9]{1,9}")
_MOST_ID_CHARACTERS = 128


async def read_body(http: web.Request) -> bytes:
    """The body, whole. Raises BadRequestError, RequestTooLargeError or RequestStalledError."""
    if http.content_length is not None and http.content_length > http.client_max_size:
        raise too_large(http)
    body = bytearray()
    while True:
        try:
            async with asyncio.timeout(STALLED_S):
                piece = await http.content.readany()
        except TimeoutError:
            raise RequestStalledError(f"no more of the request body has come for {STALLED_S:g} s") from None
        except (web.RequestPayloadError, BadHttpMessage) as error:
            raise BadRequestError(f"the request body cannot be read: {error}") from None
        if not piece:
            return bytes(body)
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
