"""The HTTP side of a replica: its routes, its two listeners, and how that ends.

connection ──plain request──> Completions.serve
└──anything else──> aiohttp: the same routes, and all others

Both listeners have all routes; the gate of each (operators.py) says who may ask what is for operators.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Self, cast

import structlog
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from kvrouter.frontend import passthrough
from kvrouter.frontend.admin import Admin
from kvrouter.frontend.aiohttp_connection import ClientConnection, invite_body
from kvrouter.frontend.aiohttp_requests import ARRIVING, HttpRoute, openai_errors, route
from kvrouter.frontend.completions import Completions
from kvrouter.frontend.flags.options import FrontendOptions
from kvrouter.frontend.operators import Gate, gate_of, open_gate
from kvrouter.frontend.sockets import BACKLOG, Doors
from kvrouter.relay.connection import Connections
from kvrouter.relay.request import ArrivingBytes
from kvrouter.relay.transport import is_unsent

log = structlog.get_logger()

KEEP_ALIVE_S = 75.0
"""Idle client connections; longer than what load balancers keep theirs (HAProxy, nginx: 60 s)."""

HANDSHAKE_S = 10.0
"""A client that does not finish its TLS handshake is not waited for."""

READY_LOOK_S = 0.05
"""How often a process that waits until it is ready looks whether it is."""

UNREAD_LOOK_S = 0.02
"""How often it is seen whether the last answers have been read, when a replica ends."""

CUT_OFF_S = 0.1
"""What requests that outlived the draining get to end in: once from us, twice from aiohttp (0: for ever)."""


class Site:
    """What a replica answers. `for_operators` are the routes that only they may ask."""

    def __init__(
        self,
        completions: Completions,
        admin: Admin,
        for_operators: Sequence[web.RouteDef],
        options: FrontendOptions,
    ) -> None:
        self.completions = completions
        self.admin = admin
        self._for_operators = for_operators
        self._max_body_bytes = options.max_body_bytes
        self.arriving = ArrivingBytes(options.max_body_bytes)

    def application(self, gate: Gate, metrics: HttpRoute) -> web.Application:
        """All routes behind a gate."""
        app = web.Application(client_max_size=self._max_body_bytes, middlewares=[openai_errors])
        app[ARRIVING] = self.arriving
        completions, admin = self.completions, self.admin
        app.add_routes(
            [
                *(
                    web.post(path, route(serve), expect_handler=invite_body)
                    for path, serve in completions.routes(gate).items()
                ),
                *(  # without HEAD: a worker's answer would have a length and no body, and be waited for
                    web.get(path, route(partial(completions.serve, None, gate)), allow_head=False)
                    for path in passthrough.GET_ROUTES
                ),
                web.get("/v1/models", admin.models),
                web.get("/v1/models/{name:.+}", admin.model),
                web.get("/live", admin.live),
                web.get("/ready", admin.ready),
                web.get("/health", admin.health),
                web.get("/metrics", metrics),
                *(_behind(gate, one) for one in self._for_operators),
            ]
        )
        return app


def _behind(gate: Gate, definition: web.RouteDef) -> web.RouteDef:
    """The same route, behind the gate."""

    async def serve(http: web.Request) -> web.StreamResponse:
        gate(f"{http.method} {http.path}", http.headers)
        return await cast(HttpRoute, definition.handler)(http)

    return web.route(definition.method, definition.path, serve, **definition.kwargs)


class _Listener:
    """The connections of one port: plain ones, and those handed over to aiohttp."""

    def __init__(self, site: Site, gate: Gate, metrics: HttpRoute, options: FrontendOptions) -> None:
        self._runner = web.AppRunner(
            site.application(gate, metrics), handler_cancellation=True, shutdown_timeout=CUT_OFF_S
        )
        self._loop = asyncio.get_running_loop()
        self._connections = Connections(
            site.completions.routes(gate),
            self._not_plain,
            max_body_bytes=options.max_body_bytes,
            arriving=site.arriving,
            keep_alive_s=KEEP_ALIVE_S,
        )

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        return self

    async def __aexit__(self, *_error: object) -> None:
        self._connections.close()
        await self._runner.cleanup()

    async def listen(
        self, sock: socket.socket, tls: ssl.SSLContext | None, *, start_serving: bool
    ) -> asyncio.Server:
        """A server whose clients are ours."""
        return await self._loop.create_server(
            self._connections.new,
            sock=sock,
            backlog=BACKLOG,
            start_serving=start_serving,
            ssl=tls,
            ssl_handshake_timeout=HANDSHAKE_S if tls else None,
            ssl_shutdown_timeout=KEEP_ALIVE_S if tls else None,  # also what a client gets to read the rest
        )

    @property
    def unread(self) -> int:
        """Connections whose clients have not read all of their answers."""
        handed_over = self._runner.server.connections if self._runner.server is not None else []
        return self._connections.unread + sum(is_unsent(one.transport) for one in handed_over)

    def _not_plain(self) -> ClientConnection:
        assert self._runner.server is not None
        return ClientConnection(
            self._runner.server,
            loop=self._loop,
            access_log=None,  # AppRunner's own way to have none
            keepalive_timeout=KEEP_ALIVE_S,
        )


@contextlib.asynccontextmanager
async def http_server(
    site: Site, doors: Doors, *, hurried: asyncio.Event | None, options: FrontendOptions
) -> AsyncIterator[None]:
    """Serve at the doors; on the way out stop accepting, let what runs finish, cut off the rest."""
    logging.getLogger("aiohttp.server").addFilter(_is_our_fault)
    gate, admin = gate_of(options.process.admin_key), site.admin
    tls = doors.certificate.context if doors.certificate is not None else None
    async with (
        _Listener(site, open_gate, admin.metrics, options) as operators,
        _Listener(site, gate, admin.clients_metrics, options) as clients,
    ):
        own = await operators.listen(doors.admin, tls, start_serving=True)
        server = await clients.listen(doors.main, tls, start_serving=False)
        opening = asyncio.create_task(_open(server, admin, waits=options.process.waits_until_ready))
        try:
            if not options.process.waits_until_ready:
                await opening
            yield
            opening.cancel()
            server.close()
            await asyncio.sleep(0)  # connections accepted just now begin
            await _drain(
                site.completions,
                lambda: operators.unread + clients.unread,
                hurried,
                timeout_s=options.drain_timeout_s,
            )
        finally:
            opening.cancel()
            server.close()  # also after an error inside
            own.close()


async def _open(server: asyncio.Server, admin: Admin, *, waits: bool) -> None:
    """Accept, where other processes do so meanwhile, only when ready."""
    while waits and not admin.is_ready():  # noqa: ASYNC110  # it becomes so by the clock, too
        await asyncio.sleep(READY_LOOK_S)
    await server.start_serving()


def _is_our_fault(record: logging.LogRecord) -> bool:
    """Whether aiohttp logs more than that a client speaks no proper HTTP (it is told so: 400)."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError | web.RequestPayloadError)


