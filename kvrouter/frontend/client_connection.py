"""A client's connection where aiohttp itself answers: what is no HTTP, and bodies it is not to send."""

from __future__ import annotations

import uuid
from http import HTTPStatus

from aiohttp import HttpVersion11, web

from kvrouter.errors import BadRequestError, KvRouterError, RequestTooLargeError
from kvrouter.frontend.completions import error_response
from kvrouter.frontend.incoming import request_id_of


class ClientConnection(web.RequestHandler):
    """aiohttp's, with OpenAI's form for what comes to no route: broken HTTP, an unknown packing."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = HTTPStatus.INTERNAL_SERVER_ERROR,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The same answer in another form. Raises ConnectionError if another one has begun."""
        super().handle_error(request, status, exc, message)
        error = KvRouterError("internal error; the log of this replica has the details")
        if status < HTTPStatus.INTERNAL_SERVER_ERROR:
            said = " ".join((message or HTTPStatus(status).phrase).split())
            error = BadRequestError(f"the request cannot be read: {said[:300]}")
        answer = error_response(error, uuid.uuid4().hex)
        answer.force_close()
        return answer


async def invite_body(http: web.Request) -> web.StreamResponse | None:
    """`Expect: 100-continue`: a client that asks is told at once if its body is too large."""
    length, most = http.content_length or 0, http.client_max_size
    if length > most:
        error = RequestTooLargeError(f"the request body is too large: {length} bytes, {most} are allowed")
        answer = error_response(error, request_id_of(http))
        answer.force_close()  # the body may come all the same
        return answer
    if http.version >= HttpVersion11 and http.headers.get("expect", "").lower() == "100-continue":
        await http.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        http.writer.output_size = 0  # the answer itself has not begun
    return None
