"""A client's connection that aiohttp keeps, and what aiohttp answers before a route is called."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from aiohttp import HttpVersion11, web

from kvrouter.errors import BadRequestError, RequestTooLargeError
from kvrouter.frontend.bodies.openai import error_answer
from kvrouter.relay.answer import Answer, internal_error
from kvrouter.relay.request import new_request_id, request_id_of


class ClientConnection(web.RequestHandler):
    """aiohttp's connection, with OpenAI's form for errors before any route: invalid HTTP, unknown encodings.

    It calls back once a slow client has caught up; aiohttp (3.14) has no public way to wait for that.
    """

    __slots__ = ("_waiting",)

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._waiting: list[Callable[[], None]] = []

    def when_drained(self, call: Callable[[], None]) -> None:
        """Call once the client has caught up; never if it leaves."""
        self._waiting.append(call)

    def resume_writing(self) -> None:
        super().resume_writing()
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = HTTPStatus.INTERNAL_SERVER_ERROR,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Aiohttp's answer in OpenAI's form. Raises ConnectionError if another answer has begun."""
        super().handle_error(request, status, exc, message)  # it logs, and raises if an answer has begun
        error = internal_error()
        if status < HTTPStatus.INTERNAL_SERVER_ERROR:
            reason = " ".join((message or HTTPStatus(status).phrase).split())
            error = BadRequestError(f"the request cannot be read: {reason[:300]}")
        answer = as_response(error_answer(error, new_request_id()))
        answer.force_close()
        return answer


async def invite_body(http: web.Request) -> web.StreamResponse | None:
    """Answer `Expect: 100-continue`: send the body, or an error at once if it is too large."""
    if (http.content_length or 0) > http.client_max_size:
        answer = as_response(error_answer(too_large(http), request_id_of(http.headers)))
        answer.force_close()  # the client may send the body all the same
        return answer
    if http.version >= HttpVersion11 and http.headers.get("expect", "").lower() == "100-continue":
        await http.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        http.writer.output_size = 0  # the answer itself has not begun
    return None


def too_large(http: web.Request) -> RequestTooLargeError:
    most = http.client_max_size
    return RequestTooLargeError(f"the request body is too large: {most} bytes are allowed (--max-body-mb)")


def as_response(answer: Answer) -> web.Response:
    """The answer as aiohttp's own response."""
    return web.Response(status=answer.status, body=answer.body, headers=answer.fields)
