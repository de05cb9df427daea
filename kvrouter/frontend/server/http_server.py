"""The HTTP side of a replica: its routes, its two ports, and its drain.

clients' port ──> ClientConnection (relay/connection.py) ──┐
                                                           ├──> the same routes
admin listener ──> aiohttp (admin_listener.py) ────────────┘

Both ports have all routes. The gates (operators/rights.py) decide who may use them: on the clients' port
those that are for operators, on the admin listener all but the probes'.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import structlog
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from kvrouter.frontend.keys.clients import ClientKeys
from kvrouter.frontend.operators.admin import MODEL_PATH, Admin
from kvrouter.frontend.operators.admin_listener import application
from kvrouter.frontend.operators.openapi import OPENAPI_PATH, document
from kvrouter.frontend.operators.rights import (
    AdminGate,
    AdminKey,
    Gate,
    KeyGate,
    Rights,
    has_operators_routes,
    open_gate,
)
from kvrouter.frontend.operators.views import View, answering, json_answer
from kvrouter.frontend.requests.completions import Completions
from kvrouter.frontend.requests.engine_routes import why_closed
from kvrouter.frontend.requests.exchanges import InFlight
from kvrouter.frontend.server.sockets import BACKLOG, Listeners
from kvrouter.frontend.settings import FrontendOptions
from kvrouter.relay.answer import Answer
from kvrouter.relay.connection import Connections
from kvrouter.relay.request import ArrivingBytes, Request, Serve
from kvrouter.relay.routes import Routes

log = structlog.get_logger()

# Idle client connections stay open this long. Load balancers close theirs after 60 s (HAProxy, nginx): the
# side that sends requests must close first, or a request may meet a closing connection.
KEEP_ALIVE_S = 75.0

# A client that does not finish its TLS handshake is disconnected after this long.
HANDSHAKE_S = 10.0

# How often a process that waits until it is ready checks whether it is. Sometimes only the clock makes it
# ready (--ready-timeout-s), and no event marks that.
READY_LOOK_S = 0.05

# How often a draining replica checks whether clients have read their answers: transports report only when
# their buffers fall below the low-water mark, not when they are empty.
UNREAD_LOOK_S = 0.02

# Time that requests still running after the drain get to finish: once here, and twice in aiohttp (3.14),
# where 0 means no limit.
CUT_OFF_S = 0.1


class Site:
    """The routes of a replica. `for_operators` are the routes behind the gate: method, path and view."""

    def __init__(
        self,
        completions: Completions,
        admin: Admin,
        for_operators: Sequence[tuple[str, str, View]],
        options: FrontendOptions,
        keys: ClientKeys | None = None,
    ) -> None:
        self._keys = keys
        self.completions = completions
        self.admin = admin
        self._for_operators = for_operators
        self._options = options.clients
        self.max_body_bytes = options.max_body_bytes
        self.root_path = options.root_path
        self.port_routes: Callable[[Rights], Routes] | None = None
        """What the clients' port serves in place of a frontend's routes."""

    def for_clients(self, rights: Rights) -> Routes:
        """The routes of the clients' port."""
        if self.port_routes is not None:
            return self.port_routes(rights)
        metrics = self.admin.clients_metrics if "metrics" in self._options.expose else None
        return self._routes(rights, metrics)

    def clients_rights(self, gate: KeyGate) -> Rights:
        """What clients may do and see."""
        return Rights(gate, gate.key, self._options, self._keys)

    def for_admin(self, key: AdminKey) -> Routes:
        """The routes of the admin listener."""
        return self._routes(Rights(open_gate, key, keys=self._keys), self.admin.metrics)

    def _routes(self, rights: Rights, metrics: View | None) -> Routes:
        """All routes of a port, behind its gate. `metrics`: None, if it does not show them."""
        why = why_closed if metrics is not None else _without_metrics
        routes, admin, completions, gate = Routes(why), self.admin, self.completions, rights.gate
        completions.add_routes(routes, rights)
        views: dict[str, tuple[View, Gate]] = {
            "/v1/models": (partial(admin.models, key_of=rights.key_of), rights.need_key),
            MODEL_PATH: (partial(admin.model, key_of=rights.key_of), rights.need_key),
            "/live": (admin.live, open_gate),
            "/ready": (partial(admin.ready, sees=rights.sees_workers), open_gate),
            "/health": (partial(admin.health, sees=rights.sees_workers), rights.need_key),
        }
        if metrics is not None:
            views["/metrics"] = metrics, rights.need_operator
        for path, (view, its_gate) in views.items():
            _add(routes, "GET", path, answering(view, rights, its_gate, completions.readers.refused))
        for method, path, view in self._for_operators:
            _add(routes, method, path, answering(view, rights, gate, completions.readers.refused))
        if self.root_path:
            _add(routes, "GET", "", answering(self._root, rights, open_gate, completions.readers.refused))
        view = self._described(routes, gate)
        _add(routes, "GET", OPENAPI_PATH, answering(view, rights, open_gate, completions.readers.refused))
        return routes

    def _described(self, routes: Routes, gate: Gate) -> View:
        """/openapi.json: without the routes for operators while the gate lets no client in."""
        listed = {(method, path) for method, path in routes.listed() if path and method != "HEAD"}
        listed.add(("GET", OPENAPI_PATH))
        root = self.root_path
        whole = _document(frozenset(listed), is_keyed=gate is not open_gate, root_path=root)
        for_operators = {(method, path) for method, path, _ in self._for_operators}
        part = _document(frozenset(listed - for_operators), is_keyed=False, root_path=root)

        async def view(_request: Request) -> Answer:
            return whole if has_operators_routes(gate) else part

        return view

    async def _root(self, _request: Request) -> Answer:
        """The root path without its last slash: the page's links are relative to the path with it."""
        return Answer(307, b"", {"location": f"{self.root_path.rpartition('/')[2]}/"})


