"""The admin listener: the same routes as on the clients' port, served by aiohttp.

web.Request ──> Request ──AdminGate──> Routes ──serve──> bytes of an answer ──> web.StreamResponse
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from urllib.parse import urlsplit

from aiohttp import HttpVersion10, HttpVersion11, web

from kvrouter.errors import BadRequestError, KvRouterError
from kvrouter.frontend.operators.rights import AdminGate, check_type
from kvrouter.frontend.requests.engine_routes import error_answer
from kvrouter.relay.answer import Served
from kvrouter.relay.begun import Begun
from kvrouter.relay.codings import codings_of, too_large, unpack
from kvrouter.relay.connection import Refused
from kvrouter.relay.request import END, Request, RequestHead, host_error, request_id_of, without_root
from kvrouter.relay.request_parser import unexpected, unknown_version, unreadable
from kvrouter.relay.routes import Routes

# Bytes of an answer that its client has not read yet: beyond this its worker is paused.
UNSENT_BYTES = 64 * 1024
_CONTINUE = "100-continue"


def application(
    routes: Routes,
    gate: AdminGate,
    max_body_bytes: int,
    on_refused: Refused = lambda *_: None,
    root_path: str = "",
) -> web.Application:
    """All requests that `gate` lets in are routed by `routes`."""
    app = web.Application(client_max_size=max_body_bytes)

    async def serve(http: web.Request) -> web.StreamResponse:
        client = AdminClient(http)
        request = Request(_head(http, root_path), client, arriving=partial(_read, http))
        sending = asyncio.create_task(client.send_answer())
        try:
            served = await _serve(routes, gate, http, request, on_refused)
            client.end()
            await sending
        finally:
            sending.cancel()
        if served.needs_reset and http.transport is not None:
            http.transport.abort()
        return client.response

    any_path = r"/{path:[\s\S]*}"  # . is no line end, which %0A is
    app.router.add_route("*", any_path, serve, expect_handler=_invite)
    return app


async def _serve(
    routes: Routes, gate: AdminGate, http: web.Request, request: Request, on_refused: Refused
) -> Served:
    try:
        _check(http)
        gate.check(request, hosts=_hosts(http), own_address=_own_address(http))
        serve = routes.find(request.head.method, request.head.path)
        check_type(request, has_body=http.body_exists)
    except KvRouterError as error:
        request_id = request_id_of(request.headers)
        on_refused(request, request_id, error, request.client.address)
        return request.reply(error_answer(request.head.route, error, request_id))
    return await serve(request)


async def _invite(http: web.Request) -> None:
    """Invite the body. aiohttp would answer another expectation itself, as a text; `_check` rejects it."""
    if http.version >= HttpVersion11 and http.headers["expect"].lower() == _CONTINUE:
        await http.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        http.writer.output_size = 0  # else aiohttp takes it for the beginning of the answer


def _check(http: web.Request) -> None:
    """Raise what the clients' port raises. aiohttp (3.14) checks neither `host` nor the version."""
    expected = http.headers.get("expect", "")
    if expected.lower() not in {"", _CONTINUE} and http.version >= HttpVersion11:
        raise unexpected(expected)
    if http.version.major != 1:
        raise unknown_version(http.version.major)
    if wrong := host_error(http.headers.getall("host", []), is_http_10=http.version <= HttpVersion10):
        raise BadRequestError(wrong)


def _hosts(http: web.Request) -> list[str]:
    """The hosts that a request names: in its header, and in its target if that is absolute."""
    hosts = http.headers.getall("host", [])
    in_target = "" if http.raw_path.startswith("/") else urlsplit(http.raw_path).netloc
    return [*hosts, in_target] if in_target else hosts


def _own_address(http: web.Request) -> str:
    name = http.transport.get_extra_info("sockname") if http.transport is not None else None
    return name[0] if name else ""


def _head(http: web.Request, root_path: str) -> RequestHead:
    fields = [(name.lower(), value) for name, value in http.headers.items()]
    is_origin = http.raw_path.startswith("/")  # else the absolute form, which clients send to proxies
    path = http.raw_path if is_origin else http.rel_url.raw_path_qs
    path = without_root(path, root_path)
    return RequestHead(http.method, path, fields, wants_keep_alive=http.keep_alive)


async def _read(http: web.Request) -> bytes:
    """The whole body, unpacked. Raises BadRequestError or RequestTooLargeError."""
    if (http.content_length or 0) > http.client_max_size:
        raise too_large(http.client_max_size)
    codings = codings_of(",".join(http.headers.getall("content-encoding", [])))
    try:
        packed = await http.read()
        if not codings or not packed:
            return packed
        return await asyncio.to_thread(unpack, packed, codings, http.client_max_size)
    except web.HTTPRequestEntityTooLarge:
        raise too_large(http.client_max_size) from None
    except web.RequestPayloadError as error:
        raise unreadable(error) from None


class AdminClient:
    """The ClientSide (relay/exchange.py) of a request that aiohttp has read.

    It gets an answer for HTTP/1.0, as bytes: aiohttp makes chunks itself.
    """

    is_http_10 = True

    def __init__(self, http: web.Request) -> None:
        self.has_begun = False
        self.begun: Begun | None = None
        self.address = http.remote or ""
        self.response = web.StreamResponse()
        self._http = http
        self._pieces: list[bytes] = []
        self._news = asyncio.Event()
        self._is_over = False
        self._waiting: list[Callable[[], None]] = []

    def write(self, data: bytes) -> None:
        """Send. If the client has left, this does nothing."""
        self.has_begun = True
        self._pieces.append(data)
        self._news.set()

    @property
    def is_slow(self) -> bool:
        return sum(map(len, self._pieces)) > UNSENT_BYTES

    def when_drained(self, call: Callable[[], None]) -> None:
        """Call once the client has caught up; never if it leaves."""
        self._waiting.append(call)

    def lend(self, _begin: object) -> None:
        """The library's answers are not passed on as they are."""

    def end(self) -> None:
        """The answer is complete."""
        self._is_over = True
        self._news.set()

    async def send_answer(self) -> None:
        """Pass on what is written, until the answer is complete."""
        is_prepared = False
        while self._pieces or not self._is_over:
            await self._news.wait()
            self._news.clear()
            data, self._pieces = b"".join(self._pieces), []
            if data and not is_prepared:
                head, _, data = data.partition(END)  # one write has the whole head
                self.response, is_prepared = _response(head), True
                await self.response.prepare(self._http)
            if data:
                await self.response.write(data)
            waiting, self._waiting = self._waiting, []
            for call in waiting:
                call()


def _response(head: bytes) -> web.StreamResponse:
    """Aiohttp's form of a head that the router or a worker has written."""
    status_line, *lines = head.decode("utf-8", "surrogateescape").split("\r\n")
    _, status, reason = status_line.split(" ", 2)
    response = web.StreamResponse(status=int(status), reason=reason)
    for name, _, value in (line.partition(": ") for line in lines):
        if name != "connection":
            response.headers.add(name, value)
        elif value == "close":
            response.force_close()
    return response
