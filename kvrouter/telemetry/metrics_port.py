"""`--metrics-port`: the metrics of a process on a port of their own, of an agent or of a frontend."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from kvrouter.errors import ConfigError
from kvrouter.settings.declare import Settings, setting

Exposition: TypeAlias = Callable[[Sequence[str]], Awaitable[bytes]]
"""The metrics as text; only those of these names, if there are any."""


@dataclass(frozen=True, slots=True)
class MetricsPortOptions(Settings):
    heading = "Operators"

    port: int = setting(
        0,
        "serve the process's own metrics at /metrics on this port, without a key; 0: not served",
        name="metrics-port",
        metavar="PORT",
        least=0,
        most=65535,
    )
    host: str = setting("127.0.0.1", "address of --metrics-port", name="metrics-host", metavar="ADDRESS")


@contextlib.asynccontextmanager
async def metrics_port(
    at: MetricsPortOptions, exposition: Exposition, *, is_shared: bool = False
) -> AsyncIterator[None]:
    """Serve GET /metrics while inside; port 0: nothing is served. Raises ConfigError.

    `is_shared`: other processes listen on the same port, and each can answer for all.
    """
    if not at.port:
        yield
        return

    async def metrics(request: web.Request) -> web.Response:
        body = await exposition(request.query.getall("name[]", []))
        return web.Response(body=body, headers={"content-type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, at.host, at.port, reuse_port=is_shared or None).start()
        except OSError as error:
            raise ConfigError(
                f"--metrics-port: cannot listen on {at.host}:{at.port}: {error.strerror}"
            ) from None
        yield
    finally:
        await runner.cleanup()
