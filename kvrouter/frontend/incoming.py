"""What a client's request says beside its JSON: its body as bytes, its id, its priority."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage

from kvrouter.errors import BadRequestError, RequestTooLargeError

_WHOLE = re.compile(r"[+-]?[0-9]{1,9}")
_MOST_ID_CHARACTERS = 128


async def read_body(http: web.Request) -> bytes:
    """The body, whole. Raises BadRequestError or RequestTooLargeError."""
    try:
        return await http.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise RequestTooLargeError(f"the request body is too large: {error.text}") from None
    except (web.RequestPayloadError, BadHttpMessage) as error:
        raise BadRequestError(f"the request body cannot be read: {error}") from None


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
