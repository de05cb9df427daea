"""What a client's request says beside its JSON: its body as bytes, its id."""

from __future__ import annotations

import re
import uuid

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage

from kvrouter.errors import BadRequestError, RequestTooLargeError

_WHOLE = re.compile(r"[+-]?[0-9]{1,9}")
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


async def read_body(http: web.Request) -> bytes:
    """The body, whole. Raises BadRequestError or RequestTooLargeError."""
    try:
        return await http.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise RequestTooLargeError(f"the request body is too large: {error.text}") from None
    except (web.RequestPayloadError, BadHttpMessage) as error:
        raise BadRequestError(f"the request body cannot be read: {error}") from None


def request_id_of(http: web.Request) -> str:
    """The client's own id of the request, or a new one."""
    given = http.headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def priority_of(http: web.Request, in_body: int) -> int:
    """The header `x-kvrouter-priority`, or else the body's. Raises BadRequestError unless it is a number."""
    given = http.headers.get("x-kvrouter-priority")
    if given is None:
        return in_body
    if not _WHOLE.fullmatch(given):
        raise BadRequestError(
            f"header x-kvrouter-priority: {given!r} is no whole number", param="x-kvrouter-priority"
        )
    return int(given)
