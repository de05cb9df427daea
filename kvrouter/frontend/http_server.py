"""The HTTP side of a replica: its routes, its server, and how that ends.

connection ──plain request──> Completions.serve
└──anything else──> aiohttp: the same routes, and all others
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Any

import structlog
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from kvrouter.frontend import passthrough
from kvrouter.frontend.admin import Admin
from kvrouter.frontend.client import openai_errors, route
from kvrouter.frontend.client_connection import ClientConnection, invite_body
from kvrouter.frontend.completions import Completions
from kvrouter.frontend.listening import BACKLOG, Doors
from kvrouter.frontend.options import FrontendOptions
from kvrouter.frontend.plain_connection import Connections
from kvrouter.frontend.unsent import is_unsent

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


def application(completions: Completions, admin: Admin, options: FrontendOptions) -> web.Application:
    """Everything that a replica answers, but for the routes about routing."""
    app = web.Application(client_max_size=options.max_body_bytes, middlewares=[openai_errors])
    app.add_routes(
        [
            *(
                web.post(path, route(serve), expect_handler=invite_body)
                for path, serve in completions.routes().items()
            ),
            *(  # without HEAD: a worker's answer would have a length and no body, and be waited for
                web.get(path, route(partial(completions.serve, None)), allow_head=False)
                for path in passthrough.GET_ROUTES
            ),
            web.get("/v1/models", admin.models),
            web.get("/v1/models/{name:.+}", admin.model),
            web.get("/live", admin.live),
            web.get("/ready", admin.ready),
            web.get("/health", admin.health),
            web.get("/metrics", admin.metrics),
            web.get("/workers", admin.workers),
        ]
    )
    return app


@contextlib.asynccontextmanager
async def http_server(
    app: web.Application,
    doors: Doors,
    admin: Admin,
    completions: Completions,
    *,
    hurried: asyncio.Event | None,
    options: FrontendOptions,
) -> AsyncIterator[None]:
    """Serve at the doors; on the way out stop accepting, let what runs finish, cut off the rest."""
    logging.getLogger("aiohttp.server").addFilter(_is_our_fault)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=CUT_OFF_S)
    await runner.setup()
    loop = asyncio.get_running_loop()

    def connection() -> ClientConnection:  # for what is not plain
        assert runner.server is not None
        return ClientConnection(
            runner.server,
            loop=loop,
            access_log=None,  # AppRunner's own way to have none
            keepalive_timeout=KEEP_ALIVE_S,
        )

    connections = Connections(
        completions.routes(), connection, max_body_bytes=options.max_body_bytes, keep_alive_s=KEEP_ALIVE_S
    )

    def unread() -> int:
        handed_over = runner.server.connections if runner.server is not None else []
        return connections.unread + sum(is_unsent(one.transport) for one in handed_over)

    tls = doors.certificate and doors.certificate.context
    listen = partial(
        loop.create_server,
        connections.new,
        backlog=BACKLOG,
        ssl=tls,
        ssl_handshake_timeout=HANDSHAKE_S if tls else None,
        ssl_shutdown_timeout=KEEP_ALIVE_S if tls else None,  # it is also what a client gets to read the rest
    )
    own = doors.admin and await listen(sock=doors.admin)
    server = await listen(sock=doors.main, start_serving=False)
    opening = asyncio.create_task(_open(server, admin, waits=options.process.waits_until_ready))
    try:
        if not options.process.waits_until_ready:
            await opening
        yield
        opening.cancel()
        server.close()
        await asyncio.sleep(0)  # connections accepted just now begin
        await _drain(completions, unread, hurried, timeout_s=options.drain_timeout_s)
    finally:
        opening.cancel()
        server.close()  # also after an error inside
        if own is not None:
            own.close()
        connections.close()
        await runner.cleanup()


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
