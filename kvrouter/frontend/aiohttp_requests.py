"""Requests that aiohttp has read: what it parses, we serve, and write the answers ourselves.

web.Request ──> Request ──serve──> Served ──> AlreadyWritten
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeAlias

import msgspec
import structlog
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import HttpVersion10
from aiohttp.http_exceptions import BadHttpMessage

from kvrouter.errors import (
    BadRequestError,
    HttpVersionError,
    KvRouterError,
    NoRouteError,
    RequestStalledError,
    WrongMethodError,
)
from kvrouter.frontend.aiohttp_connection import ClientConnection, as_response, too_large
from kvrouter.frontend.bodies.openai import error_answer
from kvrouter.relay.answer import Served, internal_error
from kvrouter.relay.request import ArrivingBytes, Request, RequestHead, Serve, host_error, request_id_of
from kvrouter.relay.transport import reset

log = structlog.get_logger()

UNREAD_S = 75.0
"""A client that has not read its answer for so long has no use for another one."""

STALLED_S = 75.0
"""A client that sends nothing more of a body for so long is not waited for; the same on plain connections."""


ARRIVING = web.AppKey("arriving", ArrivingBytes)

HttpRoute: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


def json_response(body: object, status: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(body) + b"\n", status=status, content_type="application/json"
    )


class AiohttpClient:
    """The client behind a request, as relay.Client wants it."""

    def __init__(self, http: web.Request) -> None:
        self.is_http_10 = http.version <= HttpVersion10
        self.has_begun = False
        self._protocol = http.protocol

    def write(self, data: bytes) -> None:
        """Send; a client that has left is no error."""
        self.has_begun = True
        transport = self._protocol.transport
        if transport is not None:
            transport.write(data)

    @property
    def is_slow(self) -> bool:
        """Whether the transport's buffer is above its high-water mark."""
        return self._protocol.writing_paused

    def when_drained(self, call: Callable[[], None]) -> None:
        """Call once the buffer is below its low-water mark."""
        assert isinstance(self._protocol, ClientConnection)
        self._protocol.when_drained(call)


class AlreadyWritten(web.StreamResponse):
    """Tells aiohttp that the response has gone out, and whether the connection can be used again."""

    def __init__(self, served: Served) -> None:
        super().__init__(status=served.status)
        self._served = served
        self._client: web.BaseRequest | None = None

    @property
    def keep_alive(self) -> bool | None:
        """Whether aiohttp may wait for another request."""
        return self._served.keeps_alive

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Nothing to send."""
        self._client = request
        return None

    async def write_eof(self, _data: bytes = b"") -> None:
        """Nothing to send; if the answer is not whole, the connection is torn."""
        if self._served.needs_reset and self._client is not None and self._client.transport is not None:
            reset(self._client.transport)


def from_aiohttp(http: web.Request) -> Request:
    """The request as the request path sees it."""
    fields = [(name.lower(), value) for name, value in http.headers.items()]
    is_origin = http.raw_path.startswith("/")  # the form that servers are asked in; else a proxy is
    path = http.raw_path if is_origin else http.rel_url.raw_path_qs
    head = RequestHead(http.method, path, fields, wants_keep_alive=http.keep_alive)
    return Request(head, AiohttpClient(http), arriving=partial(read_body, http))


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


def route(serve: Serve) -> HttpRoute:
    """What serves requests, as aiohttp calls it."""

    async def serve_http(http: web.Request) -> web.StreamResponse:
        request = from_aiohttp(http)
        served = await serve(request)
        if served.keeps_alive and request.client.is_slow:
            # else a client that sends requests and reads no answers would fill our memory
            drained = asyncio.Event()
            request.client.when_drained(drained.set)
            try:
                async with asyncio.timeout(UNREAD_S):
                    await drained.wait()
            except TimeoutError:
                served = Served(served.status, keeps_alive=False, needs_reset=True)
        return AlreadyWritten(served)

    return serve_http


def _head_error(request: web.Request) -> KvRouterError | None:
    """Why the request is refused, whatever it asks for; aiohttp looks neither at hosts nor at the version."""
    if request.version.major != 1:
        return HttpVersionError("HTTP/1.1 is spoken here")
    trouble = host_error(request.headers.getall("host", []), is_http_10=request.version <= HttpVersion10)
    return BadRequestError(trouble) if trouble else None


@web.middleware
async def openai_errors(request: web.Request, handler: HttpRoute) -> web.StreamResponse:
    """Unknown routes and our own bugs are answered in OpenAI's form too."""
    if refusal := _head_error(request):
        answer = error_answer(refusal, request_id_of(request.headers))
        AiohttpClient(request).write(answer.encode(keeps_alive=False))  # aiohttp would answer as HTTP/2.0
        return AlreadyWritten(Served(refusal.status, keeps_alive=False))
    try:
        return await handler(request)
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        wrong = WrongMethodError(f"{request.method} {request.path}: use {allowed}")
        response = as_response(error_answer(wrong, request_id_of(request.headers)))
        response.headers["allow"] = allowed
        return response
    except web.HTTPException as error:
        kind = NoRouteError if error.status == 404 else KvRouterError
        trouble = kind(f"{request.method} {request.path}: {error.reason}")
    except KvRouterError as error:
        trouble = error
    except Exception:
        log.exception("request.failed", path=request.path)
        trouble = internal_error()
    return as_response(error_answer(trouble, request_id_of(request.headers)))
