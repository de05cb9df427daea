"""What a client's request says beside its JSON: its body as bytes, its id, its routing headers."""

from __future__ import annotations

import re
import uuid

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage

from kvrouter.errors import BadRequestError, RequestTooLargeError

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


def number(http: web.Request, header: str) -> float | None:
    """A header that overrides a setting. Raises BadRequestError unless it is a number of at least 0."""
    given = http.headers.get(header)
    if given is None:
        return None
    try:
        value = float(given)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise BadRequestError(f"header {header}: {given!r} is no number of at least 0", param=header)
    return value