@functools.cache
def _document(routes: frozenset[tuple[str, str]], *, is_keyed: bool, root_path: str) -> Answer:
    """Kept: it is slow to make, and most ports have the same."""
    return json_answer(document(routes, is_keyed=is_keyed, root_path=root_path))


def _without_metrics(path: str) -> str:
    if path == "/metrics":
        return "not on this port: it is left out of --expose; see --metrics-port, or the admin listener"
    return why_closed(path)


def _add(routes: Routes, method: str, path: str, serve: Serve) -> None:
    routes.add(method, path, serve)
    if method == "GET":
        routes.add("HEAD", path, serve)


@contextlib.asynccontextmanager
async def _clients_port(
    site: Site, sock: socket.socket, tls: ssl.SSLContext | None, gate: KeyGate
) -> AsyncIterator[tuple[asyncio.Server, Connections]]:
    """The clients' port. It does not accept connections yet."""
    rights = site.clients_rights(gate)
    connections = Connections(
        site.for_clients(rights),
        rights.unread_answer,
        max_body_bytes=site.max_body_bytes,
        arriving=ArrivingBytes(site.max_body_bytes),
        keep_alive_s=KEEP_ALIVE_S,
        on_refused=site.completions.readers.refused,
        root_path=site.root_path,
    )
    server = await _listen(connections.new, sock, tls)
    try:
        yield server, connections
    finally:
        server.close()
        connections.close()


@contextlib.asynccontextmanager
async def _admin_listener(
    site: Site, sock: socket.socket, tls: ssl.SSLContext | None, gate: AdminGate
) -> AsyncIterator[asyncio.Server]:
    """The admin listener. It does not accept connections yet."""
    runner = web.AppRunner(
        application(
            site.for_admin(gate.key),
            gate,
            site.max_body_bytes,
            site.completions.readers.refused,
            site.root_path,
        ),
        handler_cancellation=True,
        auto_decompress=False,
        access_log=None,
        keepalive_timeout=KEEP_ALIVE_S,
        shutdown_timeout=CUT_OFF_S,
    )
    await runner.setup()
    assert runner.server is not None
    server = await _listen(runner.server, sock, tls)
    try:
        yield server
    finally:
        server.close()
        await runner.cleanup()


async def _listen(
    new_connection: Callable[[], asyncio.BaseProtocol], sock: socket.socket, tls: ssl.SSLContext | None
) -> asyncio.Server:
    return await asyncio.get_running_loop().create_server(
        new_connection,
        sock=sock,
        backlog=BACKLOG,
        start_serving=False,
        ssl=tls,
        ssl_handshake_timeout=HANDSHAKE_S if tls else None,
        # The client reads the rest of its answer meanwhile; asyncio's default is 30 s.
        ssl_shutdown_timeout=KEEP_ALIVE_S if tls else None,
    )


@contextlib.asynccontextmanager
async def http_server(
    site: Site,
    listeners: Listeners,
    gate: KeyGate,
    admin_gate: AdminGate,
    *,
    hurried: asyncio.Event | None,
    options: FrontendOptions,
) -> AsyncIterator[None]:
    """Serve on the listeners. On exit stop accepting, let running requests finish, cut off the rest.

    `gate`: that of the clients' port.
    """
    logging.getLogger("aiohttp.server").addFilter(_is_our_fault)
    admin = site.admin
    shown = listeners.certificate
    tls, for_clients = (shown.context, shown.for_clients) if shown is not None else (None, None)
    async with (
        _admin_listener(site, listeners.admin, tls, admin_gate) as admin_server,
        _clients_port(site, listeners.main, for_clients, gate) as (server, connections),
    ):
        await admin_server.start_serving()
        opening = asyncio.create_task(_open(server, admin, waits=options.process.waits_until_ready))
        try:
            if not options.process.waits_until_ready:
                await opening
            yield
            opening.cancel()
            server.close()
            await asyncio.sleep(0)  # lets connections that were accepted just now begin
            await _drain(
                site.completions.in_flight,
                lambda: connections.unread,
                hurried,
                timeout_s=options.drain_timeout_s,
            )
        finally:
            opening.cancel()


async def _open(server: asyncio.Server, admin: Admin, *, waits: bool) -> None:
    """Accept connections; if other processes share the port, only once this one is ready."""
    while waits and not admin.may_open():  # noqa: ASYNC110  # the clock alone may make it ready
        await asyncio.sleep(READY_LOOK_S)
    await server.start_serving()


def _is_our_fault(record: logging.LogRecord) -> bool:
    """Whether aiohttp logs more than a client's invalid HTTP, which is answered with 400 and not logged."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError | web.RequestPayloadError)


async def _drain(
    in_flight: InFlight, unread: Callable[[], int], hurried: asyncio.Event | None, *, timeout_s: float
) -> None:
    """Let running requests finish until `hurried` is set or `timeout_s` has passed; then cut off the rest.

    `unread` counts the connections whose clients have not read all of their answers.
    """
    idle = in_flight.idle
    hurry = hurried.wait() if hurried is not None else None
    await wait_for_any(_drained(idle, unread), hurry, timeout_s=timeout_s)
    if not idle.is_set():
        is_hurried = hurried is not None and hurried.is_set()
        reason = "a second signal" if is_hurried else f"--drain-timeout-s {timeout_s:g} has passed"
        log.warning("frontend.cut_off", reason=reason)
        in_flight.cut_off()
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