async def _drain(
    completions: Completions, unread: Callable[[], int], hurried: asyncio.Event | None, *, timeout_s: float
) -> None:
    """Let what runs finish until a second signal or the time's end; then cut off the rest.

    `unread` counts the connections whose clients have not read all of their answers.
    """
    idle = completions.idle
    hurry = hurried.wait() if hurried is not None else None
    await wait_for_any(_drained(idle, unread), hurry, timeout_s=timeout_s)
    if not idle.is_set():
        told = hurried is not None and hurried.is_set()
        why = "a second signal" if told else f"--drain-timeout {timeout_s:g} has passed"
        log.warning("frontend.cut_off", why=why)
        completions.cut_off()
        await wait_for_any(idle.wait(), timeout_s=CUT_OFF_S)
    if left := unread():
        log.warning("frontend.answers_cut_off", connections=left)


async def _drained(idle: asyncio.Event, unread: Callable[[], int]) -> None:
    """Return when every request is over and every client has read its answer."""
    await idle.wait()
    while unread():  # noqa: ASYNC110  # transports tell of their high-water mark only
        await asyncio.sleep(UNREAD_LOOK_S)


async def wait_for_any(*things: Coroutine[Any, Any, object] | None, timeout_s: float) -> None:
    """Wait until one of the things has come about, or the time has passed."""
    waiting = [asyncio.create_task(thing) for thing in things if thing is not None]
    try:
        await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
