"""The HTTP side of a replica: its routes, its two ports, and its drain.

connection ──plain request──> Completions.serve
└──anything else──> aiohttp: the same routes, and all others

Both ports, the clients' and the admin listener, have all routes. The gate of each port (operators.py) decides
who may use the routes that are for operators.
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
from kvrouter.frontend.sockets import BACKLOG, Listeners
from kvrouter.relay.connection import Connections
from kvrouter.relay.request import ArrivingBytes
from kvrouter.relay.transport import is_unsent

log = structlog.get_logger()

# Idle client connections stay open this long. Load balancers close theirs after 60 s (HAProxy, nginx): the
# side that sends requests must close first, or a request may meet a closing connection.
KEEP_ALIVE_S = 75.0

# A client that does not finish its TLS handshake is disconnected after this long.
HANDSHAKE_S = 10.0

# How often a process that waits until it is ready checks whether it is. Sometimes only the clock makes it
# ready (--ready-timeout), and no event marks that.
READY_LOOK_S = 0.05

# How often a draining replica checks whether clients have read their answers: transports report only when
# their buffers fall below the low-water mark, not when they are empty.
UNREAD_LOOK_S = 0.02

# Time that requests still running after the drain get to finish: once here, and twice in aiohttp (3.14),
# where 0 means no limit.
CUT_OFF_S = 0.1


class Site:
    """The routes of a replica. `for_operators` are the routes behind the gate."""

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
        """All routes of a port, behind its gate."""
        app = web.Application(client_max_size=self._max_body_bytes, middlewares=[openai_errors])
        app[ARRIVING] = self.arriving
        completions, admin = self.completions, self.admin
        app.add_routes(
            [
                *(
                    web.post(path, route(serve), expect_handler=invite_body)
                    for path, serve in completions.routes(gate).items()
                ),
                *(  # without HEAD: a worker's answer to it has a length and no body, and would never end
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
    async def serve(http: web.Request) -> web.StreamResponse:
        gate(f"{http.method} {http.path}", http.headers)
        return await cast(HttpRoute, definition.handler)(http)

    return web.route(definition.method, definition.path, serve, **definition.kwargs)


class _Port:
    """The connections of one port: plain ones, and the ones handed over to aiohttp."""

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
        """Accept connections on the socket."""
        return await self._loop.create_server(
            self._connections.new,
            sock=sock,
            backlog=BACKLOG,
            start_serving=start_serving,
            ssl=tls,
            ssl_handshake_timeout=HANDSHAKE_S if tls else None,
            # The client reads the rest of its answer meanwhile; asyncio's default is 30 s.
            ssl_shutdown_timeout=KEEP_ALIVE_S if tls else None,
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
            access_log=None,  # as AppRunner does it without an access log
            keepalive_timeout=KEEP_ALIVE_S,
        )


@contextlib.asynccontextmanager
async def http_server(
    site: Site, listeners: Listeners, *, hurried: asyncio.Event | None, options: FrontendOptions
) -> AsyncIterator[None]:
    """Serve on the listeners. On exit stop accepting, let running requests finish, cut off the rest."""
    logging.getLogger("aiohttp.server").addFilter(_is_our_fault)
    gate, admin = gate_of(options.process.admin_key), site.admin
    tls = listeners.certificate.context if listeners.certificate is not None else None
    async with (
        _Port(site, open_gate, admin.metrics, options) as operators,
        _Port(site, gate, admin.clients_metrics, options) as clients,
    ):
        admin_server = await operators.listen(listeners.admin, tls, start_serving=True)
        server = await clients.listen(listeners.main, tls, start_serving=False)
        opening = asyncio.create_task(_open(server, admin, waits=options.process.waits_until_ready))
        try:
            if not options.process.waits_until_ready:
                await opening
            yield
            opening.cancel()
            server.close()
            await asyncio.sleep(0)  # lets connections that were accepted just now begin
            await _drain(
                site.completions,
                lambda: operators.unread + clients.unread,
                hurried,
                timeout_s=options.drain_timeout_s,
            )
        finally:
            opening.cancel()
            server.close()  # again, if an error inside skipped the first call
            admin_server.close()


async def _open(server: asyncio.Server, admin: Admin, *, waits: bool) -> None:
    """Accept connections; if other processes share the port, only once this one is ready."""
    while waits and not admin.is_ready():  # noqa: ASYNC110  # the clock alone may make it ready
        await asyncio.sleep(READY_LOOK_S)
    await server.start_serving()


def _is_our_fault(record: logging.LogRecord) -> bool:
    """Whether aiohttp logs more than a client's invalid HTTP, which is answered with 400 and not logged."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError | web.RequestPayloadError)


async def _drain(
    completions: Completions, unread: Callable[[], int], hurried: asyncio.Event | None, *, timeout_s: float
) -> None:
    """Let running requests finish until `hurried` is set or `timeout_s` has passed; then cut off the rest.

    `unread` counts the connections whose clients have not read all of their answers.
    """
    idle = completions.idle
    hurry = hurried.wait() if hurried is not None else None
    await wait_for_any(_drained(idle, unread), hurry, timeout_s=timeout_s)
    if not idle.is_set():
        is_hurried = hurried is not None and hurried.is_set()
        reason = "a second signal" if is_hurried else f"--drain-timeout {timeout_s:g} has passed"
        log.warning("frontend.cut_off", reason=reason)
        completions.cut_off()
        await wait_for_any(idle.wait(), timeout_s=CUT_OFF_S)
    if left := unread():
        log.warning("frontend.answers_cut_off", connections=left)


async def _drained(idle: asyncio.Event, unread: Callable[[], int]) -> None:
    """Return when every request has ended and every client has read its answer."""
    await idle.wait()
    while unread():  # noqa: ASYNC110  # see UNREAD_LOOK_S
        await asyncio.sleep(UNREAD_LOOK_S)


async def wait_for_any(*coroutines: Coroutine[Any, Any, object] | None, timeout_s: float) -> None:
    """Wait until one of the coroutines has returned, or the time has passed; cancel the rest."""
    waiting = [asyncio.create_task(each) for each in coroutines if each is not None]
    try:
        await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
