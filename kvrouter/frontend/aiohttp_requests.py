"""Requests that aiohttp has parsed. The router serves them and writes the answers to the socket itself.

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

# A client that has not read its answer for this long is disconnected. As long as on plain connections.
UNREAD_S = 75.0

# A client that sends no more of a body for this long is disconnected. As long as on plain connections.
# aiohttp (3.14) has no such limit: stopped bodies would hold up the drain of a replica.
STALLED_S = 75.0


ARRIVING = web.AppKey("arriving", ArrivingBytes)

HttpRoute: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


def json_response(body: object, status: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(body) + b"\n", status=status, content_type="application/json"
    )


class AiohttpClient:
    """The ClientSide (relay/exchange.py) of a request that aiohttp has parsed."""

    def __init__(self, http: web.Request) -> None:
        self.is_http_10 = http.version <= HttpVersion10
        self.has_begun = False
        self._protocol = http.protocol

    def write(self, data: bytes) -> None:
        """Send. If the client has left, this does nothing."""
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
    """A response that aiohttp takes for sent, with or without keep-alive."""

    def __init__(self, served: Served) -> None:
        super().__init__(status=served.status)
        self._served = served
        self._client: web.BaseRequest | None = None

    @property
    def keep_alive(self) -> bool | None:
        """Whether aiohttp may wait for another request."""
        return self._served.keeps_alive

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Send nothing."""
        self._client = request
        return None

    async def write_eof(self, _data: bytes = b"") -> None:
        """Send nothing, but reset the connection if the answer is incomplete."""
        if self._served.needs_reset and self._client is not None and self._client.transport is not None:
            reset(self._client.transport)


def from_aiohttp(http: web.Request) -> Request:
    """The request as the request path sees it."""
    fields = [(name.lower(), value) for name, value in http.headers.items()]
    is_origin = http.raw_path.startswith("/")  # else the absolute form, which clients send to proxies
    path = http.raw_path if is_origin else http.rel_url.raw_path_qs
    head = RequestHead(http.method, path, fields, wants_keep_alive=http.keep_alive)
    return Request(head, AiohttpClient(http), arriving=partial(read_body, http))


async def read_body(http: web.Request) -> bytes:
    """The whole body. Raises a subclass of BadRequestError, or BodiesFullError."""
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
            raise RequestStalledError(f"no more of the request body arrived for {STALLED_S:g} s") from None
        except (web.RequestPayloadError, BadHttpMessage) as error:
            raise BadRequestError(f"the request body cannot be read: {error}") from None
        if not piece:
            return
        arriving.take(len(piece))
        body += piece
        if len(body) > http.client_max_size:
            raise too_large(http)


def route(serve: Serve) -> HttpRoute:
    """Make an aiohttp route of a way to serve requests."""

    async def serve_http(http: web.Request) -> web.StreamResponse:
        request = from_aiohttp(http)
        served = await serve(request)
        if served.keeps_alive and request.client.is_slow:
            # Else a client that sends requests and reads no answers would fill the memory.
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
    """Why the request is rejected on any route. aiohttp (3.14) checks neither `host` nor the version."""
    if request.version.major != 1:
        return HttpVersionError(f"HTTP/{request.version.major} is not supported: use HTTP/1.1")
    wrong = host_error(request.headers.getall("host", []), is_http_10=request.version <= HttpVersion10)
    return BadRequestError(wrong) if wrong else None


@web.middleware
async def openai_errors(request: web.Request, handler: HttpRoute) -> web.StreamResponse:
    """Answer unknown routes and bugs in OpenAI's form as well."""
    if error := _head_error(request):
        answer = error_answer(error, request_id_of(request.headers))
        # Written here, since aiohttp's own response would have the version of the request, HTTP/2.0.
        AiohttpClient(request).write(answer.encode(keeps_alive=False))
        return AlreadyWritten(Served(error.status, keeps_alive=False))
    try:
        return await handler(request)
    except web.HTTPMethodNotAllowed as wrong_method:
        allowed = ", ".join(sorted(wrong_method.allowed_methods))
        wrong = WrongMethodError(f"{request.method} {request.path}: use {allowed}")
        response = as_response(error_answer(wrong, request_id_of(request.headers)))
        response.headers["allow"] = allowed
        return response
    except web.HTTPException as no_route:
        kind = NoRouteError if no_route.status == 404 else KvRouterError
        error = kind(f"{request.method} {request.path}: {no_route.reason}")
    except KvRouterError as expected:
        error = expected
    except Exception:
        log.exception("request.failed", path=request.path)
        error = internal_error()
    return as_response(error_answer(error, request_id_of(request.headers)))
