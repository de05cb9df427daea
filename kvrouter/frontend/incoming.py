"""What a client's request says beside its JSON: its body as bytes, its id."""

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
